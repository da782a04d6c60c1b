"""Why a pod runs where it runs, or why it waits: facts put in order, numbers included."""

from dataclasses import dataclass, replace
from typing import Any

from services.cli.inspect.facts import Facts, PodSeen
from services.cli.inspect.gangs import GangSeen, gang_of
from services.cli.inspect.json_output import lease_shape, refusal_shape
from shared.dialects.reserved import DENIED_ANNOTATIONS, STRIPPED_ANNOTATIONS
from shared.model.fair_share import fair_order, precedence_reason
from shared.model.lease import Lease, LeaseState, Share
from shared.model.lease_copy import ANNOTATION
from shared.model.ledger import WaitingPod
from shared.model.names import BUDGET_GATE, OWN_SCHEDULER
from shared.model.node import cordon_reason
from shared.model.placement import Refusal

STATES = {
    LeaseState.RESERVED: "its share is reserved, the binding is under way",
    LeaseState.BOUND: "it is bound, its kubelet has not asked for the share yet",
    LeaseState.ACTIVE: "its kubelet was told",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `explain` says."""

    verdict: str
    headline: str
    lines: tuple[str, ...] = ()
    next: str = ""
    extra: tuple[tuple[str, Any], ...] = ()
    """Further keys of the JSON form."""


def explain(pod: PodSeen, facts: Facts, schedulers: frozenset[str]) -> Answer:
    """Answer for one pod that exists."""
    lease = next((lease for lease in facts.leases if lease.pod == pod.pod), None)
    gang = gang_of(pod.pod, facts)
    if lease is not None:
        return _with(_running(pod, lease, facts), gang)
    waiting = next((w for w in facts.waiting if w.queued.pod == pod.pod), None)
    if waiting is not None:
        return _with(_waiting(pod, waiting, facts), gang)
    return _without_either(pod, schedulers)


def _with(answer: Answer, gang: GangSeen | None) -> Answer:
    if gang is None:
        return answer
    return replace(
        answer, lines=(*gang.lines, *answer.lines), extra=(*answer.extra, ("gang", gang.shape))
    )


def shape(pod: PodSeen, answer: Answer) -> dict[str, Any]:
    """Return the JSON form; see `shapes.py`."""
    return {
        "verdict": answer.verdict,
        "pod": pod.pod,
        "namespace": pod.namespace,
        "name": pod.name,
        "text": answer.headline,
        "next": answer.next,
        **dict(answer.extra),
    }


def _running(pod: PodSeen, lease: Lease, facts: Facts) -> Answer:
    lines = [
        f"lease       {lease.state}, version {lease.version}, held for "
        f"{age(facts.read_at - lease.created_at)}: {STATES.get(lease.state, '')}",
        f"asked in    {lease.dialect or 'no GPU dialect: it asks for no GPU'}",
        *_shut_lines(lease, facts),
        *(line for share in lease.shares for line in _share_lines(share, facts)),
    ]
    views = {key: value for key, value in sorted(pod.annotations.items()) if _is_view(key)}
    if views:
        lines.append("annotations")
        lines += [f"  {key}: {value}" for key, value in views.items()]
    where = f"on node {lease.node}" if pod.node else f"soon on node {lease.node}"
    return Answer(
        verdict="running",
        headline=f"{pod.namespace}/{pod.name} holds a lease {where}; the pod is {pod.phase}",
        lines=tuple(lines),
        next=f"leasehold trace {pod.name} -n {pod.namespace}",
        extra=(("lease", lease_shape(lease)), ("annotations", views)),
    )


def _shut_lines(lease: Lease, facts: Facts) -> list[str]:
    """Say why a reservation goes no further, if that is so."""
    if lease.state is not LeaseState.RESERVED:
        return []
    why = cordon_reason(
        name
        for account in facts.accounts
        if account.node.facts.name == lease.node
        for name in account.node.served
    )
    return [f"it waits    {why}; if that lasts it is placed elsewhere"] if why else []


def _share_lines(share: Share, facts: Facts) -> list[str]:
    init = " (init)" if share.init else ""
    slot = "" if share.slot is None else f", slot {share.slot}"
    part = f"{share.cores_percent or 'any'} % of the cores of device {share.index}{slot}"
    if share.mig is not None:
        place = f"position {share.mig.position} of layout {share.mig.layout}"
        part = f"instance {share.mig.profile} at {place} of device {share.index}"
    lines = [
        f"container   {share.container}{init}: {share.memory_mib} MiB, {part}, fence {share.fence}"
    ]
    if share.requested_size is not None:
        size = share.requested_size
        requested = f"{size.memory_mib} MiB and {size.cores_percent or 'any'} % of the cores"
        lines.append(f"            resized: its pod requests {requested}")
    known = facts.devices.get(share.device)
    if known is not None:
        _, device, use = known
        lines.append(
            f"            {device.model} {device.uuid}: {use.memory_mib} of {device.memory_mib} "
            f"MiB, {use.cores_percent} % of its cores in {use.shares} of {device.slots} shares"
            f"{'' if device.healthy else f', UNHEALTHY: {device.fault}'.rstrip(': ')}"
        )
    return lines


def _waiting(pod: PodSeen, waiting: WaitingPod, facts: Facts) -> Answer:
    refusal = waiting.refusal
    since = waiting.waiting_since or waiting.queued.created_at
    waited = age(facts.read_at - since)
    turn, queue = _turn(waiting, facts)
    return Answer(
        verdict="waiting",
        headline=f"{pod.namespace}/{pod.name} has waited for {waited}: {refusal.reason}",
        lines=(*_nearest(refusal), *turn),
        next="; ".join(filter(None, (refusal.hint, "`leasehold gpus` shows who holds what"))),
        extra=(("refusal", refusal_shape(refusal)), ("queue", queue)),
    )


def _turn(waiting: WaitingPod, facts: Facts) -> tuple[tuple[str, str], dict[str, Any]]:
    """Say which place the pod has among those that wait, and why another comes before it."""
    turns, namespace = facts.turns, waiting.queued.namespace
    order = fair_order((each.queued for each in facts.waiting), turns)
    place = 1 + [queued.pod for queued in order].index(waiting.queued.pod)
    before = ""
    if place > 1:
        last = order[place - 2]
        why = precedence_reason(last, waiting.queued, turns)
        before = f"; before it comes {last.namespace}/{last.name}, {why}"
    right, part = turns.entitlement_of(namespace), turns.dominant_share(namespace)
    budget = "it has budget left" if right.has_budget else "it has no budget left"
    return (
        f"queue       place {place} of {len(order)}{before}",
        f"namespace   {namespace} holds {part:.1%} of the GPUs, its share is {right.weight}: "
        f"{turns.weighted_dominant_share(namespace):.1%} for each; {budget}",
    ), {
        "place": place,
        "of": len(order),
        "part": round(part, 6),
        "share": right.weight,
        "has_budget": right.has_budget,
    }


def _nearest(refusal: Refusal) -> list[str]:
    lines: list[str] = []
    for number, verdict in enumerate(refusal.nearest_nodes):
        nearest = " (the nearest fit)" if number == 0 else ""
        lines.append(f"node {verdict.node}{nearest}: {verdict.reason}")
        lines += [f"  device {device.index}: {device.reason}" for device in verdict.devices]
    again = "it is offered again as soon as capacity that could fit it is freed"
    if refusal.quota:
        again = f"it is offered again as soon as namespace {refusal.quota} may hold more"
    elif refusal.permanent:
        again = "no freed capacity can help: only a changed pod or cluster can"
    return [*lines, again]


def _usual(schedulers: frozenset[str]) -> str:
    return OWN_SCHEDULER if OWN_SCHEDULER in schedulers else min(schedulers)


def _without_either(pod: PodSeen, schedulers: frozenset[str]) -> Answer:
    name = f"{pod.namespace}/{pod.name}"
    if pod.scheduler not in schedulers:
        ours = " or ".join(sorted(schedulers))
        return Answer(
            verdict="foreign",
            headline=f"{name} is not ours: its schedulerName is {pod.scheduler!r}, not {ours}",
            next=f"set spec.schedulerName to {_usual(schedulers)} and create the pod anew",
        )
    if not pod.lives:
        return Answer(
            verdict="ended",
            headline=f"{name} has {pod.phase.lower()}; its lease has ended",
            next=f"leasehold trace {pod.name} -n {pod.namespace}",
        )
    if pod.gates:
        return _gated(pod)
    if pod.said:
        return Answer(
            verdict="rejected",
            headline=f"{name} is not placed: {pod.said}",
            next="do as it says; a pod whose own request is at fault has to be created anew",
        )
    return Answer(
        verdict="unknown",
        headline=f"{name} is {pod.phase or 'new'} and the ledger knows nothing of it yet",
        next="leasehold audit",
    )


def _gated(pod: PodSeen) -> Answer:
    name, gates = f"{pod.namespace}/{pod.name}", ", ".join(pod.gates)
    if BUDGET_GATE in pod.gates:
        return Answer(
            verdict="gated",
            headline=f"{name} waits until namespace {pod.namespace} has GPU time again: its "
            f"scheduling gate {BUDGET_GATE} goes when its budget's next window begins, or more is "
            "granted",
            next=f"leasehold budget {pod.namespace}",
            extra=(("gates", list(pod.gates)),),
        )
    return Answer(
        verdict="gated",
        headline=f"{name} has scheduling gates: it is placed once they are removed ({gates})",
        next=f"kubectl get pod {pod.name} -n {pod.namespace} -o yaml",
        extra=(("gates", list(pod.gates)),),
    )


def _is_view(key: str) -> bool:
    return key != ANNOTATION and key.startswith((*STRIPPED_ANNOTATIONS, *DENIED_ANNOTATIONS))


def age(seconds: float) -> str:
    """Write a duration as kubectl does: 12s, 5m, 3h, 2d."""
    whole = max(int(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
