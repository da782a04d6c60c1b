"""The command `preemptions`: those in progress and recent evictions, or a dry run for a pod."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator

from services.binder.preempt.eviction_client import EvictionClient
from services.binder.preempt.plan import NoPlan, PlanInput, PreemptionPlan, plan
from services.binder.preempt.plan_input import ClusterSnapshot, pending_pods, plan_input
from services.binder.preempt.rules import PendingPod, PreemptionRules, cause_for, exclusion_reason
from services.cli import terminal
from services.cli.admin.preemption_render import DryRun, dry_run_shape, dry_run_text, shape, text
from services.cli.program import program, program_name
from services.cli.snapshot.location import locate_ledger
from services.cli.snapshot.snapshot_reader import SnapshotReader, open_reader
from shared.ledger.preemptions import Preemptions
from shared.model.ledger import WaitingPod
from shared.model.names import PodUid
from shared.model.preemption import PreemptionState
from shared.placing.anti_affinity import repelled_request


def preemptions(flags: argparse.Namespace) -> int:
    """Show the plan for a pod, or the preemptions in progress and the evictions of the last day."""
    location = locate_ledger(flags)

    async def read() -> tuple[PreemptionState, DryRun | str | None]:
        async with (
            open_reader(location, pods=bool(flags.dry_run)) as reader,
            Preemptions.connect(
                location.redis_url, credentials=location.redis_credentials
            ) as stored,
        ):
            state = await stored.state(now=time.time())
            if not flags.dry_run:
                return state, None
            return state, await _dry_run(reader, state, flags)

    state, dry_run = asyncio.run(read())
    if isinstance(dry_run, str):
        print(f"{program_name()} preemptions: {dry_run}", file=sys.stderr)
        return 1
    if dry_run is None:
        _print(flags, shape(state), text(state))
        return 0
    _print(flags, dry_run_shape(dry_run), dry_run_text(dry_run))
    return 0 if isinstance(dry_run.found, PreemptionPlan) or dry_run.in_progress else 1


def _print(flags: argparse.Namespace, document: dict[str, object], content: str) -> None:
    if flags.output:
        terminal.print_document(document, flags.output)
    else:
        print(content)


async def _dry_run(
    reader: SnapshotReader, state: PreemptionState, flags: argparse.Namespace
) -> DryRun | str:
    """Plan for the pod as the binder would; returns text if the pod cannot preempt."""
    name, now = f"{flags.namespace}/{flags.dry_run}", time.time()
    pod = await reader.pod(flags.namespace, flags.dry_run)
    if pod is None:
        return f"there is no pod {name}; `kubectl get pods -A` lists them"
    waiting = await reader.ledger.waiting_pods.load([pod.pod])
    if not waiting:
        return f"pod {name} does not wait for devices; `{program()} explain` shows its state"
    in_progress = next(
        (each.preemption for each in state.open if each.preemption.id == pod.pod), None
    )
    if in_progress is not None:
        found = NoPlan(reason="a preemption for it is in progress")
        return DryRun(pod=name, found=found, in_progress=in_progress)
    rules = PreemptionRules(min_runtime_s=flags.min_runtime_s)
    if not pending_pods(waiting, state, rules, now):
        return DryRun(pod=name, found=NoPlan(reason=_ineligible_reason(waiting[0])))
    pods, disruptions = await EvictionClient(reader.kubernetes).list_pods()
    if pod.pod not in pods:
        return f"pod {name} is gone"
    cluster = ClusterSnapshot(await reader.nodes(), pods, disruptions)
    pending = PendingPod(
        pod=pod.pod,
        namespace=pod.namespace,
        priority=waiting[0].queued.request.priority,
        preempts=pods[pod.pod].preempts,
    )
    planned_from = plan_input(pending, cluster, state, rules, now=now)
    protected = _protected(pending, cluster, state, rules, planned_from=planned_from, now=now)
    return DryRun(
        pod=name,
        found=plan(
            repelled_request(waiting[0].queued, (node.node.facts for node in cluster.nodes)),
            planned_from,
        ),
        protected=tuple(sorted(protected)),
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
