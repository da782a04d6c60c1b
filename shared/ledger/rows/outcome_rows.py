"""Outcomes of reservations and resizes, as the ledger's scripts return them; pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shared.ledger.rows.device_rows import decode_device_row, decode_node_row
from shared.ledger.rows.lease_rows import decode_lease, new_lease
from shared.ledger.rows.quota_rows import decode_excesses
from shared.model.ledger import (
    AlreadyLeased,
    GangIncomplete,
    GonePod,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    Reserved,
    TooLarge,
)
from shared.model.names import PodUid

_ALREADY_LEASED, _GANG_INCOMPLETE, _GONE, _TOO_LARGE = 0, -2, -3, -4


def decode_outcome(
    wanted: Reservation,
    numbers: Iterator[int],
    values: Iterator[bytes],
    now: float,
    expires_at: float,
) -> ReservationOutcome:
    """Decode the next outcome of `reserve.lua`: numbers, and the value that they refer to."""
    number = next(numbers)
    if number > 0:
        return Reserved(lease=new_lease(wanted, number, numbers, now, expires_at))
    if number == _ALREADY_LEASED:
        return AlreadyLeased(lease=decode_lease(next(values)))
    if number == _GANG_INCOMPLETE:
        return GangIncomplete(pod=wanted.pod)
    if number == _GONE:
        return GonePod(pod=wanted.pod)
    if number == _TOO_LARGE:
        return TooLarge(pod=wanted.pod, reason=next(values).decode())
    return _decode_refusal(wanted.pod, next(values))


def _decode_refusal(pod: PodUid, packed: bytes) -> NoCapacity:
    reason, nodes, devices, excesses, reserved_for_other = msgspec.msgpack.decode(packed)
    states = map(decode_device_row, devices)
    return NoCapacity(
        pod=pod,
        reason=reason,
        devices={state.uuid: state.use for state in states},
        nodes=dict(map(decode_node_row, nodes)),
        quotas=decode_excesses(excesses),
        reserved_for_other=reserved_for_other,
    )


def decode_resize_refusal(
    pod: PodUid, reason: str, devices: Sequence[Any], excesses: Sequence[Any]
) -> NoCapacity:
    """Decode why a lease cannot have the shares that it was to get."""
    states = map(decode_device_row, devices)
    return NoCapacity(
        pod=pod,
        reason=reason,
        devices={state.uuid: state.use for state in states},
        quotas=decode_excesses(excesses),
    )
