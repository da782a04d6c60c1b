"""The explanation why a pod runs on its node, or why it waits; pure."""

from dataclasses import dataclass, replace
from typing import Any

from services.cli.formats import age, measured_text, timestamp
from services.cli.inspect.gangs import GangSummary, gang_of
from services.cli.inspect.json_output import lease_shape, refusal_shape
from services.cli.snapshot.snapshot import PodSummary, Snapshot
from shared.dialects import KUBE_SCHEDULER
from shared.dialects.reserved import DENIED_ANNOTATIONS, STRIPPED_ANNOTATIONS
from shared.model.fair_share import fair_order, precedence_reason
from shared.model.lease import Lease, LeaseState, Share
from shared.model.lease_copy import ANNOTATION
from shared.model.ledger import WaitingPod
from shared.model.names import BUDGET_GATE, OWN_SCHEDULER
from shared.model.node import cordon_reason
from shared.model.placement import Refusal
from shared.pods.rejections import advice, causes

STATES = {
    LeaseState.RESERVED: "its share is reserved, the binding is in progress",
    LeaseState.BOUND: "it is bound, its kubelet has not requested the devices yet",
    LeaseState.ACTIVE: "devices handed to the kubelet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The output of `explain`."""

    verdict: str
    headline: str
    lines: tuple[str, ...] = ()
    next: str = ""
    extra: tuple[tuple[str, Any], ...] = ()
    """Further keys of the JSON form."""


def explain(
    pod: PodSummary, snapshot: Snapshot, schedulers: frozenset[str], program: str = "leasehold"
) -> Explanation:
    """Explain the state of one pod that exists; `program` runs this program again."""
    lease = next((lease for lease in snapshot.leases if pod.pod in lease.users), None)
    gang = gang_of(pod.pod, snapshot)
    if lease is not None:
        return _with_gang(_running(pod, lease, snapshot, program), gang)
    waiting = next((one for one in snapshot.waiting if one.queued.pod == pod.pod), None)
    if waiting is not None:
        return _with_gang(_waiting(pod, waiting, snapshot, program), gang)
    return _without_lease(pod, schedulers, program)


def _with_gang(explanation: Explanation, gang: GangSummary | None) -> Explanation:
    if gang is None:
        return explanation
    return replace(
        explanation,
        lines=(*gang.lines, *explanation.lines),
        extra=(*explanation.extra, ("gang", gang.shape)),
    )


def shape(pod: PodSummary, explanation: Explanation) -> dict[str, Any]:
    """Return the JSON form; see `json_output`."""
    return {
        "verdict": explanation.verdict,
        "pod": pod.pod,
        "namespace": pod.namespace,
        "name": pod.name,
        "text": explanation.headline,
        "next": explanation.next,
        **dict(explanation.extra),
    }


def _running(pod: PodSummary, lease: Lease, snapshot: Snapshot, program: str) -> Explanation:
    lines = [
        f"lease       {lease.state}, version {lease.version}, held for "
        f"{age(snapshot.read_at - lease.created_at)}: {STATES.get(lease.state, '')}",
        *_origin_lines(lease),
        *([f"chosen      {lease.weighed}"] if lease.weighed else []),
        *_idle_lines(lease, snapshot),
        *_cordon_lines(lease, snapshot),
        *(line for share in lease.shares for line in _share_lines(lease, share, snapshot)),
    ]
    views = {key: value for key, value in sorted(pod.annotations.items()) if _is_view(key)}
    if views:
        lines.append("annotations")
        lines += [f"  {key}: {value}" for key, value in views.items()]
    where = f"on node {lease.node}" if pod.node else f"soon on node {lease.node}"
    return Explanation(
        verdict="running",
        headline=f"{pod.namespace}/{pod.name} holds a lease {where}; the pod is {pod.phase}",
        lines=tuple(lines),
        next=_next_of_running(pod, lease, snapshot, program),
        extra=(("lease", lease_shape(lease, snapshot.usage)), ("annotations", views)),
    )


def _next_of_running(pod: PodSummary, lease: Lease, snapshot: Snapshot, program: str) -> str:
    faults = snapshot.device_faults
    if any(share.device in faults for share in lease.shares):
        return (
            f"kubectl delete pod {pod.name} -n {pod.namespace}: the new pod of its controller gets "
            "a healthy GPU"
        )
    return f"{program} trace {pod.name} -n {pod.namespace}"


def _origin_lines(lease: Lease) -> list[str]:
    """Return how the pod requested its shares."""
    if lease.claim is None:
        return [f"dialect     {lease.dialect or 'none: it requests no GPU'}"]
    pods = len(lease.claim.consumers)
    users = f", which {pods} pods use" if pods > 1 else ""
    return [f"claim       {lease.namespace}/{lease.name}{users}"]


def _idle_lines(lease: Lease, snapshot: Snapshot) -> list[str]:
    """Return since when nothing of the lease has been used, if it is idle."""
    since = snapshot.usage.lease_idle_since(lease)
    if since is None:
        return []
    for_ = age(snapshot.usage.read_at - since)
    return [f"idle        for {for_}, since {timestamp(since)}: its pod holds it without using it"]


def _cordon_lines(lease: Lease, snapshot: Snapshot) -> list[str]:
    """Return why a reservation waits for its binding, if its node is cordoned."""
    if lease.state is not LeaseState.RESERVED:
        return []
    reason = cordon_reason(
        name
        for totals in snapshot.nodes
        if totals.node.facts.name == lease.node
        for name in totals.node.served
    )
    return [f"waits for   {reason}; if that lasts, the pod is placed elsewhere"] if reason else []


def _share_lines(lease: Lease, share: Share, snapshot: Snapshot) -> list[str]:
    init = " (init)" if share.init else ""
    slot = "" if share.slot is None else f", slot {share.slot}"
    part = f"{share.cores_percent or 'any'} % of the cores of device {share.index}{slot}"
    if share.mig is not None:
        place = f"position {share.mig.position} of layout {share.mig.layout}"
        part = f"instance {share.mig.profile} at {place} of device {share.index}"
    lines = [
        f"{'request  ' if lease.claim else 'container'}   {share.container}{init}: "
        f"{share.memory_mib} MiB, {part}, fence {share.fence}"
    ]
    if share.requested_size is not None:
        size = share.requested_size
        requested = f"{size.memory_mib} MiB and {size.cores_percent or 'any'} % of the cores"
        lines.append(f"            resized: its pod requests {requested}")
    measured = snapshot.usage.of(lease, share)
    if measured is not None:
        lines.append(f"            {measured_text(measured, snapshot.read_at)}")
    stored = snapshot.devices.get(share.device)
    if stored is not None:
        _, device, use = stored
        lines.append(
            f"            {device.model} {device.uuid}: {use.memory_mib} of {device.memory_mib} "
            f"MiB, {use.cores_percent} % of its cores in {use.shares} of {device.slots} shares"
            f"{'' if device.healthy else f', UNHEALTHY: {device.fault}'.rstrip(': ')}"
        )
    return lines


def _waiting(pod: PodSummary, waiting: WaitingPod, snapshot: Snapshot, program: str) -> Explanation:
    refusal = waiting.refusal
    since = waiting.waiting_since or waiting.queued.created_at
    waited = age(snapshot.read_at - since)
    queue_lines, queue = _queue_position(waiting, snapshot)
    return Explanation(
        verdict="waiting",
        headline=f"{pod.namespace}/{pod.name} has waited for {waited}: {refusal.reason}",
        lines=(*_nearest_lines(refusal), *queue_lines),
        next="; ".join(filter(None, (refusal.hint, f"`{program} gpus` shows every lease"))),
        extra=(("refusal", refusal_shape(refusal)), ("queue", queue)),
    )


def _queue_position(
    waiting: WaitingPod, snapshot: Snapshot
) -> tuple[tuple[str, str], dict[str, Any]]:
    """Return the pod's position among those that wait, and why another precedes it."""
    fair_share, namespace = snapshot.fair_share, waiting.queued.namespace
    known = {each.queued.pod: each.queued for each in snapshot.waiting}
    order = snapshot.queue
    if order is None:
        order = tuple(queued.pod for queued in fair_order(known.values(), fair_share))
    position = 1 + order.index(waiting.queued.pod)
    before = ""
    if position > 1:
        previous = known.get(order[position - 2])
        before = "; after a pod of another namespace"
        if previous is not None:
            reason = precedence_reason(previous, waiting.queued, fair_share)
            before = f"; after {previous.namespace}/{previous.name}, {reason}"
    entitlement = fair_share.entitlement_of(namespace)
    dominant_share = fair_share.dominant_share(namespace)
    budget = "it has budget left" if entitlement.has_budget else "it has no budget left"
    return (
        f"queue       position {position} of {len(order)}{before}",
        f"namespace   {namespace} holds {dominant_share:.1%} of the GPUs, its weight is "
        f"{entitlement.weight}: {fair_share.weighted_dominant_share(namespace):.1%} per unit of "
        f"weight; {budget}",
    ), {
        "position": position,
        "of": len(order),
        "dominant_share": round(dominant_share, 6),
        "weight": entitlement.weight,
        "has_budget": entitlement.has_budget,
    }


def _nearest_lines(refusal: Refusal) -> list[str]:
    lines: list[str] = []
    for number, verdict in enumerate(refusal.nearest_nodes):
        nearest = " (the nearest fit)" if number == 0 else ""
        lines.append(f"node {verdict.node}{nearest}: {verdict.reason}")
        lines += [f"  device {device.index}: {device.reason}" for device in verdict.devices]
    retry = "it is retried as soon as capacity that could fit it is freed"
    if refusal.quota:
        retry = f"it is retried as soon as namespace {refusal.quota} may hold more"
    elif refusal.permanent:
        retry = "no freed capacity can help: only a changed pod or cluster can"
    return [*lines, retry]


def _default_scheduler(schedulers: frozenset[str]) -> str:
    return OWN_SCHEDULER if OWN_SCHEDULER in schedulers else min(schedulers)


def _without_lease(pod: PodSummary, schedulers: frozenset[str], program: str) -> Explanation:
    name = f"{pod.namespace}/{pod.name}"
    if pod.scheduler not in schedulers:
        return _of_another_scheduler(pod, schedulers, program)
    if not pod.is_active:
        return _ended(pod, program)
    if pod.gates:
        return _gated(pod, program)
    if pod.unschedulable_message and pod.scheduler == KUBE_SCHEDULER:
        return Explanation(
            verdict="waiting",
            headline=f"{name} waits; kube-scheduler reports: {pod.unschedulable_message}",
            next=f"kubectl describe pod {pod.name} -n {pod.namespace}",
        )
    if pod.unschedulable_message:
        return Explanation(
            verdict="rejected",
            headline=f"{name} is not placed: {pod.unschedulable_message}",
            next="fix what the message names; a pod with an invalid request must be recreated",
        )
    return Explanation(
        verdict="unknown",
        headline=f"{name} is {pod.phase or 'new'} and not in the ledger yet",
        next=f"{program} audit",
    )


def _ended(pod: PodSummary, program: str) -> Explanation:
    """Explain a terminated pod, or one that was bound and that its node then refused."""
    name = f"{pod.namespace}/{pod.name}"
    if not pod.rejection:
        return Explanation(
            verdict="ended",
            headline=f"{name} has {pod.phase.lower()}; its lease has ended",
            next=f"{program} trace {pod.name} -n {pod.namespace}",
        )
    return Explanation(
        verdict="ended",
        headline=f"{name} was rejected by the kubelet of node {pod.node}: {pod.rejection}",
        lines=(causes(pod.rejection),),
        next=advice(pod.rejection, pod.node),
    )


def _of_another_scheduler(pod: PodSummary, schedulers: frozenset[str], program: str) -> Explanation:
    name = f"{pod.namespace}/{pod.name}"
    if pod.claims and not pod.node:
        reported = pod.unschedulable_message or "no reason yet"
        return Explanation(
            verdict="waiting",
            headline=f"{name} waits for {pod.scheduler} to allocate its ResourceClaims "
            f"({', '.join(pod.claims)}); it reports: {reported}",
            next=f"kubectl describe pod {pod.name} -n {pod.namespace}; `{program} gpus` shows "
            "every lease",
        )
    ours = " or ".join(sorted(schedulers))
    return Explanation(
        verdict="foreign",
        headline=f"{name} is not scheduled by Leasehold: its schedulerName is "
        f"{pod.scheduler!r}, not {ours}",
        next=f"set spec.schedulerName to {_default_scheduler(schedulers)} and recreate the pod",
    )


def _gated(pod: PodSummary, program: str) -> Explanation:
    name, gates = f"{pod.namespace}/{pod.name}", ", ".join(pod.gates)
    if BUDGET_GATE in pod.gates:
        return Explanation(
            verdict="gated",
            headline=f"{name} waits until namespace {pod.namespace} has GPU time again: its "
            f"scheduling gate {BUDGET_GATE} goes when its budget's next window begins, or more is "
            "granted",
            next=f"{program} budget {pod.namespace}",
            extra=(("gates", list(pod.gates)),),
        )
    return Explanation(
        verdict="gated",
        headline=f"{name} has scheduling gates: it is placed once they are removed ({gates})",
        next=f"kubectl get pod {pod.name} -n {pod.namespace} -o yaml",
        extra=(("gates", list(pod.gates)),),
    )


def _is_view(key: str) -> bool:
    return key != ANNOTATION and key.startswith((*STRIPPED_ANNOTATIONS, *DENIED_ANNOTATIONS))
