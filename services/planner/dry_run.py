"""The preemption that would be planned for a pod, and why it would spare others."""

from collections.abc import Iterator
from dataclasses import replace

from services.planner.plan import (
    ClusterSnapshot,
    PlanInput,
    PreemptionPlan,
    gang_of,
    pause_text,
    plan,
    plan_for_gang,
    plan_input,
    requests_of,
    unit_of,
    unreached,
)
from services.planner.preemption_planner import PreemptionPlanner, pending_pod
from services.planner.rules import Exclusions, PreemptionRules, is_worthwhile
from shared.model.events.request_reply import DryRunReply, DryRunRequest
from shared.model.leases.preemption import PreemptionState
from shared.model.names import PodUid
from shared.model.views.plans import PlannedShare, PlannedVictim, PlanView, ProtectedPod
from shared.placing.preemption_rules import PendingPod, cause_for
from shared.placing.starts import WaitingUnit

MAX_PROTECTED = 1_000


async def dry_run(request: DryRunRequest, planner: PreemptionPlanner) -> DryRunReply:
    unit = await _unit_with(request.pod, planner)
    if unit is None:
        return DryRunReply()
    rules = planner.rules
    now = planner.clock.now()
    if request.min_runtime_s is not None:
        rules = replace(rules, preemption_min_runtime_s=request.min_runtime_s)
    state = await planner.store.state(now=now)
    reason = unreached(unit) or pause_text(unit, state, rules, now)
    if not reason and not is_worthwhile(state.budget_of(unit.namespace), now):
        reason = "its own namespace's budget ends too soon"
    cluster = await planner.view.snapshot(unit.pods)
    if not reason and unit.gang is not None and cluster.runs_any_of(unit.gang):
        reason = "pods of its gang run already: no pod is evicted for further ones"
    pending = pending_pod(unit, cluster)
    if reason or pending is None:
        return DryRunReply(waits=bool(reason), reason=reason)
    planned_from = plan_input(pending, cluster, state, rules, now=now)
    protected = sorted(
        _protected(pending, cluster, state, rules, planned_from=planned_from, now=now)
    )
    requests = requests_of(unit, cluster)
    if unit.gang is None:
        planned = plan(requests[0], planned_from)
    else:
        planned = plan_for_gang(requests, unit.needed, unit.gang, planned_from)
    own = next(n for n, pod in enumerate(unit.pods) if pod.queued.pod == request.pod)
    return DryRunReply(
        waits=True,
        plan=None if isinstance(planned, str) else plan_view(planned, own),
        reason=planned if isinstance(planned, str) else "",
        protected=tuple(
            ProtectedPod(pod=name, reason=reason) for name, reason in protected[:MAX_PROTECTED]
        ),
        protected_left_out=max(0, len(protected) - MAX_PROTECTED),
    )


async def _unit_with(pod: PodUid, planner: PreemptionPlanner) -> WaitingUnit | None:
    """Return None if the pod does not wait."""
    waiting = await planner.ledger.waiting_pods.load([pod])
    if not waiting:
        return None
    gang = gang_of(waiting[0])
    if gang is None:
        return unit_of(pod, waiting, await planner.view.claim_demands(waiting))
    others = await planner.ledger.waiting_pods.load()
    members = [other for other in others if (own := gang_of(other)) and own.name == gang.name]
    return unit_of(gang.name, members or waiting)


def plan_view(planned: PreemptionPlan, number: int = 0) -> PlanView:
    """Return a plan as the pod of this number reads it, or the first that starts."""
    placement = planned.placements[number] or planned.placed[0]
    return PlanView(
        node=placement.node,
        shares=PlannedShare.of(placement.shares),
        pods=len(planned.placed),
        victims=tuple(
            PlannedVictim(
                pod=f"{victim.namespace}/{victim.name}",
                cause=str(victim.cause),
                budget=victim.budget,
                priority=victim.priority,
                bare=candidate.tier.unowned,
                overdraft_permille=-candidate.tier.overdraft,
                gpu_s_lost=round(candidate.used_gpu_s, 3),
                devices=victim.devices,
            )
            for candidate in planned.victims
            for victim in candidate.victims
        ),
    )


def _protected(
    pending: PendingPod,
    cluster: ClusterSnapshot,
    state: PreemptionState,
    rules: PreemptionRules,
    *,
    planned_from: PlanInput,
    now: float,
) -> Iterator[tuple[str, str]]:
    """Yield pods that rank below the pending one, and why they are not evicted."""
    endables = planned_from.endables()
    gangs = planned_from.gangs_among(endables)
    candidates = {endable.lease.pod: endable for endable in endables}
    own_budget = state.budget_of(pending.namespace)
    exclusions = Exclusions(state, rules, now)
    leases = [lease for totals in cluster.nodes for lease in totals.leases]
    for lease, uid in [(held, user) for held in leases for user in held.users]:
        pod = cluster.pods.get(uid)
        if pod is None or lease.pod == pending.pod:
            continue
        if cause_for(pending, state.budget_of(lease.namespace), own_budget, pod.priority) is None:
            continue
        name = f"{pod.namespace}/{pod.name}"
        reason = exclusions.reason(lease, pod)
        if reason is not None:
            yield name, reason
        if lease.pod in candidates:
            yield from ((name, text) for text in _disruption_limits(uid, cluster))
            if gangs.whole((candidates[lease.pod],)) is None:
                yield name, "its gang would have to end as a whole, and not all of it may"


def _disruption_limits(pod: PodUid, cluster: ClusterSnapshot) -> Iterator[str]:
    for budget in cluster.disruption_budgets:
        if pod in budget.pods and budget.allowed < 1:
            yield f"PodDisruptionBudget {budget.name} allows no eviction now"
