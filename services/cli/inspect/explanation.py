"""The explanation why a pod runs on its node, or why it waits; pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from msgspec import structs

from services.cli.formats import age, measured_text, size_text
from services.cli.inspect.other_nodes import other_nodes_lines
from services.cli.pod_summary import PodSummary
from shared.dialects import KUBE_SCHEDULER
from shared.dialects.reserved import DENIED_ANNOTATIONS, STRIPPED_ANNOTATIONS
from shared.dialects.vocabulary import did_you_mean, request_one
from shared.model.events.pod_events import MUST_WAIT
from shared.model.leases.lease import LeaseState, MigPlacement
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.names import BUDGET_GATE, OWN_SCHEDULER, DeviceUuid, Namespace, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.request import VolumeRule
from shared.model.views.gpus import DeviceView, NodeDevices, ShareView
from shared.model.views.leases import LeaseView
from shared.model.views.pods import GangView, PodView, ProcessView, QueuePlace, WaitingDetails
from shared.model.views.view import View
from shared.placing.advice import RECOVERS
from shared.placing.node_filters import WAITS
from shared.pods.manifest_patches import PatchOperation, json_patch
from shared.pods.observed_pod import advice, causes

NAMED_PODS = 8
NO_WAITING = ("waiting ", "ask an administrator", "no node ")
"""Hints that begin so: the end of other pods does not help alone."""
UNKNOWN = "unknown"
STATES = {
    LeaseState.RESERVED: "its share is reserved, and the pod is being bound",
    LeaseState.BOUND: "the pod is bound, and its containers have not started yet",
    LeaseState.ACTIVE: "its containers have their GPUs",
}


class Explanation(View, frozen=True, kw_only=True, omit_defaults=True):
    verdict: str
    """`running`, `waiting`, `gated`, `rejected`, `foreign`, `ended` or `unknown`."""
    pod: PodUid
    namespace: Namespace
    name: str
    text: str
    lines: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    next: str = ""
    patch: tuple[PatchOperation, ...] = ()
    """Of the pod: the changes that `next` names."""
    lease: LeaseView | None = None
    annotations: dict[str, str] | None = None
    """None if the pod holds no lease."""
    waiting: WaitingDetails | None = None
    gang: GangView | None = None
    gates: tuple[str, ...] = ()


def explanation_of(
    pod: PodSummary,
    view: PodView | None,
    schedulers: frozenset[str],
    program: str = "leasehold",
    *,
    nodes: Sequence[NodeDevices] = (),
    problems: Sequence[str] = (),
    claims: Sequence[str] = (),
    manifest: Mapping[str, Any] | None = None,
) -> Explanation:
    """`program` runs this program again; `problems` are those of components.

    All `nodes` are compared with that of a lease. `claims` are lines about ResourceClaims;
    `manifest` gets the patch.
    """
    explanation = _without_problems(pod, view, schedulers, program, nodes)
    lines = (*claims, *explanation.lines, *(f"problem     {problem}" for problem in problems))
    is_due_to_them = problems and explanation.verdict == UNKNOWN
    then = f"{program} doctor" if is_due_to_them else explanation.next
    waiting = explanation.waiting
    patch = json_patch(manifest, waiting.changes) if waiting and manifest is not None else ()
    return structs.replace(explanation, lines=lines, next=then, patch=patch)


def _without_problems(
    pod: PodSummary,
    view: PodView | None,
    schedulers: frozenset[str],
    program: str,
    nodes: Sequence[NodeDevices],
) -> Explanation:
    if view is not None and view.lease is not None:
        return _running(pod, view, view.lease, program, nodes)
    if view is not None and view.waiting is not None and BUDGET_GATE not in pod.gates:
        return _waiting(pod, view, view.waiting, program)
    return _without_lease(pod, schedulers, program)


def _explained(pod: PodSummary, verdict: str, text: str, **more: Any) -> Explanation:
    name = f"{pod.namespace}/{pod.name}"
    return Explanation(
        verdict=verdict,
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        text=f"{name} {text}",
        **more,
    )


def _gang_lines(gang: GangView | None) -> Iterator[str]:
    if gang is None:
        return
    rule = f", at least {gang.min_member} run together or none" if gang.min_member else ""
    head = f"gang        {gang.name}{rule}: {len(gang.holding)} of its pods hold a lease, "
    yield f"{head}{len(gang.waiting)} wait"
    for title, names in (("hold", gang.holding), ("wait", gang.waiting)):
        if names:
            more = f" and {len(names) - NAMED_PODS} more" if len(names) > NAMED_PODS else ""
            yield f"            {title}: {', '.join(names[:NAMED_PODS])}{more}"


def _running(
    pod: PodSummary,
    view: PodView,
    lease: LeaseView,
    program: str,
    nodes: Sequence[NodeDevices],
) -> Explanation:
    devices = {device.uuid: device for device in view.devices}
    views = {key: value for key, value in sorted(pod.annotations.items()) if _is_view(key)}
    details = [
        f"lease       {lease.state}: {STATES.get(LeaseState(lease.state), '')}",
        *([f"requested   in the words of {lease.dialect}"] if lease.dialect else []),
    ]
    for share in lease.shares:
        details += _detail_lines(lease, share, devices.get(share.device))
    if views:
        details += ["annotations", *(f"  {key}: {value}" for key, value in views.items())]
    name = f"{pod.name} -n {pod.namespace}"
    then = f"{program} trace {name}; -o wide shows more"
    if lease.unhealthy_devices:
        then = _to_a_healthy_gpu(pod)
    verb = "runs" if pod.phase == "Running" else "starts" if pod.node else "will start"
    return _explained(
        pod,
        "running",
        f"{verb} on node {lease.node}; the pod is {pod.phase}",
        lines=(
            *_summary_lines(pod, view, lease),
            *_sensor_lines(lease, nodes),
            *_choice_lines(lease, nodes),
        ),
        details=tuple(details),
        next=then,
        lease=lease,
        annotations=views,
        gang=view.gang,
    )


def _to_a_healthy_gpu(pod: PodSummary) -> str:
    name = f"{pod.name} -n {pod.namespace}"
    if pod.controller:
        return f"kubectl delete pod {name}: {pod.controller} creates another one, on a healthy GPU"
    manifest = f"{pod.name}.yaml"
    return (
        "wait until the GPU has recovered; or, since no controller creates this pod again: "
        f"kubectl get pod {name} -o yaml > {manifest} && kubectl replace --force -f {manifest}, "
        "which gives it a healthy GPU and loses what its containers have not saved"
    )


def _summary_lines(pod: PodSummary, view: PodView, lease: LeaseView) -> Iterator[str]:
    yield from _gang_lines(view.gang)
    yield from _claim_lines(lease)
    devices = {device.uuid: device for device in view.devices}
    alike: dict[tuple[str, str, str, MigPlacement | None], list[ShareView]] = {}
    for share in lease.shares:
        alike.setdefault(_share_kind(lease, share, devices.get(share.device)), []).append(share)
    for (kind, size, held, _), shares in alike.items():
        yield from _alike_lines(kind, size, shares, view.read_at)
        if held:
            yield f"held        {held}"
        yield from _read_back_lines(shares)
    yield from _process_lines(view.processes)
    yield from _lost_lines(lease, devices)
    yield from _resize_lines(lease)
    yield f"since       {timestamp(lease.created_at)}, {age(view.read_at - lease.created_at)} ago"
    if (since := lease.idle_since) is not None:
        idle_for = f"for {age(view.read_at - since)}, since {timestamp(since)}"
        yield f"idle        {idle_for}: its pod holds it without using it"
    if lease.state == LeaseState.RESERVED:
        yield f"until       {timestamp(lease.expires_at)} if it is not bound before"
    else:
        latest = "its pod ends"
        if lease.ends_by is not None:
            latest = f"{timestamp(lease.ends_by)} at the latest: its maximum run time"
        expected = lease.expected_end
        yield f"until       {latest}{f'; expected {timestamp(expected)}' if expected else ''}"
    if view.cordoned and lease.state == LeaseState.RESERVED:
        yield f"waits for   {view.cordoned}; if that lasts, the pod is placed elsewhere"
    elif lease.state == LeaseState.RESERVED and MUST_WAIT in pod.unschedulable_message:
        yield f"waits       {pod.unschedulable_message.partition(MUST_WAIT)[2]}"


def _read_back_lines(shares: Sequence[ShareView]) -> Iterator[str]:
    """Of several shares, yield what differs from the lease; of what nothing holds, only the use."""
    for share in shares:
        read = share.measured
        if read is None:
            continue
        at = timestamp(read.read_back_at)
        if read.held_difference:
            when = f" (read back {at})" if read.read_back_at else ""
            yield f"DIFFERS     GPU {share.index}: {read.held_difference}{when}"
        elif len(shares) == 1 and read.read_back_at and read.held_memory_mib is not None:
            percent = read.held_cores_percent
            cores = f" and {percent} % of the cores" if percent else ""
            yield f"read back   {read.held_memory_mib} MiB{cores} at {at}"


def _process_lines(processes: Sequence[ProcessView]) -> Iterator[str]:
    title = "processes"
    for process in processes[:NAMED_PODS]:
        inside = f", {process.inner_pid} in {process.container}" if process.inner_pid else ""
        amounts = [
            "" if process.memory_mib is None else f"{process.memory_mib} MiB",
            "" if process.cores_percent is None else f"{process.cores_percent} % of the cores",
        ]
        uses = ", ".join(filter(None, (f"GPU {process.index}", *amounts)))
        yield f"{title:12}PID {process.pid}{inside}: {process.command or '?'}, {uses}"
        title = ""
    if len(processes) > NAMED_PODS:
        yield f"{'':12}and {len(processes) - NAMED_PODS} more: -o json"


def _lost_lines(lease: LeaseView, devices: Mapping[DeviceUuid, DeviceView]) -> Iterator[str]:
    reasons: dict[str, None] = {}
    for share in lease.shares:
        device = devices.get(share.device)
        for missing in device.missing if device else ():
            if missing.name in (share.memory, share.compute):
                reasons[f"new pods    do not get that of GPU {share.index}: {missing.reason}"] = (
                    None
                )
    yield from reasons


def _sensor_lines(lease: LeaseView, nodes: Sequence[NodeDevices]) -> Iterator[str]:
    own = {share.device for share in lease.shares}
    for device in (device for node in nodes for device in node.devices if device.uuid in own):
        if device.hardware is None:
            continue
        if device.hardware.is_hot:
            yield f"SLOW        GPU {device.index} {device.hardware.heat_text}"
        for xid in device.hardware.xids:
            if xid.at >= lease.created_at and f"Xid {xid.number}," not in device.fault:
                at = timestamp(xid.at)
                yield f"XID {xid.number:<8}GPU {device.index} at {at}: {xid.meaning}"


def _resize_lines(lease: LeaseView) -> Iterator[str]:
    if lease.waiting_size is not None:
        since = timestamp(lease.waiting_size.since)
        yield f"resize      {lease.waiting_text}; since {since}, tried again every 15 s"


def _choice_lines(lease: LeaseView, nodes: Sequence[NodeDevices]) -> Iterator[str]:
    if lease.weighed:
        yield f"chosen      {lease.weighed}"
    yield from other_nodes_lines(lease, nodes)


def _claim_lines(lease: LeaseView) -> Iterator[str]:
    if lease.claim is None:
        return
    pods = len(lease.claim.consumers)
    users = f", which {pods} pods use" if pods > 1 else ""
    yield f"claim       {lease.namespace}/{lease.name}{users}"
    for request, interval in lease.intervals.items():
        yield f"slices      {interval} on the GPUs of request {request}, by the claim's parameters"


def _share_kind(
    lease: LeaseView, share: ShareView, device: DeviceView | None
) -> tuple[str, str, str, MigPlacement | None]:
    several = len({share.container for share in lease.shares}) > 1
    of = f" for {'request' if lease.claim else 'container'} {share.container}" if several else ""
    init = " (init)" if share.init else ""
    model = f", {device.model}" if device else ""
    sick = f", UNHEALTHY: {device.fault}".rstrip(": ") if device and not device.healthy else ""
    cores = share.cores_percent
    part = f"{cores} % of its cores" if cores else "cores not limited"
    if share.mig is not None:
        part = f"instance {share.mig.profile}"
    whole = "the whole GPU: " if share.whole else ""
    resized = ""
    if share.requested_size is not None:
        resized = f" (resized: its pod requests {size_text(share.requested_size)})"
    size = f"{whole}{share.memory_mib} of {share.device_mib} MiB, {part}{resized}"
    return f"of node {lease.node}{model}{of}{init}{sick}", size, share.held_text, share.mig


def _alike_lines(kind: str, size: str, shares: Sequence[ShareView], now: float) -> Iterator[str]:
    several = len(shares) > 1
    title = f"{len(shares)} GPUs" if several else "GPU"
    yield f"{title:12}{', '.join(str(share.index) for share in shares)} {kind}"
    yield f"share       {'each ' if several else ''}{size}"
    used = [(share.index, share.measured) for share in shares if share.measured is not None]
    if not used:
        return
    index, least = min(
        used, key=lambda entry: (entry[1].cores_percent or 0, entry[1].memory_mib or 0)
    )
    if not several:
        yield f"uses        {measured_text(least, now)}"
        return
    memory = [share.memory_mib for _, share in used if share.memory_mib is not None]
    cores = [share.cores_percent for _, share in used if share.cores_percent is not None]
    mib = str(sum(memory)) if memory else "-"
    percent = f"{round(fmean(cores))}%" if cores else "-"
    idle = sum(share.idle for _, share in used)
    unknown = f", {len(shares) - len(used)} not measured" if len(used) < len(shares) else ""
    yield f"uses        {mib} MiB and {percent} of their cores; {idle} of them idle{unknown}"
    yield f"least used  GPU {index}: {measured_text(least, now)}"


def _detail_lines(lease: LeaseView, share: ShareView, device: DeviceView | None) -> Iterator[str]:
    place = "" if share.slot is None else f"share {share.slot}, "
    if share.mig is not None:
        place = f"position {share.mig.position} of layout {share.mig.layout}, "
    kind = "request  " if lease.claim else "container"
    yield f"{kind}   {share.container}: {place}GPU {share.device}"
    if device is not None:
        yield (
            f"            all leases of it: {device.used_memory_mib} of {device.memory_mib} MiB, "
            f"{device.used_cores_percent} % of its cores in {device.used_shares} of "
            f"{device.slots} shares"
        )


def _waiting(pod: PodSummary, view: PodView, waiting: WaitingDetails, program: str) -> Explanation:
    waited = age(view.read_at - waiting.since)
    start = waiting.start.text if waiting.start else waiting.no_end
    return _explained(
        pod,
        "waiting",
        f"has waited for {waited}: {waiting.reason}",
        lines=(
            *([f"start       {start}"] if start else ()),
            *_gang_lines(view.gang),
            *_scheduler_lines(waiting),
            *_nearest_lines(waiting),
            *_prospects(waiting, view.gang),
            *_queue_lines(waiting.namespace, waiting.queue),
        ),
        next="; ".join(
            filter(
                None,
                (_rollout_hint(pod, waiting), waiting.hint, f"`{program} gpus` shows every lease"),
            )
        ),
        waiting=waiting,
        gang=view.gang,
    )


def _rollout_hint(pod: PodSummary, waiting: WaitingDetails) -> str:
    if not (pod.deployment and pod.revision):
        return ""
    name = rf"{re.escape(pod.deployment)}-(?!{re.escape(pod.revision)}-)[a-z0-9]+-[a-z0-9]{{5}}"
    older = re.search(rf"\b{re.escape(pod.namespace)}/({name})(?![\w.-])", waiting.no_end)
    if older is None:
        return ""
    return (
        f"its own Deployment {pod.deployment} keeps the older pod {older[1]} until this one is "
        "ready: set strategy.type to Recreate, or rollingUpdate.maxSurge to 0 with maxUnavailable "
        "1"
    )


def _queue_lines(namespace: str, queue: QueuePlace) -> tuple[str, str]:
    before = ""
    if queue.position > 1:
        before = "; after a pod of another namespace"
    if queue.after:
        before = f"; after {queue.after}, {queue.after_reason}"
    budget = "its GPU budget is " + ("not used up" if queue.has_budget else "used up")
    counts = ""
    if queue.weight != 1:
        counts = f", which counts as {queue.weighted_share:.1%} by its weight of {queue.weight}"
    return (
        f"queue       position {queue.position} of {queue.of}{before}",
        f"namespace   {namespace} holds {queue.dominant_share:.1%} of the GPUs{counts}; {budget}",
    )


def _scheduler_lines(waiting: WaitingDetails) -> Iterator[str]:
    if waiting.filter_reason and waiting.scheduler_reason:
        yield f"extender    refused it last: {waiting.filter_reason}"


def _nearest_lines(waiting: WaitingDetails) -> Iterator[str]:
    for number, verdict in enumerate(waiting.nearest):
        nearest = " (the nearest fit)" if number == 0 else ""
        yield f"node {verdict.node}{nearest}: {verdict.reason}"
        yield from (f"  device {device.index}: {device.reason}" for device in verdict.devices)


def _prospects(waiting: WaitingDetails, gang: GangView | None) -> Iterator[str]:
    if gang and len(gang.holding) + len(gang.waiting) < (gang.min_member or 0):
        return
    if waiting.handed_over:
        yield "kube-scheduler tries it again when what it lacks may have changed"
    elif RECOVERS in waiting.hint:
        yield "it is placed as soon as a GPU that fits it has recovered"
    elif waiting.hint.startswith(NO_WAITING) or (waiting.permanent and not waiting.quota):
        yield "waiting does not help: change the pod, or have an administrator change the cluster"
    elif waiting.quota:
        yield f"it is placed as soon as the GPU quota of namespace {waiting.quota} has room"
    elif waiting.code == WAITS:
        yield "it is placed as soon as its PersistentVolumeClaims can be used"
    elif waiting.code in set(VolumeRule):
        yield "it is placed as soon as its volumes can be reached from a node with enough capacity"
    else:
        yield "it is placed as soon as enough capacity is free"


def _without_lease(pod: PodSummary, schedulers: frozenset[str], program: str) -> Explanation:
    message = pod.unschedulable_message
    if pod.scheduler not in schedulers:
        return _of_another_scheduler(pod, schedulers, program)
    if not pod.is_active:
        return _ended(pod, program)
    if pod.gates:
        return _gated(pod, program)
    if not message:
        text = f"is {pod.phase or 'new'} and Leasehold has no record of it yet"
        return _explained(pod, UNKNOWN, text, next=f"{program} audit")
    if pod.scheduler == KUBE_SCHEDULER:
        text = f"waits; kube-scheduler reports: {message}"
        return _explained(pod, "waiting", text, next=_describe(pod))
    then = "fix what the message names; a pod with an invalid request must be recreated"
    return _explained(pod, "rejected", f"is not placed: {message}", next=then)


def _describe(pod: PodSummary) -> str:
    return f"kubectl describe pod {pod.name} -n {pod.namespace}"


def _ended(pod: PodSummary, program: str) -> Explanation:
    if not pod.rejection:
        name = f"{pod.name} -n {pod.namespace}"
        text = f"has {pod.phase.lower()}; its lease has ended"
        then = f"{program} trace {name}"
        if pod.failure:
            text = f"has failed ({pod.failure}); its lease has ended"
            then = f"kubectl logs {name} --all-containers; {then}"
        return _explained(pod, "ended", text, next=then)
    return _explained(
        pod,
        "ended",
        f"was rejected by the kubelet of node {pod.node}: {pod.rejection}",
        lines=(causes(pod.rejection),),
        next=advice(pod.rejection, pod.node),
    )


def _of_another_scheduler(pod: PodSummary, schedulers: frozenset[str], program: str) -> Explanation:
    if pod.claims and not pod.node:
        reported = pod.unschedulable_message or "no reason yet"
        return _explained(
            pod,
            "waiting",
            f"waits for {pod.scheduler} to allocate its ResourceClaims "
            f"({', '.join(pod.claims)}); it reports: {reported}",
            next=f"{_describe(pod)}; `{program} gpus` shows every lease",
        )
    if pod.unknown and not pod.node:
        meant = "; ".join(
            text
            for name, amount in pod.unknown.items()
            if (text := did_you_mean(name, amount, pod.requested))
        )
        instead = meant or f"{request_one().text} instead"
        return _explained(
            pod,
            "foreign",
            f"requests {', '.join(pod.unknown)}, which no agent of Leasehold serves",
            next=f"{instead} Recreate the pod" if meant else f"{instead}, and recreate the pod",
        )
    if not pod.requests_gpus:
        instead = pod.annotated or f"{request_one(pod.none).text} for one GPU"
        return _explained(
            pod,
            "foreign",
            "requests no GPU by a resource name that Leasehold knows",
            next=f"{instead}, and recreate the pod",
        )
    ours = " or ".join(sorted(schedulers))
    default = OWN_SCHEDULER if OWN_SCHEDULER in schedulers else min(schedulers)
    return _explained(
        pod,
        "foreign",
        f"is not scheduled by Leasehold: its schedulerName is {pod.scheduler!r}, not {ours}",
        next=f"set spec.schedulerName to {default} and recreate the pod",
    )


def _gated(pod: PodSummary, program: str) -> Explanation:
    text = f"has scheduling gates: it is placed once they are removed ({', '.join(pod.gates)})"
    then = f"kubectl get pod {pod.name} -n {pod.namespace} -o yaml"
    if BUDGET_GATE in pod.gates:
        text = (
            f"waits until namespace {pod.namespace} has GPU time again, which removes its "
            f"scheduling gate {BUDGET_GATE}"
        )
        then = f"{program} budget {pod.namespace}"
    return _explained(pod, "gated", text, next=then, gates=pod.gates)


def _is_view(key: str) -> bool:
    return key != ANNOTATION and key.startswith((*STRIPPED_ANNOTATIONS, *DENIED_ANNOTATIONS))
