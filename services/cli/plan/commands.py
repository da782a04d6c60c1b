"""The commands what-if and defrag."""

import asyncio
import sys
import time
from collections.abc import Collection, Mapping

from services.binder.clients import PodClient
from services.cli import terminal
from services.cli.api_client import ApiClient, NothingFoundError
from services.cli.commands import Defrag, WhatIf
from services.cli.plan import render
from services.cli.plan.moves import DefragView, MovePlan, nodes_for, plan_moves
from services.cli.request.command import load, load_watcher_rules
from services.cli.terminal import program
from services.planner.clients import PlannerClient
from services.planner.plan import ClusterSnapshot
from services.planner.rules import Exclusions, PreemptionRules
from shared.dialects.dialect import Rules
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.types import ApiPod
from shared.model.errors import ConflictError
from shared.model.leases.lease import Lease
from shared.model.leases.preemption import EvictionOutcome
from shared.model.names import PodUid
from shared.model.requests.request import PodRequest
from shared.model.views.plans import ProtectedPod
from shared.model.views.preemptions import PlacingView
from shared.placing.what_if import Forecast, WhatIfOrder
from shared.pods.pod_parser import PodParser
from shared.pods.pod_snapshot import PodSnapshot


async def read_requests(
    kubernetes: KubernetesClient, pods: Collection[PodUid], rules: Rules
) -> dict[PodUid, PodRequest]:
    """Return the requests of these pods, without pods that are gone or cannot be parsed."""
    requests: dict[PodUid, PodRequest] = {}
    async for page in kubernetes.pages("/api/v1/pods"):
        for pod in page.read(ApiPod):
            if pod.metadata.uid in pods:
                parser = PodParser(frozenset({pod.spec.scheduler_name}), rules)
                parsed = parser.parse(pod)
                if parsed.request is not None and not parsed.request_error:
                    requests[parsed.pod] = parsed.request
    return requests


def what_if(flags: WhatIf) -> int:
    """Return 1 if a pod of the manifest would wait."""
    _, text = load(flags.file, sys.stdin)
    order = WhatIfOrder(manifest=text, when=flags.when)
    forecast = ApiClient(flags).post("/api/v1/what-if", order, Forecast)
    terminal.show(flags.output, forecast, render.forecast_text)
    return 1 if forecast.waiting else 0


def defrag(flags: Defrag) -> int:
    """Return 1 if no moves make the waiting pod fit."""
    return asyncio.run(_defrag(flags))


async def _defrag(flags: Defrag) -> int:
    name = f"{flags.namespace}/{flags.pod}"
    now = time.time()
    api = ApiClient(flags)
    pod = api.server.pod(flags.namespace, flags.pod)
    placing = api.get("/api/v1/placing", PlacingView)
    waiting = [pod_waiting for pod_waiting in placing.waiting if pod_waiting.queued.pod == pod.pod]
    if not waiting:
        raise NothingFoundError(
            f"pod {name} does not wait for devices; `{program()} explain` shows its state"
        )
    async with KubernetesClient(api.server.credentials) as kubernetes:
        evictions = PodClient(kubernetes)
        cluster = ClusterSnapshot(placing.nodes, *await PlannerClient(kubernetes).list_pods())
        rules = PreemptionRules(preemption_min_runtime_s=flags.min_runtime_s)
        leases = {lease.pod: lease for totals in placing.nodes for lease in totals.leases}
        exclusions = Exclusions(placing.preemptions, rules, now)
        staying = {
            lease.pod: reason
            for lease in leases.values()
            if (reason := _stays(lease, cluster, exclusions))
        }
        watcher_rules = load_watcher_rules(flags.volcano_conf)
        requests = await read_requests(kubernetes, leases.keys() - staying.keys(), watcher_rules)
        nodes = nodes_for(pod.pod, placing)
        plan = plan_moves(waiting[0].queued.request, nodes, requests, now=now)
        view = DefragView(pod=name, plan=plan, stays=_kept(leases, staying))
        terminal.show(flags.output, view, render.moves_text)
        if plan is None:
            return 1
        return await _evict(plan, cluster.pods, evictions) if flags.evict else 0


def _kept(
    leases: Mapping[PodUid, Lease], staying: Mapping[PodUid, str]
) -> tuple[ProtectedPod, ...]:
    named = [(f"{leases[uid].namespace}/{leases[uid].name}", why) for uid, why in staying.items()]
    return tuple(ProtectedPod(pod=pod, reason=reason) for pod, reason in sorted(named))


def _stays(lease: Lease, cluster: ClusterSnapshot, exclusions: Exclusions) -> str:
    """Return why a pod is not moved, by the rules of preemption, or an empty text."""
    if lease.claim is not None:
        return "a ResourceClaim holds its devices"
    pod = cluster.pods.get(lease.pod)
    reason = exclusions.reason(lease, pod)
    if pod is None or reason:
        return reason or "it is gone"
    if not pod.owner:
        return "no controller would replace it"
    selecting = [budget for budget in cluster.disruption_budgets if lease.pod in budget.pods]
    blocking = [budget.name for budget in selecting if budget.allowed < 1 or len(selecting) > 1]
    return f"PodDisruptionBudget {blocking[0]} allows no eviction now" if blocking else ""


async def _evict(plan: MovePlan, pods: Mapping[PodUid, PodSnapshot], evictions: PodClient) -> int:
    """Evict the pods of a plan, or none of them if a dry run refuses one."""
    moved = [pods[move.uid] for move in plan.moves]
    for dry_run in (True, False):
        for pod in moved:
            outcome, reason = await evictions.evict(pod, dry_run=dry_run)
            if outcome is EvictionOutcome.BLOCKED:
                raise ConflictError(f"{pod.namespace}/{pod.name} cannot be evicted: {reason}")
            if not dry_run:
                print(f"{pod.namespace}/{pod.name}: {outcome}", file=sys.stderr)
    return 0
