"""Input of a plan from a cluster snapshot: pending pods and candidates; pure."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from services.binder.observations import DisruptionBudget, PodFacts
from services.binder.preempt.plan import PlanInput
from services.binder.preempt.rules import (
    PendingPod,
    PreemptionRules,
    VictimCandidate,
    allowance,
    cause_for,
    exclusion_reason,
    is_worthwhile,
    lease_class,
    tier_of,
    victim_of,
)
from shared.model.lease import Lease
from shared.model.ledger import LedgerNode, NodeTotals, WaitingPod
from shared.model.names import PodUid
from shared.model.preemption import PreemptionState
from shared.placing.room import ClusterTrials, used_gpu_s


class ClusterSnapshot:
    """Nodes and pods, read at about one moment."""

    def __init__(
        self,
        nodes: Sequence[NodeTotals],
        pods: Mapping[PodUid, PodFacts],
        disruption_budgets: Sequence[DisruptionBudget] = (),
    ) -> None:
        self.nodes = nodes
        self.pods = pods
        self.disruption_budgets = disruption_budgets

    @cached_property
    def trials(self) -> ClusterTrials:
        """The nodes once the pods that are being deleted already are gone."""
        return ClusterTrials(self.nodes, {uid for uid, pod in self.pods.items() if pod.deleting})


def pending_pods(
    waiting: Sequence[WaitingPod], state: PreemptionState, rules: PreemptionRules, now: float
) -> list[WaitingPod]:
    """Return the pods for which leases may be preempted, the best lease class first.

    Pods of gangs are left out: capacity for one would be reserved while the others still wait.
    """
    open_for = {each.preemption.id for each in state.open}

    def rank(pod: WaitingPod) -> tuple[int, int, float, str]:
        queued = pod.queued
        own_class = lease_class(state.budget_of(queued.namespace))
        return (own_class, -queued.request.priority, pod.waiting_since, queued.pod)

    return sorted(
        (
            pod
            for pod in waiting
            if pod.queued.pod not in open_for
            and _could_use_devices(pod)
            and is_worthwhile(state.budget_of(pod.queued.namespace), rules, now)
        ),
        key=rank,
    )


def _could_use_devices(pod: WaitingPod) -> bool:
    """Return whether devices alone would let the pod run."""
    request = pod.queued.request
    in_gang = request.gang is not None and request.gang.min_member > 1
    return bool(request.containers) and not (in_gang or pod.refusal.permanent or pod.refusal.quota)


def plan_input(
    pending: PendingPod,
    cluster: ClusterSnapshot,
    state: PreemptionState,
    rules: PreemptionRules,
    *,
    now: float,
    without: Collection[PodUid] = (),
) -> PlanInput:
    """Return the input of a plan for the pending pod, `without` these victims."""
    candidates: list[VictimCandidate] = []
    for node in cluster.nodes:
        for lease in node.leases:
            if lease.pod in without or lease.pod == pending.pod:
                continue
            candidate = _candidate(lease, node.node, pending, cluster, state, rules, now)
            if candidate is not None:
                candidates.append(candidate)
    return PlanInput(
        trials=cluster.trials,
        candidates=candidates,
        disruption_budgets=cluster.disruption_budgets,
        allowance=allowance(state, rules, now),
    )


def _candidate(  # noqa: PLR0917 - each is a different kind
    lease: Lease,
    node: LedgerNode,
    pending: PendingPod,
    cluster: ClusterSnapshot,
    state: PreemptionState,
    rules: PreemptionRules,
    now: float,
) -> VictimCandidate | None:
    pod, theirs = cluster.pods.get(lease.pod), state.budget_of(lease.namespace)
    if pod is None:
        return None
    cause = cause_for(pending, theirs, state.budget_of(pending.namespace), pod.priority)
    if cause is None or exclusion_reason(lease, pod, state, rules, now) is not None:
        return None
    victim = victim_of(lease, pod, cause, theirs)
    return VictimCandidate(
        lease=lease,
        victim=victim,
        tier=tier_of(victim, pod, theirs),
        used_gpu_s=used_gpu_s(lease, node, now),
    )
