"""Preemptions and evictions, as the API returns them; pure."""

from dataclasses import dataclass, field

from shared.model.leases.ledger import NodeTotals, WaitingPod
from shared.model.leases.preemption import PreemptionState
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.views.plans import PlanView, ProtectedPod
from shared.model.views.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingView:
    """All that placing and preemption decide on."""

    nodes: tuple[NodeTotals, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    """In the order in which freed capacity is offered."""
    preemptions: PreemptionState = field(default_factory=PreemptionState)


class VictimView(View, frozen=True, kw_only=True):
    pod: str
    outcome: str | None


class PreemptionView(View, frozen=True, kw_only=True):
    id: str
    beneficiary: str
    """Namespace and name of the pod, or `NAMESPACE/gang NAME`."""
    stage: str
    evict_at: float | None
    victims: tuple[VictimView, ...]


class EvictionView(View, frozen=True, kw_only=True):
    at: float
    pod: str
    uid: PodUid
    node: NodeName
    devices: tuple[DeviceUuid, ...]
    cause: str
    budget: str
    outcome: str
    beneficiary: str
    event: str


class PreemptionsView(View, frozen=True, kw_only=True):
    """The preemptions in progress, and the evictions of the last day."""

    in_progress: tuple[PreemptionView, ...] = ()
    evictions: tuple[EvictionView, ...] = ()


class DryRunView(View, frozen=True, kw_only=True):
    """The preemption that a planner would plan for one pod."""

    pod: str
    plan: PlanView | None = None
    reason: str = ""
    in_progress: PreemptionView | None = None
    protected: tuple[ProtectedPod, ...] = ()
    protected_left_out: int = 0
