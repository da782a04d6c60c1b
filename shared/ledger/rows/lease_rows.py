"""Reservations and leases as bytes: what the ledger's functions read and store; pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import structs

from shared.ledger.records import (
    NO_SLOT,
    BookingRecord,
    DemandRecord,
    LeaseRecord,
    NumbersRecord,
    RequestRecord,
)
from shared.ledger.rows.joined_texts import escaped, joined_texts, split_texts, unescaped
from shared.ledger.rows.record_sizes import (
    MOST_GROUPS_BYTES,
    MOST_LEASE_BYTES,
    check_amount,
    check_size,
)
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.leases.lease import (
    Booking,
    Lease,
    LeaseDescription,
    LeaseRequest,
    Share,
    bookings,
)
from shared.model.leases.ledger import Reservation, TooLarge
from shared.model.names import NodeName

_GRANT_BYTES = 12
"""At most, of a slot and a fence."""
_NUMBERS_BYTES = 80
"""At most, of `NumbersRecord` without grants."""
_UNENCODABLE = (RequestError, OverflowError, UnicodeEncodeError, *UNDECODABLE)

_encode_json = msgspec.json.Encoder(order="deterministic").encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(LeaseRecord).decode
_check_request = msgspec.msgpack.Decoder(RequestRecord).decode
_check_description = msgspec.msgpack.Decoder(LeaseDescription).decode
_check_shares = msgspec.msgpack.Decoder(tuple[Share, ...]).decode
_decode_amounts = msgspec.json.Decoder(list[Any]).decode
_DESCRIBED = LeaseDescription.__struct_fields__
_described = attrgetter(*_DESCRIBED)
_REQUESTED = LeaseRequest.__struct_fields__
_requested = attrgetter(*_REQUESTED)


def text(value: Any) -> str:
    """Return the same text for equal values."""
    return _encode_json(value).decode()


def joined(pieces: Sequence[bytes]) -> tuple[list[int], bytes]:
    return list(accumulate(map(len, pieces), initial=0)), b"".join(pieces)


def demand_of(node: NodeName, shares: Sequence[Share]) -> DemandRecord:
    """Return what shares take of a node's devices, and which of its new slots each share gets.

    An init container uses the slot of the pod's next container on the device, as the kubelet gives
    its device IDs to that one.
    """
    if len(shares) == 1 and shares[0].mig is None:  # the usual case, without intermediate objects
        [share] = shares
        slots_of_share = int(share.slotted)
        booking = BookingRecord(
            share.device,
            share.memory_mib,
            share.cores_percent,
            1,
            slots_of_share,
            share.sharing,
            share.slots if share.slotted else 0,
            "",
            share.mode,
        )
        return DemandRecord(node, (booking,), (1, slots_of_share))
    booked = [_booking(booking, shares) for booking in bookings(shares)]
    numbers = {booking.device: number for number, booking in enumerate(booked, start=1)}
    slots: list[int] = []
    slots_given: dict[str, int] = {}
    for share in shares:
        slots += (numbers[share.device], _slot_number(share, slots_given))
    return DemandRecord(node, tuple(booked), tuple(slots))


def _booking(booking: Booking, shares: Sequence[Share]) -> BookingRecord:
    slotted = [s for s in shares if s.device == booking.device and s.slotted and not s.mig]
    return BookingRecord(
        device=booking.device,
        memory_mib=booking.memory_mib,
        cores_percent=booking.cores_percent,
        shares=booking.shares,
        slots=booking.slots if slotted else 0,
        sharing=booking.sharing,
        most_shares=min((share.slots for share in slotted), default=0),
        layout=booking.layout,
        mode=booking.mode,
    )


def _slot_number(share: Share, slots_given: dict[str, int]) -> int:
    """Number the slot of a share among those its pod gets of the device, or return 0 for none.

    For a MIG instance, -1 - its position in the layout.
    """
    if share.mig:
        return -1 - share.mig.position
    if not share.slotted:
        return 0
    number = slots_given.get(share.device, 0) + 1
    if not share.init:
        slots_given[share.device] = number
    return number


def _request_of(of: LeaseRequest, texts: dict[tuple[tuple[str, int], ...], str]) -> RequestRecord:
    """`texts` caches the resources of other leases."""
    resources = tuple(of.resources.items())
    resources_text = texts.get(resources)
    if resources_text is None:
        resources_text = texts[resources] = encode_resources(of.resources)
    groups = joined_texts(of.anti_affinity_groups) if of.anti_affinity_groups else ""
    check_size("the anti-affinity groups", len(groups.encode()), MOST_GROUPS_BYTES)
    gang = of.gang and escaped(of.gang)
    return RequestRecord(of.pod, of.namespace, gang, groups, resources_text, _limited_run_s(of))


def _limited_run_s(of: LeaseRequest) -> float:
    if of.claim or of.term.runs_on:
        return 0.0
    return math.inf if of.term.max_run_s is None else of.term.max_run_s


def _description_of(of: LeaseDescription) -> LeaseDescription:
    return LeaseDescription(**dict(zip(_DESCRIBED, _described(of), strict=True)))


def encode_resources(resources: Mapping[str, int]) -> str:
    for name, amount in resources.items():
        check_amount(name, amount)
    return text([part for item in resources.items() for part in (escaped(item[0]), item[1])])


def encode_reservation(
    wanted: Reservation, texts: dict[tuple[tuple[str, int], ...], str]
) -> list[bytes] | TooLarge:
    """Pack a lease for the first candidate, without numbers, then demand and shares for others.

    Returns TooLarge if a lease would have more than the ledger stores.
    """
    try:
        request = _pack(_request_of(wanted, texts))
        description = _pack(_description_of(wanted))
        _check_request(request)
        _check_description(description)
        pieces = []
        most_bytes = 0
        for candidate in wanted.candidates:
            demand = _pack(demand_of(candidate.node, candidate.shares))
            shares = _pack(candidate.shares)
            _check_shares(shares)
            pieces.append(demand + shares)
            grants_bytes = _GRANT_BYTES * len(candidate.shares)
            most_bytes = max(most_bytes, len(demand) + len(shares) + grants_bytes)
        _check_lease(_NUMBERS_BYTES + len(request) + len(description) + most_bytes)
    except _UNENCODABLE as error:
        return TooLarge(pod=wanted.pod, reason=_reason(error))
    first_lease = b"".join((request, *pieces[:1], description))
    return [first_lease, *pieces[1:]]


def encode_repelled(terms: Sequence[AntiAffinityTerm]) -> tuple[bool, str] | None:
    """Return whether terms may concern any node or pod, and the terms."""
    if not terms:
        return None
    is_wide = any(term.all_namespaces or term.topology_key != HOSTNAME for term in terms)
    return is_wide, text(terms)


def _check_lease(size: int) -> None:
    check_size("the lease", size, MOST_LEASE_BYTES)


def new_lease(
    wanted: Reservation, number: int, numbers: Iterator[int], now: float, expires_at: float
) -> Lease:
    candidate = wanted.candidates[number - 1]
    version = next(numbers)
    return Lease(
        **dict(zip(_REQUESTED, _requested(wanted), strict=True)),
        node=candidate.node,
        shares=_granted(candidate.shares, numbers),
        version=version,
        created_at=now,
        expires_at=expires_at,
    )


def _granted(shares: Sequence[Share], grants: Iterator[int]) -> tuple[Share, ...]:
    return tuple(
        structs.replace(share, slot=None if slot == NO_SLOT else slot, fence=fence)
        for share, slot, fence in zip(shares, grants, grants, strict=False)
    )


def encode_leases(
    leases: Iterable[Lease],
) -> tuple[list[Lease], list[bytes], list[tuple[Lease, str]]]:
    packed = []
    values = []
    refused = []
    for lease in leases:
        try:
            value = encode_lease(lease)
        except _UNENCODABLE as error:
            refused.append((lease, _reason(error)))
        else:
            packed.append(lease)
            values.append(value)
    return packed, values, refused


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RequestError) else f"a field is out of bounds: {error}"


def encode_lease(lease: Lease) -> bytes:
    numbers = NumbersRecord(
        state=lease.state,
        version=lease.version,
        reserved_version=lease.version,
        created_at=lease.created_at,
        expires_at=lease.expires_at,
        activated_at=lease.activated_at,
        resized_at=lease.resized_at,
        grants=tuple(
            number
            for share in lease.shares
            for number in (NO_SLOT if share.slot is None else share.slot, share.fence)
        ),
    )
    record = LeaseRecord(
        numbers,
        _request_of(lease, {}),
        demand_of(lease.node, lease.shares),
        tuple(structs.replace(share, slot=None, fence=0) for share in lease.shares),
        _description_of(lease),
    )
    value = _pack(record)
    _check_lease(len(value))
    _unpack(value)
    return value


def decode_lease(value: bytes) -> Lease:
    record = _unpack(value)
    numbers = record.numbers
    request = record.request
    amounts = _decode_amounts(request.resources)
    return Lease(
        **dict(zip(_DESCRIBED, _described(record.description), strict=True)),
        pod=request.pod,
        namespace=request.namespace,
        resources=dict(zip(map(unescaped, amounts[::2]), amounts[1::2], strict=True)),
        anti_affinity_groups=tuple(split_texts(request.groups)),
        gang=unescaped(request.gang),
        node=record.demand.node,
        shares=_granted(record.shares, iter(numbers.grants)),
        state=numbers.state,
        version=numbers.version,
        created_at=numbers.created_at,
        expires_at=numbers.expires_at,
        activated_at=numbers.activated_at,
        resized_at=numbers.resized_at,
    )
