"""Records what every GPU was used for between two readings of the ledger; pure.

A pod's part of a device is idle from the last use by any of its containers on, or from its start.
What is read at the end of an interval counts for all of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from services.timekeeper.accounts.journal import (
    CHARGED_STATES,
    charged_lease_id,
    created_ms,
)
from shared.model.budgets.budget import HOUR_MS, JournalEntry
from shared.model.budgets.cost_records import (
    FREE,
    IDLE,
    OTHER_MODELS,
    STRANDED,
    UNLEASED,
    UNMEASURED,
    USED,
    WHOLE,
    CostHour,
    hours_of,
)
from shared.model.budgets.weights import milli_gpu, shares_by_device
from shared.model.devices.device import Device, DeviceMode, DeviceUse, device_refusal
from shared.model.devices.node import cordon_reason
from shared.model.leases.lease import Lease, ShareKey, share_key
from shared.model.leases.ledger import LedgerNode, NodeTotals
from shared.model.names import DeviceUuid, Namespace
from shared.model.requests.request import GpuRequest, SharingPolicy

WEEK_MS = 7 * 24 * HOUR_MS
MOST_SIZES = 200
MOST_MODELS_OF_NODE = 4


class Size(NamedTuple):
    memory_mib: int
    cores_percent: int
    sharing: int


WHOLE_SIZE = Size(0, 0, SharingPolicy.EXCLUSIVE)
Sizes = Mapping[Size, int]
"""When a share of each size was leased last."""
LastUses = Mapping[ShareKey, float | None]
"""Since when measured shares are idle, Unix seconds, or None while they are in use."""


class Holding(NamedTuple):
    device: DeviceUuid
    model: str
    namespace: Namespace
    milli_gpu: int
    use: int
    from_ms: int
    to_ms: int


def charged_leases(nodes: Iterable[NodeTotals]) -> Iterator[Lease]:
    for totals in nodes:
        yield from (lease for lease in totals.leases if lease.state in CHARGED_STATES)


def holdings(
    leases: Iterable[Lease],
    entries: Iterable[JournalEntry],
    idle: tuple[LastUses, LastUses],
    from_ms: int,
    to_ms: int,
) -> Iterator[Holding]:
    """`entries` are those of the interval, read after the leases.

    `idle` is read at the end of the interval, and before it, for leases that have ended.
    """
    spans = {charged_lease_id(lease): (lease, from_ms, to_ms, False) for lease in leases}
    for entry in entries:
        for lease in entry.leases:
            id_ = charged_lease_id(lease)
            if entry.kind == "ended":
                begin = spans[id_][1] if id_ in spans else from_ms
                spans[id_] = (lease, begin, entry.at_ms, True)
            else:
                begin = entry.at_ms if entry.kind == "held" else created_ms(lease)
                spans[id_] = (lease, begin, to_ms, False)
    for lease, begin, end, has_ended in spans.values():
        start, stop = max(begin, from_ms), min(end, to_ms)
        last_uses = idle[has_ended]
        for device, shares in shares_by_device(lease).items() if start < stop else ():
            keys = [share_key(lease.pod, share) for share in shares if not share.init]
            model = shares[0].device_model
            for use, *span in _uses_of([last_uses.get(key, UNKNOWN) for key in keys], start, stop):
                yield Holding(device, model, lease.namespace, milli_gpu(shares), use, *span)


UNKNOWN = -1.0
"""The last use of a share that is not measured."""


def _uses_of(
    idle_since: Sequence[float | None], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield uses of a pod's part of a device, with their begin and end in milliseconds."""
    if None in idle_since:
        yield USED, start, stop
    elif not idle_since or UNKNOWN in idle_since:
        yield UNMEASURED, start, stop
    else:
        last_use = max(at for at in idle_since if at is not None)
        unused = min(max(round(last_use * 1000), start), stop)
        if start < unused:
            yield USED, start, unused
        if unused < stop:
            yield IDLE, unused, stop


def device_states(
    nodes: Iterable[NodeTotals], sizes: Iterable[Size]
) -> dict[DeviceUuid, tuple[str, bool]]:
    """Return models, and whether one of the sizes has room."""
    sizes = sorted(sizes)
    states: dict[DeviceUuid, tuple[str, bool]] = {}
    for totals in nodes:
        models: set[str] = set()
        for device, use in totals.node.devices:
            has_room = not sizes or any(_fits(size, device, use.taken) for size in sizes)
            model = device.model
            if model not in models and len(models) == MOST_MODELS_OF_NODE:
                model = OTHER_MODELS
            models.add(model)
            states[device.uuid] = model, _is_open(totals.node, device) and has_room
    return states


def _is_open(node: LedgerNode, device: Device) -> bool:
    facts = node.facts
    closed = facts.unschedulable or cordon_reason(node.served)
    return device.healthy and not closed and device.index not in facts.closed_devices


def _fits(size: Size, device: Device, use: DeviceUse) -> bool:
    if device.mode is DeviceMode.MIG:
        most = max((len(layout.positions) for layout in device.layouts), default=0)
        return use.slots_taken.count("1") < most and not use.exclusive
    whole = size == WHOLE_SIZE
    cores = size.cores_percent
    sharing = SharingPolicy(size.sharing)
    request = GpuRequest(container="", gpus=1, cores_percent=cores, whole=whole, sharing=sharing)
    memory_mib = device.memory_mib if whole else size.memory_mib
    return device_refusal(request, device, use, memory_mib=memory_mib) is None


def sizes_seen(sizes: Sizes, leases: Iterable[Lease], now_ms: int) -> dict[Size, int]:
    """If there are too many of the last week, the smallest count."""
    recent = {size: at for size, at in sizes.items() if now_ms - at < WEEK_MS}
    for lease in leases:
        for share in lease.shares:
            if not share.mig:
                size = Size(share.memory_mib, share.cores_percent, int(share.sharing))
                recent[WHOLE_SIZE if share.whole else size] = now_ms
    return {size: recent[size] for size in sorted(recent)[:MOST_SIZES]}


def record_hours(
    hours: dict[int, CostHour],
    held: Iterable[Holding],
    devices: Mapping[DeviceUuid, tuple[str, bool]],
    from_ms: int,
    to_ms: int,
) -> None:
    by_device: dict[DeviceUuid, list[Holding]] = {uuid: [] for uuid in devices}
    for share in sorted(held):  # equal remainders are rounded in the same order
        by_device.setdefault(share.device, []).append(share)
    for start in hours_of(from_ms, to_ms):
        begin, end = max(start, from_ms), min(start + HOUR_MS, to_ms)
        hour = hours.setdefault(start, CostHour(begin, end, 0))
        hour.to_ms, hour.recorded_ms = end, hour.recorded_ms + end - begin
        for uuid, of_device in by_device.items():
            reported, has_room = devices.get(uuid) or (of_device[0].model, False)
            model = hour.add_device(reported, end - begin)
            changes = {at for share in of_device for at in share[-2:] if begin < at < end}
            for interval in pairwise(sorted({begin, end, *changes})):
                _record_device(hour, model, of_device, UNLEASED if has_room else STRANDED, interval)


def _record_device(
    hour: CostHour, model: str, held: Sequence[Holding], free: int, interval: tuple[int, int]
) -> None:
    start, stop = interval
    present = [share for share in held if share.from_ms <= start < share.to_ms]
    parts = parts_of_device([share.milli_gpu for share in present])
    for share, part in zip(present, parts, strict=True):
        hour.add(share.namespace, model, share.use, part * (stop - start))
    hour.add(FREE, model, free, (WHOLE - sum(parts)) * (stop - start))


def parts_of_device(weights: Sequence[int]) -> list[int]:
    """Return the parts of a device, which weights may exceed together.

    Leases that reserve the cores of others' memory, and those of an overcommitted device, are
    reduced in proportion.
    """
    total = sum(weights)
    if total <= WHOLE:
        return list(weights)
    parts = [weight * WHOLE // total for weight in weights]
    order = sorted(range(len(weights)), key=lambda place: -(weights[place] * WHOLE % total))
    for place in order[: WHOLE - sum(parts)]:
        parts[place] += 1
    return parts
