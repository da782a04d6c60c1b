"""Pods, device holdings and processes as the kubelet shows them; pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from services.node_agent.records.checkpoint_entry import ContainerPlace
from shared.dialects.advertised import NumaNodes
from shared.model.names import Namespace, PodUid

STILL_PLUGIN = (
    "the kubelet still allocates {} by device plugin, until all containers with its IDs have "
    "ended, and five minutes after its plugin has stopped"
)


@dataclass(frozen=True, slots=True)
class Unserved:
    """A resource that the kubelet cannot allocate now, and for how long."""

    for_s: float
    plugin_amount: str = ""
    """The amount that the kubelet still allocates by device plugin, if that is the reason."""


def explain_unserved(resources: Mapping[str, Unserved]) -> str:
    """Return why these resources cannot be allocated."""
    missing = sorted(name for name, each in resources.items() if not each.plugin_amount)
    amounts = sorted({each.plugin_amount for each in resources.values()} - {""})
    reasons = [f"not registered with the kubelet: {', '.join(missing)}"] if missing else []
    return "; ".join((*reasons, *(STILL_PLUGIN.format(amount) for amount in amounts)))


TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletContainer:
    """One container of the kubelet's pod list."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    """Extended resources only."""
    init: bool = False
    """It ends before the next one starts; a sidecar does not count as an init container here."""
    variables: tuple[str, ...] = ()
    """Names of the variables that the pod sets itself, but to the value that its lease sets."""
    prefixes: tuple[str, ...] = ()
    """The prefix of each source of `envFrom`, which may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletPod:
    """One pod of the kubelet's list."""

    uid: PodUid
    namespace: Namespace
    name: str
    phase: str = "Pending"
    containers: tuple[KubeletContainer, ...] = ()
    """In the order in which the kubelet serves them: init containers first."""
    container_ids: Mapping[str, str] = field(default_factory=dict)
    """Names of its created containers by the runtime's ID."""
    leased_at: float = 0.0
    """When the lease that it was bound with was created, in Unix seconds; 0: not known."""

    @property
    def terminal(self) -> bool:
        """Whether all its containers have ended and will not restart."""
        return self.phase in TERMINAL_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPods:
    """Pods that run, and those that may start to."""

    processes: Mapping[PodUid, Set[str]] = field(default_factory=dict)
    """The IDs of their containers with processes, sandboxes included."""
    starting: Set[PodUid] = frozenset()

    @property
    def uids(self) -> Set[PodUid]:
        """All of them."""
        return self.processes.keys() | self.starting


@dataclass(frozen=True, slots=True)
class Holding:
    """The devices of one resource that PodResources shows for one container."""

    namespace: str
    name: str
    container: str
    resource: str
    device_ids: frozenset[str]

    @property
    def place(self) -> ContainerPlace:
        """The container."""
        return self.namespace, self.name, self.container


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimHolding:
    """A device of ours that a pod has by a ResourceClaim in its namespace."""

    namespace: str
    pod: str
    claim: str
    device: str
    """Its name in ResourceSlices."""
    share_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """PodResources: each container's devices, and the pods that the kubelet lists as active."""

    holdings: tuple[Holding, ...] = ()
    claims: frozenset[ClaimHolding] = frozenset()
    cpus: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    """CPUs that containers have exclusively, by namespace and name of their pod."""
    pods: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of every pod listed, devices or not."""

    def holders(self, resource: str) -> frozenset[ContainerPlace]:
        """Return the containers with devices of a resource."""
        return frozenset(each.place for each in self.holdings if each.resource == resource)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatableResources:
    """What the kubelet can allocate, in use or not."""

    numa: Mapping[str, Mapping[str, NumaNodes]]
    """The NUMA nodes of each healthy device ID, by resource."""
    cpus: frozenset[int]
    """CPUs that containers can have exclusively; none without CPU manager policy `static`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrigin:
    """The pod and container that a process runs in."""

    pod: PodUid | None
    """None if it runs in no pod."""
    container_id: str = ""
    """The runtime's ID, if it is known."""
    inner_pid: int = 0
    """Its PID inside the container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDevices:
    """The GPUs that one container of a pod may open."""

    pod: PodUid | None
    """None for a container of no pod."""
    container_id: str
    gpus: frozenset[int] = frozenset()
    """Minor numbers."""
    every_device: bool = False
    """It may open every device of the node: it is privileged."""

    @property
    def sees_gpus(self) -> bool:
        """Whether it may open any GPU."""
        return self.every_device or bool(self.gpus)
