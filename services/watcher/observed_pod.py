"""A pod as the watcher sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.dialects.pod_groups import PodGroupReference
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.request import PodRequest

TERMINAL = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """One pod as the API server last told it, read as far as it concerns us."""

    pod: PodUid
    namespace: Namespace
    name: str
    resource_version: str
    ours: bool
    """One of our scheduler names is on it."""
    node: NodeName | None = None
    phase: str = "Pending"
    deleting: bool = False
    gated: bool = False
    held: bool = False
    """Our scheduling gate is on it: it waits for its namespace's budget."""
    priority: int = 0
    explained: bool = False
    """Its condition says why it is not scheduled."""
    leased: bool = False
    """It carries a lease of ours: the ledger counts it."""
    created_at: float = 0.0
    resources: Mapping[str, int] = field(default_factory=dict)
    host_ports: tuple[str, ...] = ()
    request: PodRequest | None = None
    """What it asks for; None if that cannot be read, or if it is not ours."""
    fault: str = ""
    """Why its request cannot be read."""
    admitted: str = ""
    """The span in which it was admitted, as W3C `traceparent`; empty: none is known."""
    group: PodGroupReference | None = None
    """The group it names; `request.gang` is filled in once that is known."""

    @property
    def over(self) -> bool:
        """Its containers no longer run."""
        return self.phase in TERMINAL

    @property
    def waits(self) -> bool:
        """It wants a node from us now."""
        return self.ours and not (self.node or self.over or self.deleting or self.gated)

    @property
    def occupies(self) -> bool:
        """It uses a node's ordinary resources, and no lease of ours says so."""
        return self.node is not None and not self.over and not (self.ours and self.leased)
