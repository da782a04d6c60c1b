"""The command about preemption: what is under way or was done, and what would be for a pod."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.binder.preempt.eviction_client import EvictionClient
from services.binder.preempt.plan import NoPlan, PlanInput, PreemptionPlan, plan
from services.binder.preempt.plan_input import ClusterSnapshot, pending_pods, plan_input
from services.binder.preempt.rules import PendingPod, PreemptionRules, cause_for, exclusion_reason
from services.binder.report.explanations import stamp
from services.cli.inspect import sources
from services.cli.inspect.sources import Reader
from shared.ledger.preemptions import Preemptions
from shared.model.ledger import WaitingPod
from shared.model.preemption import EvictionRecord, Preemption, PreemptionState
from shared.placing.node_fit import fit_on_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What would be done for a pod."""

    pod: str
    found: PreemptionPlan | NoPlan
    under_way: Preemption | None = None
    kept: tuple[tuple[str, str], ...] = ()
    """Pods that could be evicted for it but for something, and what that is."""


def reclaim(flags: argparse.Namespace) -> int:
    """Show the plan for a pod, or what is under way and was done lately."""
    where = sources.find(
        flags.state,
        redis_url=flags.redis_url,
        redis_keys=sources.redis_keys_of(flags),
        kubeconfig=flags.kubeconfig,
    )

    async def reading() -> tuple[PreemptionState, Answer | str | None]:
        async with (
            sources.opened(where, pods=bool(flags.dry_run)) as reader,
            Preemptions.connect(where.redis_url, credentials=where.redis_keys) as takings,
        ):
            affairs = await takings.state(now=time.time())
            if not flags.dry_run:
                return affairs, None
            return affairs, await _planned(reader, affairs, flags)

    affairs, answer = asyncio.run(reading())
    if answer is None:
        _print(shape(affairs) if flags.json else text(affairs))
        return 0
    if isinstance(answer, str):
        print(f"leasehold reclaim: {answer}", file=sys.stderr)
        return 1
    _print(answer_shape(answer) if flags.json else answer_text(answer))
    return 0 if isinstance(answer.found, PreemptionPlan) or answer.under_way else 1


async def _planned(
    reader: Reader, affairs: PreemptionState, flags: argparse.Namespace
) -> Answer | str:
    name, now = f"{flags.namespace}/{flags.dry_run}", time.time()
    pod = await reader.pod(flags.namespace, flags.dry_run)
    if pod is None:
        return f"there is no pod {name}; `kubectl get pods -A` lists them"
    waiting = await reader.ledger.waiting_pods.load([pod.pod])
    if not waiting:
        return f"pod {name} does not wait for devices; `leasehold explain` says what it does"
    under_way = next(
        (each.preemption for each in affairs.open if each.preemption.id == pod.pod), None
    )
    if under_way is not None:
        return Answer(pod=name, found=NoPlan(reason="it is under way"), under_way=under_way)
    rules = PreemptionRules(min_runtime_s=flags.min_runtime_s)
    if not pending_pods(waiting, affairs, rules, now):
        return Answer(pod=name, found=NoPlan(reason=_no_need(waiting[0])))
    pods, disruptions = await EvictionClient(reader.kube).list_pods()
    if pod.pod not in pods:
        return f"pod {name} has just gone"
    cluster = ClusterSnapshot(
        nodes=await reader.accounts(), pods=pods, disruption_budgets=disruptions
    )
    need = PendingPod(
        pod=pod.pod,
        namespace=pod.namespace,
        priority=waiting[0].queued.request.priority,
        preempts=pods[pod.pod].preempts,
    )
    seen = plan_input(need, cluster, affairs, rules, now=now)
    found = plan(waiting[0].queued.request, seen, fit_on_node)
    kept = tuple(sorted(_kept(need, cluster, affairs, rules, seen=seen, now=now)))
    return Answer(pod=name, found=found, kept=kept)


def _no_need(waiting: WaitingPod) -> str:
    request = waiting.queued.request
    if request.gang is not None and request.gang.min_member > 1:
        return "nothing is taken back for pods of a gang"
    if waiting.refusal.permanent:
        return f"no device that becomes free could help: {waiting.refusal.text}"
    return "it asks for no device, or its own namespace's budget ends too soon"


def _kept(
    need: PendingPod,
    cluster: ClusterSnapshot,
    affairs: PreemptionState,
    rules: PreemptionRules,
    *,
    seen: PlanInput,
    now: float,
) -> Iterator[tuple[str, str]]:
    chosen = {each.lease.pod for each in seen.candidates}
    for account in cluster.nodes:
        for lease in account.leases:
            pod, theirs = cluster.pods.get(lease.pod), affairs.budget_of(lease.namespace)
            if pod is None or lease.pod == need.pod:
                continue
            if cause_for(need, theirs, affairs.budget_of(need.namespace), pod.priority) is None:
                continue
            name = f"{lease.namespace}/{lease.name}"
            why = exclusion_reason(lease, pod, affairs, rules, now)
            if why is not None:
                yield name, why
            for budget in cluster.disruption_budgets:
                if lease.pod in chosen and lease.pod in budget.pods and budget.allowed < 1:
                    yield name, f"PodDisruptionBudget {budget.name} allows no eviction now"


def answer_shape(answer: Answer) -> dict[str, Any]:
    """Return a plan for programs."""
    found, taking = answer.found, answer.under_way
    return {
        "pod": answer.pod,
        "plan": plan_shape(found) if isinstance(found, PreemptionPlan) else None,
        "reason": found.reason if isinstance(found, NoPlan) else "",
        "under_way": None if taking is None else taking_shape(taking),
        "kept": [{"pod": pod, "reason": why} for pod, why in answer.kept],
    }


def plan_shape(found: PreemptionPlan) -> dict[str, Any]:
    """Return where the pod would go, and who would leave."""
    return {
        "node": found.node,
        "gets": [
            {"device": each.device, "index": each.index, "memory_mib": each.memory_mib}
            for each in found.shares
        ],
        "victims": [
            {
                "pod": f"{each.lease.namespace}/{each.lease.name}",
                "cause": str(each.victim.cause),
                "budget": each.victim.budget,
                "priority": each.victim.priority,
                "bare": each.tier.unowned,
                "overdraft_permille": -each.tier.overdraft,
                "gpu_s_lost": round(each.used_gpu_s, 3),
                "devices": list(each.victim.devices),
            }
            for each in found.victims
        ],
    }


def answer_text(answer: Answer) -> str:
    """Write a plan for people."""
    found, lines = answer.found, [f"pod         {answer.pod}"]
    if answer.under_way is not None:
        lines.append(f"under way   {_taking_line(answer.under_way)}")
    elif isinstance(found, NoPlan):
        lines.append(f"plan        none: {found.reason}")
    else:
        gets = ", ".join(f"{each.memory_mib} MiB of GPU {each.index}" for each in found.shares)
        lines.append(f"plan        {gets} on {found.node}, once these are evicted:")
        for each in found.victims:
            bare = ", nobody makes another" if each.tier.unowned else ""
            lines.append(
                f"            {each.lease.namespace}/{each.lease.name}: {each.victim.cause}, "
                f"budget {each.victim.budget}, priority {each.victim.priority}, "
                f"{each.used_gpu_s:.0f} GPU-seconds{bare}"
            )
    lines += [f"stays       {pod}: {why}" for pod, why in answer.kept]
    return "\n".join(lines)


def shape(affairs: PreemptionState) -> dict[str, Any]:
    """Return what is under way and what was done, for programs."""
    return {
        "under_way": [taking_shape(each.preemption) for each in affairs.open],
        "evictions": [eviction_shape(each) for each in affairs.evictions],
    }


def taking_shape(taking: Preemption) -> dict[str, Any]:
    """Return what is under way for one pod."""
    return {
        "id": taking.id,
        "for": _beneficiary(taking),
        "stage": str(taking.stage),
        "evict_at": stamp(taking.evict_at) if taking.evict_at else None,
        "victims": [
            {"pod": f"{each.namespace}/{each.name}", "outcome": each.outcome}
            for each in taking.victims
        ],
    }


def eviction_shape(line: EvictionRecord) -> dict[str, Any]:
    """Return a line of the journal."""
    return {
        "at": stamp(line.at),
        "pod": f"{line.namespace}/{line.name}",
        "uid": line.pod,
        "node": line.node,
        "devices": list(line.devices),
        "cause": str(line.cause),
        "budget": line.budget,
        "outcome": str(line.outcome),
        "for": f"{line.for_namespace}/{line.for_name}" if line.for_pod else "",
        "event": line.event,
    }


def text(affairs: PreemptionState) -> str:
    """Write what is under way and what was done in the last day."""
    lines = [f"under way   {_taking_line(each.preemption)}" for each in affairs.open]
    for each in affairs.evictions:
        whose = f"for {each.for_namespace}/{each.for_name}" if each.for_pod else "for nobody"
        lines.append(
            f"{stamp(each.at)}  {each.outcome} {each.namespace}/{each.name} on {each.node} "
            f"{whose}: {each.cause}{f', budget {each.budget}' if each.budget else ''}"
        )
    return "\n".join(lines) or "nothing is being taken back, and nothing was in the last day"


def _taking_line(taking: Preemption) -> str:
    names = ", ".join(f"{each.namespace}/{each.name}" for each in taking.victims)
    when = f", not before {stamp(taking.evict_at)}" if taking.evict_at else ""
    return f"for {_beneficiary(taking) or 'nobody'}: {taking.stage}{when}: {names}"


def _beneficiary(taking: Preemption) -> str:
    return f"{taking.wanted.namespace}/{taking.wanted.name}" if taking.wanted else ""


def _print(content: dict[str, Any] | str) -> None:
    print(content if isinstance(content, str) else json.dumps(content, indent=1))
