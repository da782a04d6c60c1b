"""From what was read to what a plan is made from: who needs, who may have to leave."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.binder.preempt.plan import PlanInput, PreemptionPlan, lost_by
from services.binder.preempt.rules import (
    DisruptionBudget,
    PendingPod,
    PodFacts,
    PreemptionRules,
    VictimCandidate,
    allowance,
    cause_for,
    class_of,
    exclusion_reason,
    is_worthwhile,
    tier_of,
    victim_of,
)
from shared.model.events.pod_events import PodQueued
from shared.model.ledger import NodeTotals, Reservation, WaitingPod
from shared.model.names import PodUid
from shared.model.placement import Placement
from shared.model.preemption import PreemptionState


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """What was read of nodes and pods at about one moment."""

    accounts: Sequence[NodeTotals]
    pods: Mapping[PodUid, PodFacts]
    disruptions: Sequence[DisruptionBudget] = ()


def pending_pods(
    waiting: Sequence[WaitingPod], affairs: PreemptionState, rules: PreemptionRules, now: float
) -> list[WaitingPod]:
    """Return the pods for which something may be taken back, those in best standing first.

    Not those of gangs: room for one of them would be held while the others still wait.
    """
    open_for = {each.preemption.id for each in affairs.open}
    found = []
    for each in waiting:
        request = each.queued.request
        alone = request.gang is None or request.gang.min_member <= 1
        own = affairs.budget_of(each.queued.namespace)
        if (
            request.containers
            and alone
            and not (each.refusal.permanent or each.refusal.quota)
            and each.queued.pod not in open_for
            and is_worthwhile(own, rules, now)
        ):
            found.append(each)

    def rank(each: WaitingPod) -> tuple[int, int, float, str]:
        queued = each.queued
        standing = class_of(affairs.budget_of(queued.namespace))
        return (standing, -queued.request.priority, each.waiting_since, queued.pod)

    return sorted(found, key=rank)


def plan_input(
    need: PendingPod,
    cluster: ClusterSnapshot,
    affairs: PreemptionState,
    rules: PreemptionRules,
    *,
    now: float,
    without: Collection[PodUid] = (),
) -> PlanInput:
    """Return what a plan for the pod in need is made from; `without` these victims."""
    candidates: list[VictimCandidate] = []
    pods = cluster.pods
    for account in cluster.accounts:
        devices = [device for device, _ in account.node.devices]
        for lease in account.leases:
            pod, theirs = pods.get(lease.pod), affairs.budget_of(lease.namespace)
            if pod is None or lease.pod in without or lease.pod == need.pod:
                continue
            cause = cause_for(need, theirs, affairs.budget_of(need.namespace), pod.priority)
            if cause is None or exclusion_reason(lease, pod, affairs, rules, now) is not None:
                continue
            victim = victim_of(lease, pod, cause, theirs)
            candidates.append(
                VictimCandidate(
                    lease=lease,
                    victim=victim,
                    tier=tier_of(victim, pod, theirs),
                    lost=lost_by(lease, devices, now),
                )
            )
    return PlanInput(
        accounts=cluster.accounts,
        candidates=candidates,
        ending=frozenset(uid for uid, pod in pods.items() if pod.ending),
        disruptions=cluster.disruptions,
        allowance=allowance(affairs, rules, now),
    )


def reservation_of(queued: PodQueued, found: PreemptionPlan) -> Reservation:
    """Return what the pod in need will ask the ledger for."""
    request = queued.request
    return Reservation(
        pod=queued.pod,
        namespace=queued.namespace,
        name=queued.name,
        candidates=(Placement(node=found.node, shares=found.shares),),
        dialect=request.dialect,
        resources=request.resources,
        anti_affinity_groups=request.anti_affinity_groups,
        gang=request.gang.name if request.gang else "",
        priority=request.priority,
        memo=request.memo,
        trace=queued.trace,
    )
