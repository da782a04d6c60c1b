"""The cluster as one viewer may see it, as the dashboard's API sends it to the commands; pure.

Of namespaces that the viewer may not see, it contains how much of a device is in use: their leases
have no namespace and no names, and their waiting pods are only counted.
"""

from dataclasses import dataclass, field

from shared.model.fair_share import FairShare
from shared.model.ledger import NodeTotals, WaitingPod
from shared.model.names import NodeName, PodUid
from shared.model.usage import ShareMeasurement

HIDDEN = PodUid("")
"""In the queue: a pod that the viewer may not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What the commands show, at one moment."""

    read_at: float
    """Unix seconds."""
    nodes: tuple[NodeTotals, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    """The visible ones."""
    queue: tuple[PodUid, ...] = ()
    """All waiting pods in the order in which freed capacity is offered; see `HIDDEN`."""
    fair_share: FairShare = field(default_factory=FairShare)
    """With the usage of visible namespaces only; the total is that of all devices."""
    usage: tuple[ShareMeasurement, ...] = ()
    unmeasured_nodes: tuple[NodeName, ...] = ()
    """Nodes with leases whose agent did not report usage."""
    problems: tuple[str, ...] = ()
    """Missing components, as text."""
