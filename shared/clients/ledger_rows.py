"""Reservations and leases as the positional arrays in which the ledger's scripts keep them.

The order of a lease's fields is that of `L_…` in `scripts/common.lua`. What only people and node
agents read of a lease (names, trace, shares in full) is JSON text that no script looks into.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.model.lease import Lease, LeaseState, Share, bookings
from shared.model.ledger import Reservation
from shared.model.names import Namespace, NodeName, PodUid

HOLD = 6
"""Entries per device in `holds`: uuid, MiB, cores, shares, slots, alone."""

_json = msgspec.json.Encoder(order="deterministic").encode
_body_of = msgspec.json.Decoder(tuple[str, str, str, str]).decode
_amounts_of = msgspec.json.Decoder(list[Any]).decode
_shares_of = msgspec.json.Decoder(tuple[Share, ...]).decode


def text(value: Any) -> str:
    """Return `value` as JSON text, the same for equal values."""
    return _json(value).decode()


def holds_of(shares: Sequence[Share]) -> tuple[list[Any], list[int]]:
    """Say what shares take of each device, and which of its new slots each share gets.

    An init container uses a slot that another container of the pod will use after it.
    """
    if len(shares) == 1:
        share = shares[0]
        slot = 1 if share.slotted else 0
        alone = 1 if share.whole or share.cores_percent == 100 else 0
        return (
            [share.device, share.memory_mib, share.cores_percent, 1, slot, alone],
            [1, slot],
        )
    holds: list[Any] = []
    place: dict[str, int] = {}
    for booking in bookings(shares):
        here = [share for share in shares if share.device == booking.device]
        slots = max(
            sum(share.slotted and not share.init for share in here),
            any(share.slotted and share.init for share in here),
        )
        alone = any(share.whole or share.cores_percent == 100 for share in here)
        place[booking.device] = len(holds) // HOLD + 1
        holds += [
            booking.device,
            booking.memory_mib,
            booking.cores_percent,
            booking.shares,
            int(slots),
            int(alone),
        ]
    places: list[int] = []
    given: dict[str, int] = {}
    for share in shares:
        places.append(place[share.device])
        if not share.slotted:
            places.append(0)
        elif share.init:
            places.append(1)
        else:
            given[share.device] = given.get(share.device, 0) + 1
            places.append(given[share.device])
    return holds, places


def reservation_rows(wanted: Sequence[Reservation]) -> tuple[list[str], list[list[Any]]]:
    """Pack reservations with their candidates, and the resources that occur among them."""
    numbers: dict[str, int] = {}
    rows = []
    for reservation in wanted:
        row = [
            reservation.pod,
            text((reservation.namespace, reservation.name, reservation.dialect, reservation.trace)),
            reservation.tag,
            numbers.setdefault(resources_text(reservation.resources), len(numbers) + 1),
        ]
        for candidate in reservation.candidates:
            row.append(text((candidate.node, *holds_of(candidate.shares))))
            row.append(text(candidate.shares))
        rows.append(row)
    return list(numbers), rows


def resources_text(resources: Mapping[str, int]) -> str:
    """Return ordinary resources as the text in which a lease keeps them."""
    return text([part for item in resources.items() for part in item])


def granted(wanted: Reservation, row: Sequence[Any], now: float, expires_at: float) -> Lease:
    """Put together the lease that the script has just written."""
    number, version, grants = row
    candidate = wanted.candidates[number - 1]
    return msgspec.convert(
        {
            "pod": wanted.pod,
            "namespace": wanted.namespace,
            "name": wanted.name,
            "node": candidate.node,
            "shares": _with_grants(candidate.shares, grants),
            "dialect": wanted.dialect,
            "resources": wanted.resources,
            "tag": wanted.tag,
            "trace": wanted.trace,
            "version": version,
            "created_at": now,
            "expires_at": expires_at,
        },
        Lease,
    )


def lease_row(lease: Lease) -> list[Any]:
    """Pack a lease as it stands, with its slots and fences."""
    return [
        lease.state.value,
        lease.version,
        lease.version,
        lease.node,
        lease.created_at,
        lease.expires_at,
        lease.tag,
        resources_text(lease.resources),
        text((lease.node, *holds_of(lease.shares))),
        [
            part
            for share in lease.shares
            for part in (-1 if share.slot is None else share.slot, share.fence)
        ],
        lease.pod,
        text((lease.namespace, lease.name, lease.dialect, lease.trace)),
        text(lease.shares),
    ]


def lease_of(row: Sequence[Any]) -> Lease:
    """Read a stored lease."""
    (state, version, _, node, created_at, expires_at, tag, resources, *_) = row
    grants, pod, body, shares = row[9:]
    namespace, name, dialect, trace = _body_of(body)
    amounts = _amounts_of(resources)
    return Lease(
        pod=PodUid(pod),
        namespace=Namespace(namespace),
        name=name,
        node=NodeName(node),
        shares=msgspec.convert(_with_grants(_shares_of(shares), grants), tuple[Share, ...]),
        dialect=dialect,
        resources=dict(zip(amounts[::2], amounts[1::2], strict=True)),
        tag=tag,
        trace=trace,
        state=LeaseState(state),
        version=version,
        created_at=float(created_at),
        expires_at=float(expires_at),
    )


def _with_grants(shares: Sequence[Share], grants: Sequence[int]) -> list[dict[str, object]]:
    return [
        {
            "container": share.container,
            "device": share.device,
            "index": share.index,
            "memory_mib": share.memory_mib,
            "cores_percent": share.cores_percent,
            "unit_mib": share.unit_mib,
            "whole": share.whole,
            "slotted": share.slotted,
            "init": share.init,
            "slot": None if slot < 0 else slot,
            "fence": fence,
        }
        for share, slot, fence in zip(shares, grants[::2], grants[1::2], strict=True)
    ]
