"""Reservations and leases as the positional arrays in which the ledger's scripts keep them.

The order of a lease's fields is that of `L_…` in `scripts/common.lua`. What only people and node
agents read of a lease (names, trace, shares in full) is JSON text that no script looks into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import msgspec

from shared.model.lease import Booking, Lease, LeaseState, Share, bookings
from shared.model.ledger import Reservation
from shared.model.names import Namespace, NodeName, PodUid

HOLD = 6
"""Entries per device in `holds`: uuid, MiB, cores, shares, slots, alone."""

_json = msgspec.json.Encoder(order="deterministic").encode
_body_of = msgspec.json.Decoder(tuple[str, str, str, str]).decode
_amounts_of = msgspec.json.Decoder(list[Any]).decode
_shares_of = msgspec.json.Decoder(list[list[Any]]).decode

_SHARE = tuple(field.name for field in fields(Share))


def text(value: Any) -> str:
    """Return `value` as JSON text, the same for equal values."""
    return _json(value).decode()


def takes_of(node: NodeName, shares: Sequence[Share]) -> list[Any]:
    """Say what shares take of a node's devices, and which of its new slots each share gets.

    An init container uses a slot that another container of the pod will use after it.
    """
    if len(shares) == 1:
        share = shares[0]
        slot = 1 if share.slotted else 0
        alone = 1 if share.whole or share.cores_percent == 100 else 0
        return [
            *(node, 8, share.device, share.memory_mib, share.cores_percent, 1, slot, alone),
            *(1, slot),
        ]
    holds = [_hold(booking, shares) for booking in bookings(shares)]
    number = {hold[0]: at for at, hold in enumerate(holds, start=1)}
    places: list[int] = []
    given: dict[str, int] = {}
    for share in shares:
        places += (number[share.device], _place(share, given))
    return [node, 2 + HOLD * len(holds), *chain.from_iterable(holds), *places]


def _hold(booking: Booking, shares: Sequence[Share]) -> list[Any]:
    here = [share for share in shares if share.device == booking.device]
    beside = sum(share.slotted and not share.init for share in here)
    before = any(share.slotted and share.init for share in here)
    alone = any(share.whole or share.cores_percent == 100 for share in here)
    return [
        booking.device,
        booking.memory_mib,
        booking.cores_percent,
        booking.shares,
        max(beside, int(before)),
        int(alone),
    ]


def _place(share: Share, given: dict[str, int]) -> int:
    """Number the slot of a share among those its pod gets of the device; 0: it takes none."""
    if not share.slotted:
        return 0
    if share.init:
        return 1
    given[share.device] = given.get(share.device, 0) + 1
    return given[share.device]


def shares_text(shares: Sequence[Share]) -> str:
    """Return shares, but for slots and fences, as the text in which a lease keeps them."""
    return text(
        [
            (
                share.container,
                share.device,
                share.index,
                share.memory_mib,
                share.cores_percent,
                share.unit_mib,
                share.whole,
                share.slotted,
                share.init,
            )
            for share in shares
        ]
    )


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
            row.append(text(takes_of(candidate.node, candidate.shares)))
            row.append(shares_text(candidate.shares))
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
        text(takes_of(lease.node, lease.shares)),
        [
            part
            for share in lease.shares
            for part in (-1 if share.slot is None else share.slot, share.fence)
        ],
        lease.pod,
        text((lease.namespace, lease.name, lease.dialect, lease.trace)),
        shares_text(lease.shares),
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
        shares=tuple(
            Share(**dict(zip(_SHARE, (*kept, None if slot < 0 else slot, fence), strict=True)))
            for kept, slot, fence in zip(_shares_of(shares), grants[::2], grants[1::2], strict=True)
        ),
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
