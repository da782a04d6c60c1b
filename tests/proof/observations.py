"""What is seen of a cluster at one instant, read without the product's code; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Want:
    """What a pod's container requests, by the rules of its vocabulary."""

    gpus: int = 1
    mib: int = 0
    """Memory of each device."""
    cores: int = 0
    """Percent of each device's cores."""
    exclusive: bool = False
    mig: bool = False
    """It needs MIG instances of at least this size."""
    either: bool = False
    """It takes a MIG instance or a share."""
    memory: str = ""
    """What it demands to hold its memory: a device in another mode does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What every device has."""

    mib: int
    slots: int
    layouts: Mapping[str, tuple[int, ...]]
    """In MIG mode: by layout, the memory of the instance at each position."""
    cores: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPod:
    """A pod as the API server shows it."""

    uid: str
    name: str
    created_at: float
    want: Want
    node: str = ""
    phase: str = "Pending"
    deleted: bool = False
    """It has a deletion timestamp."""
    forged: bool = False
    gang: str = ""
    gang_min: int = 0
    lease_node: str = ""
    """The node of the lease's copy that our Binding wrote, if there is one."""
    devices: tuple[str, ...] = ()
    """UUIDs of that copy."""
    copied_mib: tuple[int, ...] = ()
    """Memory of each of them in that copy."""
    reason: str = ""
    """Of its condition PodScheduled, if that is False."""
    message: str = ""
    runs: bool = False
    """A container runs."""
    priority: int = 0
    max_run_s: int | None = None
    """It ends after so long at the latest."""
    resized: bool = False
    spared: bool = False
    """No pod may be preferred to it: by its label, or by a PodDisruptionBudget."""
    announced: bool = False
    """Its eviction is announced."""
    spread: bool = False
    """It may not be on a device with some others."""
    failure: str = ""
    """Why it failed, as its status says."""
    of_claim: bool = False
    """It stands for a ResourceClaim, which kube-scheduler allocates in an order of its own."""

    @property
    def ended(self) -> bool:
        """Whether no container of it will run again."""
        return self.phase in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """A node as the API server shows it."""

    name: str
    cordoned: bool = False
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one container was given of one device."""

    pod: str
    node: str
    device: str
    mib: int
    cores: int
    exclusive: bool = False
    instance: str = ""
    """UUID of its MIG instance."""
    slices: range = range(0)
    """Memory slices of that instance, if they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareInstance:
    """A MIG instance that a device has."""

    uuid: str
    device: str
    mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGrant:
    """What an agent's checkpoint has recorded for one container of one device."""

    pod: str
    node: str
    container: str
    device: str
    mib: int
    cores: int
    slot: int | None
    fence: int
    activated_at: float
    exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLimits:
    """The limits in the region file of a container, which HAMi-core enforces.

    By position of its device; some vocabularies give one limit for all positions.
    """

    pod: str
    mib: tuple[int, ...]
    cores: tuple[int, ...]
    """With 100 there is no limit."""

    def of_devices(self, count: int) -> list[tuple[int, int]]:
        """Return the limits of so many devices."""
        return list(zip(self.mib, self.cores, strict=True))[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawShare:
    """A share of a lease, decoded from Redis."""

    container: str
    device: str
    mib: int
    cores: int
    slot: int
    """It is -1 if the share has none."""
    fence: int
    layout: str = ""
    """The MIG layout in which it is an instance, whose position is its slot."""
    memory: str = ""
    """What holds its memory."""
    mode: str = ""
    """In which its device is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLease:
    """A lease, decoded from Redis."""

    pod: str
    node: str
    state: str
    version: float
    created_at: float
    expires_at: float
    """Of a reservation; 0 later."""
    activated_at: float
    """0: it has not been active."""
    shares: tuple[RawShare, ...]
    gang: str = ""
    term: Mapping[str, int] = field(default_factory=dict)
    """How long its pod may run, as far as that is known."""
    waiting_mib: int | None = None
    """The smaller size for which it waits until less is in use."""

    @property
    def devices(self) -> frozenset[str]:
        """UUIDs of its shares' devices."""
        return frozenset(share.device for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawDevice:
    """A device, decoded from Redis."""

    uuid: str
    node: str
    healthy: bool
    """It takes new shares."""
    used_mib: int
    used_cores: int
    shares: int
    fence: int
    mib: int = 0
    slots: int = 0
    in_mig_mode: bool = False
    layout: str = ""
    """MIG layout of its leases."""
    is_claimed: bool = False
    """It is kept for a pod for which others are evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawClaim:
    """Devices that are kept for a pod."""

    pod: str
    node: str
    devices: frozenset[str]
    until: float
    """What others get of them has to end by then; 0: they get nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCharge:
    """One charge of a lease to a budget; times in milliseconds."""

    lease: str
    start_ms: int
    end_ms: int
    weight: int
    units: int
    kind: str
    window: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPreemption:
    """Leases that end early, for a waiting pod or gang."""

    id: str
    opened_at: float
    stage: str
    pods: tuple[str, ...]
    """That get what is freed."""
    gang: str
    least: int
    """Pods that the gang needs, or 1."""
    priority: int
    victims: Mapping[str, str | None]
    """By pod, what came of its eviction, or None before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLedger:
    """The contents of Redis."""

    ready: bool
    generation: str
    leases: Mapping[str, RawLease] = field(default_factory=dict)
    devices: Mapping[str, RawDevice] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    """Pods that were reported as gone."""
    cordoned: frozenset[str] = frozenset()
    """Nodes that are cordoned in the API server, as far as the ledger knows."""
    distrusted: frozenset[str] = frozenset()
    """Nodes that get no pods since messages of their agents are refused."""
    claims: Mapping[str, RawClaim] = field(default_factory=dict)
    """By pod."""
    starts: frozenset[str] = frozenset()
    """Pods whose start is planned."""
    preemptions: tuple[RawPreemption, ...] = ()
    """Those in progress."""
    charges: tuple[RawCharge, ...] = ()
    used_units: Mapping[str, int] = field(default_factory=dict)
    """Of each budget window."""
    keys: int = 0
    """Those that do not expire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All that was seen at `at`. What could not be read is None."""

    at: float
    """Unix seconds, before anything was read: containers in it ran then."""
    hardware: Hardware
    pods: Mapping[str, SeenPod] | None = None
    nodes: Mapping[str, SeenNode] | None = None
    grants: tuple[Grant, ...] = ()
    agents: tuple[AgentGrant, ...] = ()
    limits: Mapping[str, RegionLimits] = field(default_factory=dict)
    """Of running containers, by pod."""
    driver_limits: Mapping[tuple[str, str], int] | None = None
    """Limits of pods in MiB that the nodes' drivers have, by UID and device."""
    ledger: RawLedger | None = None
    mig_devices: frozenset[str] = frozenset()
    """Devices in MIG mode."""
    instances: Mapping[str, HardwareInstance] = field(default_factory=dict)
    """MIG instances that were there before or after the containers were read, by UUID."""
    evicted: Mapping[str, float] = field(default_factory=dict)
    """Pods whose eviction the API server has ever accepted from a binder, and when."""
    withdrawn: Mapping[str, float] = field(default_factory=dict)
    """Pods of which an Event has ever withdrawn a planned start, and when it last did."""
    denied: Mapping[str, str] = field(default_factory=dict)
    """By part, a request that the API server has ever denied to its account."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """By device, the node that it is in."""
    unready: Mapping[str, str] = field(default_factory=dict)
    """By part, what its /readyz answers if it is not ready; an empty text gives no reason."""
    faults: tuple[str, ...] = ()
    """The faults that are at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the parts use at one instant."""

    memory_mib: Mapping[str, int] = field(default_factory=dict)
    """Resident, by part."""
    keys: int = 0
    """In Redis, those that do not expire."""
