"""Waiting pods as the ledger stores them: grouped by smallest need, in order of priority; pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.ledger.records import WaitingRecord, WaitingRowRecord
from shared.ledger.rows.joined_texts import escaped
from shared.ledger.rows.lease_rows import text
from shared.ledger.rows.record_sizes import MOST_SCHEDULER_REASON, MOST_WAITING_BYTES, check_size
from shared.model.devices.device import MIB
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import WaitingPod
from shared.model.requests.placement import Refusal
from shared.model.requests.request import GpuRequest, PodRequest

_decode_record = msgspec.json.Decoder(tuple[PodQueued, Refusal]).decode

_NO_OFFERS = "-"
_LOWEST_PRIORITY = -(2**31)
_PRIORITIES = 2**32
_LATEST_S = 9_999_999_999.0


def group_of(request: PodRequest) -> str:
    """Name the group of pods for which a node needs the same room at least.

    `gpus:units:percent:cores:sharing:slotted:mib:slots` of the container that requests most.
    """
    needs = [_need(container) for container in request.containers if not container.init]
    if not needs:
        needs = [_need(container) for container in request.containers]
    largest = max(needs, default=(0,) * 8)
    return ":".join(str(max(part, 0)) for part in largest)


def order_of(queued: PodQueued) -> str:
    """Return a key of fixed length that sorts the highest priority first, then the oldest."""
    created_at = min(max(0.0, queued.created_at), _LATEST_S)
    return f"{rank_of(queued.request.priority)}:{created_at:014.3f}"


def rank_of(priority: int) -> str:
    """Return ten digits that sort a higher priority first.

    >>> rank_of(1000) < rank_of(0)
    True
    """
    rank = _PRIORITIES - 1 - (priority - _LOWEST_PRIORITY)
    return f"{min(max(rank, 0), _PRIORITIES - 1):010d}"


def waiting_row(waiting: WaitingPod) -> WaitingRowRecord:
    """Raises RequestError if the waiting pod is too large."""
    record = text((waiting.queued, waiting.refusal))
    check_size("the record of the waiting pod", len(record.encode()), MOST_WAITING_BYTES)
    return WaitingRowRecord(
        pod=waiting.queued.pod,
        group=_group(waiting),
        order=order_of(waiting.queued),
        verdict=waiting.capacity,
        record=record,
        since=waiting.waiting_since,
        gang=gang_of(waiting.queued),
        receives_offers=waiting.receives_offers,
        min_members=waiting.min_members,
        namespace=waiting.queued.namespace,
        scheduler_reason=waiting.scheduler_reason[:MOST_SCHEDULER_REASON],
    )


def gang_of(queued: PodQueued) -> str:
    """Return the pod's gang, escaped, or "" if it may run alone."""
    gang = queued.request.gang
    return escaped(gang.name) if gang and gang.decided_as_one else ""


def as_waiting_pod(row: Sequence[Any]) -> WaitingPod:
    record = msgspec.convert(row, WaitingRecord)
    queued, refusal = _decode_record(record.record)
    return WaitingPod(
        queued=queued,
        refusal=refusal,
        capacity=record.verdict,
        waiting_since=record.since,
        receives_offers=record.group != _NO_OFFERS,
        scheduler_reason=record.scheduler_reason,
    )


def decode_queued(record: str) -> PodQueued:
    return _decode_record(record)[0]


def _group(waiting: WaitingPod) -> str:
    """Pods that a quota keeps waiting have groups of their own by namespace."""
    by_need = "" if waiting.refusal.permanent else group_of(waiting.queued.request)
    if waiting.refusal.quota:
        return f"q:{by_need}|{waiting.refusal.quota}"
    return by_need


def _need(request: GpuRequest) -> tuple[int, ...]:
    percent = 0 if request.whole else request.memory_percent or 0
    amount = not request.whole and not percent
    units = request.memory_units or 0 if amount else 0
    mib = -(-(request.memory_bytes or 0) // MIB) if amount else 0
    return (
        request.gpus,
        units,
        percent,
        request.cores_percent,
        int(request.sharing),
        int(request.slotted),
        mib,
        request.slots,
    )
