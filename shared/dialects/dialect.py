"""What a dialect is: a vendor's way of asking for a GPU, and how its users expect the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.model.device import Device, DeviceMode
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace
from shared.model.request import PodRequest

TRIGGER = "leasehold.dev/share"
"""Served where a dialect's own resource cannot be: it makes the kubelet call Allocate."""
TRIGGERS = 100
"""IDs per device of a resource that only makes the kubelet ask: as many shares fit a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAsks:
    """What one container says about resources, as whole numbers."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    init: bool = False
    sidecar: bool = False
    """An init container that stays: it runs beside those that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAsks:
    """What a pod says that a dialect may read."""

    namespace: Namespace
    containers: tuple[ContainerAsks, ...]
    """In spec order, init containers first."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    """`spec.schedulerName`: two dialects may share a resource name, and mean different things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The operator's choices that change how a request is read."""

    enabled: tuple[str, ...] = ()
    """Names of the dialects spoken; empty: all."""
    disabled: tuple[str, ...] = ()
    """Names of dialects that are not, of those."""
    policy: str = ""
    """Volcano's `deviceshare.SchedulePolicy`: empty, `binpack` or `spread`."""
    exclusive: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Volcano's `deviceshare.GPUExclusiveRules`: labels; pods with all of a rule's never meet."""
    node_policy: str = "binpack"
    """HAMi's `--node-scheduler-policy`: `binpack` or `spread`."""
    gpu_policy: str = "spread"
    """HAMi's `--gpu-scheduler-policy`: a chain of words, see `nvidia_choice`."""
    scoring: str = "LeastAllocated"
    """Koordinator's `DeviceShareArgs.scoringStrategy`: `LeastAllocated` or `MostAllocated`."""
    strict_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods take MIG instances or whole devices only; `*`: all."""
    instances_first: bool = False
    """Pods for which both will do get MIG instances before shares of devices in hami-core mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the node keeps what containers mount."""

    library: str
    """The HAMi-core library on the host."""
    preload: str
    """A file that names the library's path inside the container."""
    containers: str
    """Directory that holds one directory per pod and container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One bind mount of a container."""

    container_path: str
    host_path: str
    read_only: bool
    directory: bool
    """The host path is a directory, made for this container if it is missing; else a file that is
    there, or the container's own region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSetup:
    """What the kubelet is told to give a container."""

    environment: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Of the container in its runtime, not of the pod."""
    cdi_devices: tuple[str, ...] = ()
    """Devices that its runtime is told of by their names in the Container Device Interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedId:
    """One device ID of a device-plugin list: at most 63 characters, never renumbered."""

    text: str
    healthy: bool
    device: DeviceUuid | None = None
    """The device it stands for; None if it stands for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an agent knows of its machine besides devices."""

    driver: str = ""
    """Version of the GPUs' driver; empty: unknown."""
    isolates: bool = False
    """HAMi-core's library is there, and a process of this machine could load it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObject:
    """A custom object without a namespace that shows a node's devices; it has the node's name."""

    collection: str
    """Path of all objects of its kind, such as `/apis/GROUP/VERSION/PLURAL`."""
    kind: str
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """None: the key is to be absent; keys of others stay as they are."""
    devices: tuple[Mapping[str, Any], ...] = ()
    """`spec.devices`. The time of a condition is added by whoever writes the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """What a node shows for a dialect."""

    served: Mapping[str, tuple[ServedId, ...]] = field(default_factory=dict)
    """Resources of the device plugin, each with its complete list."""
    patched: Mapping[str, int] = field(default_factory=dict)
    """Resources written into node status."""
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    """Of the node; None: the key is to be absent."""
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """Of the node; None: the key is to be absent."""
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our entries in node annotations that are lists with commas, and that others write too."""
    objects: tuple[NodeObject, ...] = ()


def trigger_ids(devices: Sequence[Device]) -> tuple[ServedId, ...]:
    """Return the list of a resource that only makes the kubelet ask: `TRIGGER`, or a dialect's."""
    return tuple(
        ServedId(text=f"{device.uuid}-{n}", healthy=device.healthy, device=device.uuid)
        for device in devices
        if device.mode is DeviceMode.HAMI_CORE
        for n in range(TRIGGERS)
    )


def one_id(_: Share, __: str) -> int:
    """Return how many device IDs a share takes where an ID is a slot."""
    return 1


def runs_before(asked: ContainerAsks, asking: Sequence[ContainerAsks]) -> bool:
    """Say whether a container ends before any other that asks for a GPU starts.

    An init container does, unless a sidecar of the pod asks as well, which may run beside it.
    """
    return asked.init and not any(other.sidecar for other in asking)


def nothing(_: Sequence[Device], __: Host) -> Advertised:
    """Show nothing more."""
    return Advertised()


def no_difference(_: Lease, __: Mapping[str, str]) -> str:
    """Find nothing."""
    return ""


def no_annotations(_: Lease) -> dict[str, str]:
    """Write nothing."""
    return {}


def nothing_beyond(_: Share) -> dict[str, int]:
    """Find nothing that is asked for and not held."""
    return {}


def accept_rules(_: Rules) -> None:
    """Accept all."""


def no_devices(_: Mapping[str, str]) -> tuple[int, ...]:
    """Find no device."""
    return ()


def no_amounts(_: Mapping[str, int]) -> dict[str, int | None]:
    """Complete nothing."""
    return {}


def no_pod_annotations(_: PodAsks) -> dict[str, str]:
    """Add nothing."""
    return {}


def no_denial(_: PodAsks, __: bool) -> str:
    """Deny nothing."""
    return ""


class Strategy:
    """How gpushare's resources reach the kubelet: Volcano's `--gpu-strategy`, and `auto`."""

    AUTO = "auto"
    SHARE = "share"
    NUMBER = "number"
    ALL = (AUTO, SHARE, NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One row of the table of dialects; every function is pure."""

    name: str
    resources: frozenset[str]
    """All resource names that belong to it: they are no ordinary resources of the pod."""
    served: frozenset[str]
    """Which of them (or `TRIGGER`) the device plugin serves, whatever the `Strategy`."""
    patched: frozenset[str]
    """Which of them are written into node status. What is in neither is only ever read."""
    summed: frozenset[str] = frozenset()
    """Which of these count as ordinary resources of the node too: a pod may ask for more of them
    than its shares book, and the kubelet refuses what goes beyond the node's sum."""
    annotations: frozenset[str]
    """All annotations of the pod that `read` looks at."""
    labels: frozenset[str] = frozenset()
    """All labels of the pod that `read` looks at."""
    read: Callable[[PodAsks, Rules], PodRequest | None]
    """The GPU part of a request, or None if the pod asks for nothing here."""
    binding: Callable[[Lease, float], dict[str, str]]
    """Annotations that the Binding carries, given the lease and the Unix time."""
    after: Callable[[Lease, frozenset[str]], dict[str, str]]
    """Annotations once Allocate was answered for these containers."""
    failed: Callable[[Lease], dict[str, str]]
    """Annotations once Allocate was refused."""
    environment: Callable[[Lease, str, Mapping[DeviceUuid, Device], Paths], ContainerSetup]
    """What one container of the lease is given."""
    advertised: Callable[[Sequence[Device], str], Advertised]
    """What the node shows, given its devices and the `Strategy`."""
    differs: Callable[[Lease, Mapping[str, str]], str] = no_difference
    """What a bound pod's annotations say otherwise than its lease, for the audit; empty: nothing.
    Only of dialects whose annotations stay as the Binding brought them."""
    described: Callable[[Sequence[Device], Host], Advertised] = nothing
    """What the node shows besides: labels and objects that depend on its host."""
    ids_of: Callable[[Share, str], int] = one_id
    """How many device IDs of a served resource a share takes."""
    resized: Callable[[Lease], dict[str, str]] = no_annotations
    """Annotations of a running pod that say how much it holds, after its lease was resized."""
    beyond: Callable[[Share], dict[str, int]] = nothing_beyond
    """What a share's pod asks for, of `patched` resources, beyond what the share has by now."""
    amount_changes: Callable[[Mapping[str, int]], dict[str, int | None]] = no_amounts
    """What admission changes in a container's amounts, as the vendor's webhook does; None: the
    amount is removed."""
    added_annotations: Callable[[PodAsks], dict[str, str]] = no_pod_annotations
    """Annotations that admission adds to a pod, as the vendor's webhook does."""
    vendor_denial: Callable[[PodAsks, bool], str] = no_denial
    """The message with which the vendor's own webhook refuses a pod, word by word, given whether
    our rules refuse it; empty: it would not refuse it."""
    check_rules: Callable[[Rules], None] = accept_rules
    """Raises RequestError naming one of the operator's choices that the dialect cannot accept."""
    scheduler: str = ""
    """`spec.schedulerName` of pods that are written for the vendor's own scheduler; empty: the
    default scheduler's."""
    cordoned: Callable[[Mapping[str, str]], tuple[int, ...]] = no_devices
    """Indices of the devices that a node's annotations close to new shares."""
    besides: Mapping[str, str] = field(default_factory=dict)
    """Variables of a container that has MIG instances, besides the one that names them."""
