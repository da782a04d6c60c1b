"""Plans: the cheapest set of leases to preempt so that a pod fits on one node; pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.binder.observations import DisruptionBudget
from services.binder.preempt.rules import Allowance, VictimCandidate
from shared.model.lease import Lease, Share
from shared.model.names import NodeName
from shared.model.request import PodRequest
from shared.placing.room import ClusterTrials, Endable, RoomSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPlan:
    """Where the pod will run, and which leases end for it."""

    node: NodeName
    shares: tuple[Share, ...]
    victims: tuple[VictimCandidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """No pod is evicted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """All that a plan is made from."""

    trials: ClusterTrials
    candidates: Sequence[VictimCandidate]
    disruption_budgets: Sequence[DisruptionBudget] = ()
    allowance: Allowance = field(
        default_factory=lambda: Allowance(total=1 << 30, per_namespace=1 << 30)
    )


def plan(request: PodRequest, given: PlanInput) -> PreemptionPlan | NoPlan:
    """Return the cheapest set of leases whose end makes the pod fit on one node.

    There is no plan if the pod fits anyway, now or once the leaving pods are gone.
    """
    node = given.trials.node_as_it_is(request)
    if node is not None:
        return NoPlan(reason=f"it will fit on {node} as it is")
    search = RoomSearch(
        request,
        given.trials,
        allows=lambda ends: allowed([each.lease for each in ends], given),
    )
    by_pod = {each.lease.pod: each for each in given.candidates}
    room = next(
        search.rooms(
            Endable(lease=each.lease, used_gpu_s=each.used_gpu_s, tier=each.tier)
            for each in given.candidates
        ),
        None,
    )
    if room is not None:
        victims = sorted((by_pod[lease.pod] for lease in room.leases), key=lambda v: v.lease.pod)
        return PreemptionPlan(node=room.node, shares=room.shares, victims=tuple(victims))
    if not any(allowed([each.lease], given) for each in given.candidates):
        return NoPlan(reason="no lease may be preempted for it")
    return NoPlan(reason="it would fit on no node even if every preemptible lease ended")


def allowed(leases: Collection[Lease], given: PlanInput) -> bool:
    """Return whether PodDisruptionBudgets and limits allow all these evictions together.

    A pod that several PodDisruptionBudgets select cannot be evicted at all.
    """
    if len(leases) > given.allowance.total:
        return False
    namespaces = Counter(lease.namespace for lease in leases)
    if any(count > given.allowance.of(name) for name, count in namespaces.items()):
        return False
    pods = {lease.pod for lease in leases}
    selected = Counter(pod for budget in given.disruption_budgets for pod in budget.pods & pods)
    return all(count < 2 for count in selected.values()) and all(
        len(budget.pods & pods) <= budget.allowed for budget in given.disruption_budgets
    )
