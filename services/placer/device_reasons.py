"""Why the devices of one node do not do: the node's reason in short, each device's with numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence

from services.placer.device_choice import Own, Owns, chosen_for, note_given, share_mib
from services.placer.device_filters import device_excluded
from services.placer.mirrored import DeviceState, NodeState
from services.placer.node_filters import Blocked
from shared.model.device import DeviceRefusal, DeviceUse, device_refusal
from shared.model.placement import DeviceVerdict
from shared.model.request import GpuRequest, PodRequest

NODE_TEXTS: Mapping[str, str] = {
    "InsufficientGpuMemory": "Insufficient GPU memory",
    "InsufficientGpuCores": "Insufficient GPU cores",
    "GpuSlotsTaken": "node(s) had no free GPU share slot",
    "GpuGroupSpread": "node(s) had only GPUs that carry the pod's group already",
    "GpuNotIdle": "node(s) had no idle GPU",
    "GpuHeldAlone": "node(s) had only GPUs that other pods hold alone",
    "GpuClosed": "node(s) had GPUs closed to new shares",
    "GpuUnhealthy": "node(s) had unhealthy GPUs",
    "GpuModeMismatch": "node(s) had only GPUs in another mode",
    "GpuTypeExcluded": "node(s) had no GPU of an allowed type",
    "GpuUuidExcluded": "node(s) had no GPU with an allowed UUID",
}

EXCLUSIONS = frozenset({"GpuTypeExcluded", "GpuUuidExcluded", "GpuModeMismatch", "GpuClosed"})
"""Why a device was never in question: named only where no device was."""

CLOSED = DeviceRefusal("GpuClosed", "an annotation of its node closes it to new shares")


def why_no_devices(request: PodRequest, node: NodeState) -> Blocked:
    """Return the reason that most of the node's devices in question share."""
    if not node.devices:
        return Blocked("NoGpus", "node(s) had no GPU")
    most = max(container.gpus for container in request.containers)
    if most > len(node.devices):
        numbers = f"{most} different GPUs wanted, {len(node.devices)} there"
        return Blocked("NotEnoughGpus", "node(s) had fewer GPUs than the pod asks for", numbers)
    refusals = device_refusals(request, node)
    counts = Counter(refusal.code for refusal in refusals.values())
    if not counts:
        return Blocked("GpusDoNotFitTogether", "node(s) had no GPUs for all containers at once")
    in_question = Counter({code: n for code, n in counts.items() if code not in EXCLUSIONS})
    code = (in_question or counts).most_common(1)[0][0]
    fitting = len(node.devices) - len(refusals)
    return Blocked(
        code, NODE_TEXTS[code], f"{most} GPU{'s' * (most > 1)} wanted, {fitting} of those there fit"
    )


def verdicts_on(request: PodRequest, node: NodeState) -> tuple[DeviceVerdict, ...]:
    """Spell out why each device that refuses does so."""
    return tuple(
        DeviceVerdict(device=device.uuid, index=device.index, reason=refusal.text)
        for device, refusal in device_refusals(request, node).items()
    )


def device_refusals(request: PodRequest, node: NodeState) -> dict[DeviceState, DeviceRefusal]:
    """Return why devices refuse the first container that cannot be served."""
    refusals: dict[DeviceState, DeviceRefusal] = {}
    allowed = []
    for device in node.devices:
        excluded = device_excluded(request.selection, device.device)
        if excluded is None and device.index in node.facts.closed_devices:
            excluded = CLOSED
        if excluded is None:
            allowed.append(device)
        else:
            refusals[device] = excluded
    groups = [(device,) for device in allowed] if request.same_device else [tuple(allowed)]
    for devices in groups:
        container, owns = _first_unserved(request, devices)
        if container is None:
            continue
        for device in devices:
            refusal = _refusal(container, device, request.tags, owns)
            if refusal is not None:
                refusals[device] = refusal
    return dict(sorted(refusals.items(), key=lambda entry: entry[0].index))


def _first_unserved(
    request: PodRequest, devices: Sequence[DeviceState]
) -> tuple[GpuRequest | None, Owns]:
    owns: dict[DeviceState, Own] = {}
    for container in request.containers:
        chosen = chosen_for(container, request, devices, owns)
        if chosen is None:
            return container, {} if container.init else owns
        if not container.init:
            note_given(chosen, owns)
    return None, owns


def _refusal(
    container: GpuRequest, device: DeviceState, tags: tuple[str, ...], owns: Owns
) -> DeviceRefusal | None:
    own, use = owns.get(device, Own()), device.use()
    seen = DeviceUse(
        memory_mib=use.memory_mib + own.memory,
        cores_percent=use.cores_percent + own.cores,
        shares=use.shares + own.shares,
        fence=use.fence,
        tags=use.tags,
        alone=use.alone or own.alone,
    )
    memory_mib = share_mib(container, device)
    return device_refusal(container, device.device, seen, memory_mib=memory_mib, tags=tags)
