"""The preemption that would be planned for a pod, and why it would spare others."""

from collections.abc import Iterator
from dataclasses import replace

from services.planner.plan import (
    ClusterSnapshot,
    PlanInput,
    PreemptionPlan,
    pending_pods,
    plan,
    plan_input,
)
from services.planner.preemption_planner import PreemptionPlanner, pending_pod
from services.planner.rules import Exclusions, PreemptionRules
from shared.model.events.request_reply import DryRunReply, DryRunRequest
from shared.model.leases.ledger import WaitingPod
from shared.model.leases.preemption import PreemptionState
from shared.model.names import PodUid
from shared.model.views.plans import PlannedShare, PlannedVictim, PlanView, ProtectedPod
from shared.placing.anti_affinity import repelled_request
from shared.placing.preemption_rules import PendingPod, cause_for

MAX_PROTECTED = 1_000
"""Spared pods of a reply, which is one message."""


async def dry_run(request: DryRunRequest, planner: PreemptionPlanner) -> DryRunReply:
    """Plan for a waiting pod, and change nothing."""
    waiting = await planner.ledger.waiting_pods.load([request.pod])
    if not waiting:
        return DryRunReply()
    rules = planner.rules
    now = planner.clock.now()
    if request.min_runtime_s is not None:
        rules = replace(rules, preemption_min_runtime_s=request.min_runtime_s)
    state = await planner.store.state(now=now)
    if not pending_pods(waiting, state, now):
        return DryRunReply(waits=True, reason=_ineligible_reason(waiting[0]))
    cluster = await planner.view.snapshot()
    queued = waiting[0].queued
    pending = pending_pod(waiting[0], cluster)
    if pending is None:
        return DryRunReply()
    planned_from = plan_input(pending, cluster, state, rules, now=now)
    protected = sorted(
        _protected(pending, cluster, state, rules, planned_from=planned_from, now=now)
    )
    planned = plan(repelled_request(queued, cluster.domains), planned_from)
    return DryRunReply(
        waits=True,
        plan=None if isinstance(planned, str) else plan_view(planned),
        reason=planned if isinstance(planned, str) else "",
        protected=tuple(
            ProtectedPod(pod=name, reason=reason) for name, reason in protected[:MAX_PROTECTED]
        ),
        protected_left_out=max(0, len(protected) - MAX_PROTECTED),
    )


def plan_view(planned: PreemptionPlan) -> PlanView:
    return PlanView(
        node=planned.placement.node,
        shares=PlannedShare.of(planned.placement.shares),
        victims=tuple(
            PlannedVictim(
                pod=f"{candidate.lease.namespace}/{candidate.lease.name}",
                cause=str(candidate.victim.cause),
                budget=candidate.victim.budget,
                priority=candidate.victim.priority,
                bare=candidate.tier.unowned,
                overdraft_permille=-candidate.tier.overdraft,
                gpu_s_lost=round(candidate.used_gpu_s, 3),
                devices=candidate.victim.devices,
            )
            for candidate in planned.victims
        ),
    )


def _ineligible_reason(waiting: WaitingPod) -> str:
    request = waiting.queued.request
    if request.gang is not None and request.gang.decided_as_one:
        return "no pod is evicted for a gang"
    if waiting.refusal.permanent:
        return f"no freed device could help: {waiting.refusal.text}"
    return "it requests no device, or its own namespace's budget ends too soon"


def _protected(
    pending: PendingPod,
    cluster: ClusterSnapshot,
    state: PreemptionState,
    rules: PreemptionRules,
    *,
    planned_from: PlanInput,
    now: float,
) -> Iterator[tuple[str, str]]:
    """Yield the pods that rank below the pending one and are not evicted, with reasons."""
    candidates = {candidate.lease.pod for candidate in planned_from.candidates}
    own_budget = state.budget_of(pending.namespace)
    exclusions = Exclusions(state, rules, now)
    for lease in (lease for totals in cluster.nodes for lease in totals.leases):
        pod = cluster.pods.get(lease.pod)
        if pod is None or lease.pod == pending.pod:
            continue
        if cause_for(pending, state.budget_of(lease.namespace), own_budget, pod.priority) is None:
            continue
        name = f"{lease.namespace}/{lease.name}"
        reason = exclusions.reason(lease, pod)
        if reason is not None:
            yield name, reason
        if lease.pod in candidates:
            yield from ((name, text) for text in _disruption_limits(lease.pod, cluster))


def _disruption_limits(pod: PodUid, cluster: ClusterSnapshot) -> Iterator[str]:
    for budget in cluster.disruption_budgets:
        if pod in budget.pods and budget.allowed < 1:
            yield f"PodDisruptionBudget {budget.name} allows no eviction now"
