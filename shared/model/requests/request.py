"""A pod's request without any vendor's vocabulary; pure."""

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.model.bounds import (
    MOST_CLAIMS,
    MOST_CONTAINERS,
    MOST_ENTRIES,
    MOST_HOST_PORTS,
    MOST_TERMS,
    MOST_VALUES,
    MOST_VOLUMES,
    Amount,
    Billionths,
    Choices,
    ChoiceText,
    Count,
    Groups,
    KeyText,
    LongText,
    Members,
    MemoText,
    NameText,
    Percent,
    Priority,
    Resources,
    RunTime,
    Shares,
    ShortText,
    TopologyKeys,
)
from shared.model.devices.enforcers import NO_DEMAND, HeldBy
from shared.model.names import PodUid
from shared.model.requests.pod_rules import (
    MOST_SELECTIONS,
    DomainScores,
    NodeDomains,
    PodRules,
)

ALL_PERCENT = 100


class DeviceOrder(StrEnum):
    """Which of a node's fitting devices is taken first."""

    FIRST = "first"
    """Lowest index (gpushare)."""
    LAST = "last"
    """Highest index (Volcano vGPU without a policy)."""
    BINPACK = "binpack"
    """Most memory in use, then lowest index."""
    SPREAD = "spread"
    """Fewest shares, then lowest index."""
    MOST_ALLOCATED = "most-allocated"
    """Largest weighted part in use (`allocation_weights`), then lowest index."""
    LEAST_ALLOCATED = "least-allocated"
    """Smallest weighted part in use, then lowest index."""
    TIGHTEST = "tightest"
    """Most cores in use, then most memory, then lowest index (gpu-manager)."""
    LEAST_LINKED = "least-linked"
    """Least sum of `Device.links`, then lowest index (HAMi's `topology-aware`)."""


class SharingPolicy(IntEnum):
    """How a share shares its device with others. The ledger uses the same numbers."""

    SHARED = 0
    EXCLUSIVE = 1
    """Needs an idle device and takes it exclusively."""
    BEST_EFFORT = 2
    """Fits even if all cores are reserved, unless a share is exclusive."""
    IDLE_DEVICE = 3
    """Needs an idle device; others may be added later as with SHARED."""


class TopologyScope(StrEnum):
    """The topology domain that must contain all devices of a container."""

    NODE = "node"
    NUMA = "numa"
    PCIE = "pcie"


class NodeOrder(StrEnum):
    """Which of the fitting nodes is taken first."""

    BINPACK = "binpack"
    """Least spare memory left on the devices."""
    SPREAD = "spread"
    """Least used devices."""
    FRAGMENTATION = "fragmentation"
    """Most of what is idle stays usable for the pods that usually arrive."""
    POWER = "power"
    """The same, weighed with the power that the node draws more."""

    @property
    def compares(self) -> bool:
        # Texts: it is asked for every pod, and to look up two members takes five times as long.
        return self in ("fragmentation", "power")


LEAST_SHARE_MIB = 512
"""A CUDA context alone takes 300 to 600 MiB. Smaller shares are leased with a warning."""


class GpuRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A container's request: the same share of each of `gpus` devices of one node."""

    container: ShortText
    gpus: Shares
    memory_units: Amount | None = None
    """Units of the node's `unit_mib`, per device."""
    memory_percent: Percent | None = None
    """Per device; wins over the amounts. Without any of the three it is all of the memory."""
    memory_billionths: Billionths = 0
    """Exact, per device. `memory_percent` is the same rounded down, at least 1, for queues and
    rankings."""
    cores_percent: Percent = 0
    """Of each device's compute; 0 is neither limited nor reserved."""
    whole: bool = False
    slotted: bool = True
    """The kubelet counts slots, not MiB."""
    init: bool = False
    """It ends before the pod's next container starts, unlike a sidecar."""
    memory_bytes: Amount | None = None
    """Per device. The share takes whole MiB, rounded up; the limit is exact."""
    percent_of_mib: bool = False
    """Of MiB rounded down, whatever the node's unit (Koordinator's ratio)."""
    sharing: SharingPolicy = SharingPolicy.SHARED
    idle_parts: bool = False
    """Hints mention that a part of a device would need an idle one."""
    slots: Count = 0
    """Of a device in the dialect; 0 for `Device.slots`."""
    mig_allowed: bool = False
    records_requested_units: bool = False
    strict: bool = False
    number_of: KeyText = ""
    """The resource of which it requests a number and nothing else. A replica of that name serves as
    well."""
    replica_only: bool = False
    limited: bool = True
    """Its limits must be held, unless it is a whole device (not in gpushare)."""
    held_by: HeldBy = NO_DEMAND
    exclusive_cpus: Count = 0
    """The pod is Guaranteed, and the container requests whole CPUs."""

    def __post_init__(self) -> None:
        if self.whole and self.sharing is not SharingPolicy.EXCLUSIVE:
            msgspec.structs.force_setattr(self, "sharing", SharingPolicy.EXCLUSIVE)

    @property
    def wants_all_memory(self) -> bool:
        if self.memory_percent is not None:
            return self.memory_percent >= ALL_PERCENT
        return self.memory_units is None and self.memory_bytes is None


class DeviceSelection(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Which devices the pod's author allows. Empty collections and None do not constrain."""

    types: Choices = ()
    """The model must contain one of these, in any letter case."""
    not_types: Choices = ()
    models: Choices = ()
    not_models: Choices = ()
    uuids: Choices = ()
    not_uuids: Choices = ()
    mode: ChoiceText | None = None
    """A `DeviceMode`, as written by the author."""


class NodeTerm(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One requirement on a node's labels (or, with `field`, on its name).

    `operator` is as in NodeSelectorRequirement.
    """

    key: KeyText
    operator: ShortText
    values: Annotated[tuple[NameText, ...], Meta(max_length=MOST_VALUES)] = ()
    field: bool = False


class Toleration(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    key: KeyText = ""
    operator: ShortText = "Equal"
    value: NameText = ""
    effect: ShortText = ""


class VolumeRule(StrEnum):
    """The rule of kube-scheduler that limits a pod with volumes to some nodes."""

    NODE_AFFINITY = "VolumeNodeAffinity"
    ZONE = "VolumeZone"
    NO_VOLUME = "NoVolumeToBind"
    """A claim waits for its first consumer; a volume for it exists, or can be created, there."""
    STORAGE = "NotEnoughStorage"
    """CSIStorageCapacity."""
    IN_USE = "VolumeInUse"
    """A ReadWriteOnce volume is in use on this node."""


AllTerms = Annotated[tuple[NodeTerm, ...], Meta(max_length=MOST_ENTRIES)]
VolumeTerms = Annotated[tuple[AllTerms, ...], Meta(max_length=MOST_TERMS)]


class VolumeRequirement(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What a volume of the pod requires of the node.

    It does not name its claim, so that pods with claims of their own share cached results.
    """

    rule: VolumeRule
    terms: VolumeTerms = ()
    """Any one must hold; without any, no node will do."""


class ClaimVolume(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A PersistentVolume that may be bound to a claim."""

    name: NameText
    terms: VolumeTerms = ()
    """Without any, every node reaches it."""


class PodClaim(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A PersistentVolumeClaim of the pod, and what has to be done for it once a node is chosen.

    Unless it is bound, the first of its `volumes` that the node reaches is bound to it, or its
    provisioner creates one.
    """

    name: NameText
    uid: NameText = ""
    bound: bool = False
    volumes: Annotated[tuple[ClaimVolume, ...], Meta(max_length=MOST_VOLUMES)] = ()
    """Smallest first. Claims of one pod may have the same ones: each takes another."""
    provisions: bool = False


RepelledFrom = tuple[tuple[KeyText, frozenset[NameText]], ...]
"""Labels of nodes, and the values where a pod must not run."""
Within = tuple[tuple[KeyText, frozenset[NameText]], ...]
"""Labels of nodes, and the values where a pod may run."""


HostPorts = Annotated[tuple[tuple[KeyText, Amount], ...], Meta(max_length=MOST_HOST_PORTS)]


class NodeRequirements(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Requirements on the node besides devices. Equal values share one cached result."""

    selector: tuple[tuple[KeyText, NameText], ...] = ()
    required: tuple[tuple[NodeTerm, ...], ...] = ()
    preferred: tuple[tuple[Percent, tuple[NodeTerm, ...]], ...] = ()
    """Weight 1-100 and term of preferred node affinity."""
    tolerations: tuple[Toleration, ...] = ()
    unsupported: tuple[LongText, ...] = ()
    """Fields that placement does not support: the pod is refused."""
    waits_for: LongText = ""
    """What has to be there before any node is looked at: `REASON: WHAT TO DO`."""
    volumes: Annotated[tuple[VolumeRequirement, ...], Meta(max_length=5 * MOST_CLAIMS)] = ()
    host_ports: HostPorts = ()
    sole_manager: bool = False
    """No other program may read the annotations by which the pod requests GPUs."""
    repelled_from: RepelledFrom = ()
    """By required anti-affinity of running pods; set for a decision only."""
    within: Within = ()
    """For the pods of its gang; set for a decision only."""
    domains: tuple[NodeDomains, ...] = ()
    """By its rules about other pods; set for a decision only."""
    scores: tuple[DomainScores, ...] = ()
    """By its rules about other pods; set for a decision only."""

    @property
    def is_for_decision(self) -> bool:
        return bool(self.repelled_from or self.within or self.domains or self.scores)

    @property
    def of_template(self) -> "NodeRequirements":
        if not self.is_for_decision:
            return self
        return msgspec.structs.replace(self, repelled_from=(), within=(), domains=(), scores=())


class Gang(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A pod group: at least `min_member` of its pods run, or none."""

    name: KeyText
    min_member: Members
    """Without the pods that other schedulers have placed."""
    placed_elsewhere: Count = 0
    required_topology: TopologyKeys = ()
    """On the nodes of all pods, each label must have one value."""
    preferred_topology: TopologyKeys = ()
    """Labels that should have as few values as possible."""
    one_node_claim: NameText = ""
    """A claim of several of its pods that one node can mount at a time: why `required_topology` has
    the label with the node's name."""

    @property
    def has_topology(self) -> bool:
        return bool(self.required_topology or self.preferred_topology)

    @property
    def decided_as_one(self) -> bool:
        """Whether no pod of it is decided on without the others."""
        return self.min_member > 1 or self.has_topology


class Term(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How long a pod may run, and is expected to run."""

    max_run_s: RunTime | None = None
    """`spec.activeDeadlineSeconds`."""
    expected_run_s: RunTime | None = None
    """By the pod's author; nothing enforces it."""
    grace_s: RunTime = 30
    """`spec.terminationGracePeriodSeconds`."""
    runs_on: bool = False
    """A DaemonSet's or static pod: no maximum of a namespace is for it."""


NO_TERM = Term()


Uncounted = Annotated[tuple[tuple[KeyText, PodUid], ...], Meta(max_length=MOST_ENTRIES)]


class PodRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Everything that placement needs to know about a pod."""

    dialect: ShortText = ""
    """Key of `shared.dialects.DIALECTS`; empty for a pod that requests no GPU."""
    containers: Annotated[tuple[GpuRequest, ...], Meta(max_length=MOST_CONTAINERS)] = ()
    """With GPUs, in spec order: first init containers, with sidecars in between."""
    same_device: bool = False
    triggers: tuple[KeyText, ...] = ()
    """The device plugin of the node must serve them, so that Allocate is called."""
    selection: DeviceSelection = msgspec.field(default_factory=DeviceSelection)
    distinct_devices: bool = False
    anti_affinity_groups: Groups = ()
    memo: MemoText = ""
    """Data of the dialect for the container's setup."""
    topology_scope: TopologyScope = TopologyScope.NODE
    prefer_links: bool = True
    """A score, not a filter."""
    prefer_mig: bool = False
    allocation_weights: tuple[Amount, Amount, Amount] = (0, 0, 1)
    """Of slots, cores and memory, for orders by allocated fraction."""
    gang: Gang | None = None
    device_order: DeviceOrder = DeviceOrder.LAST
    node_order: NodeOrder = NodeOrder.BINPACK
    resources: Resources = msgspec.field(default_factory=dict)
    """`cpu` in thousandths, `memory` and `ephemeral-storage` in bytes, others in units."""
    node_requirements: NodeRequirements = msgspec.field(default_factory=NodeRequirements)
    claims: Annotated[tuple[PodClaim, ...], Meta(max_length=MOST_CLAIMS)] = ()
    """Unbound ones in the order in which volumes are chosen. No part of `placement_key`:
    `node_requirements.volumes` has what they require."""
    pod_rules: PodRules | None = None
    """No part of `placement_key`: a decision turns them into `node_requirements.domains`."""
    selected_as: Annotated[tuple[KeyText, ...], Meta(max_length=MOST_SELECTIONS)] = ()
    """As which it is counted for the rules of other pods, sorted."""
    uncounted: Uncounted = ()
    """They may have a lease that does not count them, and no node yet."""
    priority: Priority = 0
    term: Term = NO_TERM
    """No part of `placement_key`: it changes when devices are free, not which ones fit."""

    @property
    def node_resources(self) -> dict[str, int]:
        """With host ports, and what counts it for the rules of other pods."""
        ports = self.node_requirements.host_ports
        if not (ports or self.selected_as):
            return self.resources
        return {**self.resources, **dict(ports), **dict.fromkeys(self.selected_as, 1)}

    @property
    def has_required_rules(self) -> bool:
        return self.pod_rules is not None and self.pod_rules.is_required

    @property
    def guards(self) -> tuple[str, ...]:
        """No more of them may be reserved between decision and lease."""
        rules = self.pod_rules
        if rules is None:
            return ()
        names = [rule.counted_as for rule in rules.anti_affinity]
        names += [rule.counted_as for rule in rules.spread if rule.required and rule.counted_as]
        if rules.affinity is not None and rules.affinity.counted_as in self.selected_as:
            names.append(rules.affinity.counted_as)
        return tuple(sorted(set(names)))

    @property
    def size(self) -> tuple[int, ...]:
        """A sort key: how hard the pod is to place."""
        containers = [container for container in self.containers if not container.init]
        return (
            sum(container.gpus for container in containers),
            sum(container.whole or container.wants_all_memory for container in containers),
            sum(
                (container.memory_units or 0) + (container.memory_bytes or 0)
                for container in containers
            ),
            sum(container.memory_percent or 0 for container in containers),
            sum(container.cores_percent for container in containers),
        )
