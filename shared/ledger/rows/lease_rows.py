"""Reservations and leases as bytes: what the ledger's scripts read of them, and what they keep.

The layout of a lease is that of `L_…` in `scripts/layout.lua`: numbers, a slot and a fence per
share, what it says, and what it takes. Scripts look at the beginning of the last two only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, make_dataclass
from itertools import accumulate, chain
from operator import attrgetter
from struct import Struct, unpack_from
from typing import Any, cast

import msgspec

from shared.model.lease import (
    Booking,
    Lease,
    LeaseState,
    MigPlacement,
    RequestedUnits,
    Share,
    ShareSize,
    bookings,
)
from shared.model.ledger import Reservation
from shared.model.names import NodeName
from shared.model.placement import Placement
from shared.model.request import SharingPolicy

HOLD = 8
"""Entries per device in `holds`: uuid, MiB, cores, shares, new slots, company, slots that there are
in the dialect, MIG layout."""

_HEAD = Struct("<BddddHH")
_GRANT = "id"
_GRANT_BYTES = 12
NUMBER_OF_STATE = {state: number for number, state in enumerate(LeaseState, start=1)}
_STATES = dict(enumerate(LeaseState, start=1))
_COMPANIES = tuple(SharingPolicy)

_json = msgspec.json.Encoder(order="deterministic").encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_amounts_of = msgspec.json.Decoder(list[Any]).decode

_share_parts = attrgetter(
    "device",
    "memory_mib",
    "cores_percent",
    "slotted",
    "slots",
    "sharing",
    "container",
    "index",
    "unit_mib",
    "init",
    "whole",
    "mig",
    "requested_units",
)
_says = attrgetter("pod", "gang", "namespace", "name", "dialect", "memo", "trace")

# A frozen dataclass sets each field through `object.__setattr__`, which takes seven times as long
# as an assignment. What is made 50,000 times a second is made as an unfrozen twin with the same
# slots, which then gets the frozen class.
_Share = make_dataclass("_Share", [each.name for each in fields(Share)], slots=True)
_Lease = make_dataclass("_Lease", [each.name for each in fields(Lease)], slots=True)


def text(value: Any) -> str:
    """Return `value` as JSON text, the same for equal values."""
    return _json(value).decode()


def joined(pieces: Sequence[bytes]) -> tuple[list[int], bytes]:
    """Return where each of the pieces begins and ends when they are joined, and the whole."""
    return list(accumulate(map(len, pieces), initial=0)), b"".join(pieces)


def demand_of(node: NodeName, shares: Sequence[Share]) -> list[Any]:
    """Say what shares take of a node's devices, and which of its new slots each share gets.

    An init container uses a slot that another container of the pod will use after it.
    """
    holds = [_hold(booking, shares) for booking in bookings(shares)]
    number = {hold[0]: at for at, hold in enumerate(holds, start=1)}
    places: list[int] = []
    given: dict[str, int] = {}
    for share in shares:
        places += (number[share.device], _place(share, given))
    return [node, 2 + HOLD * len(holds), *chain.from_iterable(holds), *places]


def _hold(booking: Booking, shares: Sequence[Share]) -> list[Any]:
    slotted = [s for s in shares if s.device == booking.device and s.slotted and not s.mig]
    beside = sum(not share.init for share in slotted)
    return [
        booking.device,
        booking.memory_mib,
        booking.cores_percent,
        booking.shares,
        max(beside, int(bool(slotted))),
        booking.sharing,
        min((share.slots for share in slotted), default=0),
        booking.layout,
    ]


def _place(share: Share, given: dict[str, int]) -> int:
    """Number the slot of a share among those its pod gets of the device; 0: it takes none.

    Of a MIG instance, say its position in the layout: -1 for 0, -2 for 1, ...
    """
    if share.mig:
        return -1 - share.mig.position
    if not share.slotted:
        return 0
    if share.init:
        return 1
    given[share.device] = given.get(share.device, 0) + 1
    return given[share.device]


def taken(node: NodeName, shares: Sequence[Share]) -> bytes:
    """Pack what shares take: of one share its parts, of several also what they add up to.

    Only shares that were resized say what was asked for: they are few.
    """
    parts = [
        _share_parts(share)
        if share.requested_size is None
        else (*_share_parts(share), share.requested_size)
        for share in shares
    ]
    if len(shares) == 1 and shares[0].mig is None:
        return _pack((node, *parts[0]))
    return _pack((node, False, demand_of(node, shares), parts))


def said(of: Reservation | Lease, texts: dict[tuple[Any, ...], str], *more: float) -> bytes:
    """Pack what a lease says whatever it takes. `texts` keeps resources that were met before."""
    resources = tuple(of.resources.items())
    known = texts.get(resources)
    if known is None:
        known = texts[resources] = resources_text(of.resources)
    return _pack(("\n".join(of.anti_affinity_groups), known, *_says(of), *more))


def resources_text(resources: Mapping[str, int]) -> str:
    """Return ordinary resources as the text in which a lease keeps them."""
    return text([part for item in resources.items() for part in item])


def encode_reservations(wanted: Sequence[Reservation]) -> list[bytes]:
    """Pack reservations: what each says, then what its candidates take."""
    texts: dict[tuple[Any, ...], str] = {}
    pieces = []
    for reservation in wanted:
        pieces.append(said(reservation, texts))
        pieces += [taken(each.node, each.shares) for each in reservation.candidates]
    return pieces


def new_lease(
    wanted: Reservation, number: int, numbers: Iterator[int], now: float, expires_at: float
) -> Lease:
    """Read the lease that the script has just written: version, then slots and fences."""
    candidate = wanted.candidates[number - 1]
    lease = _Lease(
        wanted.pod,
        wanted.namespace,
        wanted.name,
        candidate.node,
        (),
        wanted.dialect,
        wanted.resources,
        wanted.anti_affinity_groups,
        wanted.gang,
        wanted.memo,
        wanted.trace,
        LeaseState.RESERVED,
        next(numbers),
        now,
        expires_at,
        0.0,
    )
    lease.shares = _granted(candidate, numbers)
    lease.__class__ = Lease
    return cast(Lease, lease)


def _granted(candidate: Placement, numbers: Iterator[int]) -> tuple[Share, ...]:
    shares = []
    for share in candidate.shares:
        slot = next(numbers)
        granted = _Share(
            share.container,
            share.device,
            share.index,
            share.memory_mib,
            share.cores_percent,
            share.unit_mib,
            share.whole,
            share.slotted,
            share.init,
            None if slot < 0 else slot,
            next(numbers),
            share.sharing,
            share.slots,
            share.mig,
            share.requested_units,
            None,
        )
        granted.__class__ = Share
        shares.append(granted)
    return cast(tuple[Share, ...], tuple(shares))


def encode_lease(lease: Lease) -> bytes:
    """Pack a lease as it stands, with its slots and fences.

    When it was resized is the last that it says, in eight bytes: the script that resizes writes
    over them.
    """
    says = said(lease, {}, *((lease.resized_at,) if lease.resized_at else ()))
    head = _HEAD.pack(
        NUMBER_OF_STATE[lease.state],
        lease.version,
        lease.version,
        lease.created_at,
        lease.expires_at,
        len(lease.shares),
        len(says),
    )
    grants = [
        Struct("<" + _GRANT).pack(-1 if share.slot is None else share.slot, share.fence)
        for share in lease.shares
    ]
    return b"".join((head, *grants, says, taken(lease.node, lease.shares)))


def decode_lease(value: bytes) -> Lease:
    """Read a stored lease."""
    number, version, _, created_at, expires_at, count, length = _HEAD.unpack_from(value)
    grants = unpack_from("<" + _GRANT * count, value, _HEAD.size)
    at = _HEAD.size + _GRANT_BYTES * count
    tags, resources, pod, gang, namespace, name, dialect, memo, trace, *resized = _unpack(
        value[at : at + length]
    )
    node, *takes = _unpack(value[at + length :])
    amounts = _amounts_of(resources)
    parts = takes[2] if takes[0] is False else [takes]
    shares = tuple(map(_share_of, parts, grants[::2], grants[1::2]))
    lease = _Lease(
        pod,
        namespace,
        name,
        node,
        shares,
        dialect,
        dict(zip(amounts[::2], amounts[1::2], strict=True)),
        tuple(tags.split("\n")) if tags else (),
        gang,
        memo,
        trace,
        _STATES[number],
        int(version),
        created_at,
        expires_at,
        resized[0] if resized else 0.0,
    )
    lease.__class__ = Lease
    return cast(Lease, lease)


def _share_of(parts: Sequence[Any], slot: int, fence: float) -> Share:
    device, memory_mib, cores_percent, slotted, slots, company, container, *others = parts
    index, unit_mib, init, whole, mig, terms, *asked = others
    share = _Share(
        container,
        device,
        index,
        memory_mib,
        cores_percent,
        unit_mib,
        whole,
        slotted,
        init,
        None if slot < 0 else slot,
        int(fence),
        _COMPANIES[company],
        slots,
        MigPlacement(**mig) if mig else None,
        RequestedUnits(**terms) if terms else None,
        ShareSize(**asked[0]) if asked else None,
    )
    share.__class__ = Share
    return cast(Share, share)
