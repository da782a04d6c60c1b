"""The command `preemptions`: those in progress and recent evictions, or a dry run for a pod."""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from services.binder.clients import PodClient
from services.binder.observations import DisruptionBudget, PodSnapshot
from services.binder.preempt.plan import (
    ClusterSnapshot,
    NoPlan,
    PlanInput,
    PreemptionPlan,
    pending_pods,
    plan,
    plan_input,
)
from services.binder.preempt.rules import PendingPod, PreemptionRules, cause_for, exclusion_reason
from services.cli import terminal
from services.cli.api_client import ApiClient, locate
from services.cli.commands import PreemptionsArguments
from services.cli.formats import timestamp
from services.cli.terminal import program, program_name
from shared.kubernetes.client import KubernetesClient
from shared.model.errors import RequestError
from shared.model.ledger import WaitingPod
from shared.model.names import PodUid
from shared.model.preemption import PlacingView, PreemptionState
from shared.model.views import (
    DryRunView,
    PlannedShare,
    PlannedVictim,
    PlanView,
    PreemptionsView,
    PreemptionView,
    ProtectedPod,
)
from shared.placing.anti_affinity import repelled_request


class CannotPreemptError(RequestError):
    """The pod does not wait, or is gone."""


def preemptions(flags: PreemptionsArguments) -> int:
    """Show the plan for a pod, or the preemptions in progress and the evictions of the last day."""
    api = ApiClient(locate(flags))
    if not flags.dry_run:
        view = api.get("/api/v1/preemptions", PreemptionsView)
        _print(flags, view, text(view))
        return 0
    try:
        found = _dry_run(api, flags)
    except CannotPreemptError as error:
        print(f"{program_name()} preemptions: {error}", file=sys.stderr)
        return 1
    _print(flags, found, dry_run_text(found))
    return 0 if found.plan or found.in_progress else 1


def _print(flags: PreemptionsArguments, document: object, content: str) -> None:
    if flags.output:
        terminal.print_document(document, flags.output)
    else:
        print(content)


def dry_run_text(found: DryRunView) -> str:
    """Format a dry run for people."""
    lines = [f"pod         {found.pod}"]
    if found.in_progress is not None:
        lines.append(f"in progress {_preemption_line(found.in_progress)}")
    elif found.plan is None:
        lines.append(f"plan        none: {found.reason}")
    else:
        shares = [f"{each.memory_mib} MiB of GPU {each.index}" for each in found.plan.shares]
        where = f"{', '.join(shares)} on {found.plan.node}"
        lines.append(f"plan        {where}, once these are evicted:")
        for each in found.plan.victims:
            bare = ", no controller replaces it" if each.bare else ""
            lines.append(
                f"            {each.pod}: {each.cause}, budget {each.budget}, priority "
                f"{each.priority}, {each.gpu_s_lost:.0f} GPU-seconds{bare}"
            )
    lines += [f"stays       {each.pod}: {each.reason}" for each in found.protected]
    return "\n".join(lines)


def text(view: PreemptionsView) -> str:
    """Format the preemptions in progress and the evictions of the last day for people."""
    lines = [f"in progress {_preemption_line(each)}" for each in view.in_progress]
    for each in view.evictions:
        budget = f", budget {each.budget}" if each.budget else ""
        lines.append(
            f"{timestamp(each.at)}  {each.outcome} {each.pod} on {each.node} "
            f"for {each.beneficiary or 'no pod'}: {each.cause}{budget}"
        )
    return "\n".join(lines) or "no preemption in progress, and no eviction in the last day"


def _preemption_line(preemption: PreemptionView) -> str:
    victims = ", ".join(each.pod for each in preemption.victims)
    not_before = f", not before {timestamp(preemption.evict_at)}" if preemption.evict_at else ""
    beneficiary = preemption.beneficiary or "no pod"
    return f"for {beneficiary}: {preemption.stage}{not_before}: {victims}"


def _dry_run(api: ApiClient, flags: PreemptionsArguments) -> DryRunView:
    """Plan for the pod as the binder would. Raises CannotPreemptError if the pod cannot preempt."""
    name, now = f"{flags.namespace}/{flags.dry_run}", time.time()
    pod = api.server.pod(flags.namespace, flags.dry_run)
    if pod is None:
        raise CannotPreemptError(f"there is no pod {name}; `kubectl get pods -A` lists them")
    placing = api.get("/api/v1/placing", PlacingView)
    waiting = next((each for each in placing.waiting if each.queued.pod == pod.pod), None)
    if waiting is None:
        raise CannotPreemptError(
            f"pod {name} does not wait for devices; `{program()} explain` shows its state"
        )
    shown = api.get("/api/v1/preemptions", PreemptionsView)
    in_progress = next((each for each in shown.in_progress if each.id == pod.pod), None)
    if in_progress is not None:
        reason = "a preemption for it is in progress"
        return DryRunView(pod=name, reason=reason, in_progress=in_progress)
    rules = PreemptionRules(min_runtime_s=flags.min_runtime_s)
    if not pending_pods([waiting], placing.preemptions, rules, now):
        return DryRunView(pod=name, reason=_ineligible_reason(waiting))
    pods, disruptions = asyncio.run(_list_pods(api))
    if pod.pod not in pods:
        raise CannotPreemptError(f"pod {name} is gone")
    cluster = ClusterSnapshot(placing.nodes, pods, disruptions)
    return _planned(name, waiting, cluster, placing.preemptions, rules, now=now)


def _planned(
    name: str,
    waiting: WaitingPod,
    cluster: ClusterSnapshot,
    state: PreemptionState,
    rules: PreemptionRules,
    *,
    now: float,
) -> DryRunView:
    queued = waiting.queued
    pending = PendingPod(
        pod=queued.pod,
        namespace=queued.namespace,
        priority=queued.request.priority,
        preempts=cluster.pods[queued.pod].preempts,
    )
    planned_from = plan_input(pending, cluster, state, rules, now=now)
    protected = _protected(pending, cluster, state, rules, planned_from=planned_from, now=now)
    found = plan(
        repelled_request(queued, (node.node.facts for node in cluster.nodes)),
        planned_from,
    )
    return DryRunView(
        pod=name,
        plan=None if isinstance(found, NoPlan) else _plan_view(found),
        reason=found.reason if isinstance(found, NoPlan) else "",
        protected=tuple(ProtectedPod(pod=one, reason=why) for one, why in sorted(protected)),
    )


async def _list_pods(
    api: ApiClient,
) -> tuple[Mapping[PodUid, PodSnapshot], Sequence[DisruptionBudget]]:
    async with KubernetesClient(api.server.credentials) as kubernetes:
        return await PodClient(kubernetes).list_pods()


def _plan_view(found: PreemptionPlan) -> PlanView:
    return PlanView(
        node=found.node,
        shares=PlannedShare.of(found.shares),
        victims=tuple(
            PlannedVictim(
                pod=f"{each.lease.namespace}/{each.lease.name}",
                cause=str(each.victim.cause),
                budget=each.victim.budget,
                priority=each.victim.priority,
                bare=each.tier.unowned,
                overdraft_permille=-each.tier.overdraft,
                gpu_s_lost=round(each.used_gpu_s, 3),
                devices=each.victim.devices,
            )
            for each in found.victims
        ),
    )


def _ineligible_reason(waiting: WaitingPod) -> str:
    request = waiting.queued.request
    if request.gang is not None and request.gang.min_member > 1:
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
    """Return the pods that rank below the pending one and are not evicted, each with a reason."""
    candidates = {each.lease.pod for each in planned_from.candidates}
    own_budget = state.budget_of(pending.namespace)
    for lease in (lease for totals in cluster.nodes for lease in totals.leases):
        pod = cluster.pods.get(lease.pod)
        if pod is None or lease.pod == pending.pod:
            continue
        if cause_for(pending, state.budget_of(lease.namespace), own_budget, pod.priority) is None:
            continue
        name = f"{lease.namespace}/{lease.name}"
        reason = exclusion_reason(lease, pod, state, rules, now)
        if reason is not None:
            yield name, reason
        if lease.pod in candidates:
            yield from ((name, text) for text in _disruption_limits(lease.pod, cluster))


def _disruption_limits(pod: PodUid, cluster: ClusterSnapshot) -> Iterator[str]:
    for budget in cluster.disruption_budgets:
        if pod in budget.pods and budget.allowed < 1:
            yield f"PodDisruptionBudget {budget.name} allows no eviction now"
