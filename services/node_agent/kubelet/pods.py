"""Pods, device holdings and processes as the kubelet shows them; pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from services.node_agent.records.checkpoint_entry import ContainerPlace
from shared.dialects.advertised import NumaNodes
from shared.model.names import Namespace, PodUid

STILL_PLUGIN = (
    "the kubelet still allocates {} by device plugin, until all containers with its IDs have "
    "ended, and five minutes after its plugin has stopped"
)


@dataclass(frozen=True, slots=True)
class UnservedResource:
    for_s: float
    plugin_amount: str = ""


def explain_unserved(resources: Mapping[str, UnservedResource]) -> str:
    missing = sorted(name for name, resource in resources.items() if not resource.plugin_amount)
    amounts = sorted({resource.plugin_amount for resource in resources.values()} - {""})
    reasons = [f"not registered with the kubelet: {', '.join(missing)}"] if missing else []
    return "; ".join((*reasons, *(STILL_PLUGIN.format(amount) for amount in amounts)))


TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletContainer:
    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    """Extended resources only."""
    init: bool = False
    """It ends before the next one starts; a sidecar does not."""
    reserved_variable: str = ""
    """The first one that the pod sets itself, unless to the value of its lease."""
    reserved_prefix: str | None = None
    """The first prefix of a source of `envFrom` that may set a reserved variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletPod:
    uid: PodUid
    namespace: Namespace
    name: str
    phase: str = "Pending"
    containers: tuple[KubeletContainer, ...] = ()
    container_ids: Mapping[str, str] = field(default_factory=dict)
    leased_at: float = 0.0
    """Unix seconds, or 0, when the lease that it was bound with was created."""

    @property
    def terminal(self) -> bool:
        return self.phase in TERMINAL_PHASES


class Deletion(NamedTuple):
    killed_at: float
    """Unix seconds, by the API server's clock."""
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPods:
    processes: Mapping[PodUid, Set[str]] = field(default_factory=dict)
    """IDs of containers, sandboxes included."""
    starting: Set[PodUid] = frozenset()

    @property
    def uids(self) -> Set[PodUid]:
        return self.processes.keys() | self.starting


@dataclass(frozen=True, slots=True)
class Holding:
    namespace: str
    name: str
    container: str
    resource: str
    device_ids: frozenset[str]

    @property
    def place(self) -> ContainerPlace:
        return self.namespace, self.name, self.container


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimHolding:
    namespace: str
    pod: str
    claim: str
    device: str
    share_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    holdings: tuple[Holding, ...] = ()
    claims: frozenset[ClaimHolding] = frozenset()
    cpus: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    """Exclusive ones."""
    pods: frozenset[tuple[str, str]] = frozenset()

    def holders(self, resource: str) -> frozenset[ContainerPlace]:
        return frozenset(holding.place for holding in self.holdings if holding.resource == resource)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatableResources:
    numa: Mapping[str, Mapping[str, NumaNodes]]
    cpus: frozenset[int]
    """Exclusive ones; none without CPU manager policy `static`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrigin:
    pod: PodUid | None
    container_id: str = ""
    inner_pid: int = 0
    command: str = ""
    """15 characters at most; the process itself may have changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDevices:
    pod: PodUid | None
    container_id: str
    gpus: frozenset[int] = frozenset()
    every_device: bool = False

    @property
    def sees_gpus(self) -> bool:
        return self.every_device or bool(self.gpus)
