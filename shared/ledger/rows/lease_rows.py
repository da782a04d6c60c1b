"""Reservations and leases as bytes: what the ledger's functions read and store; pure.

The layout of a lease is that of `functions/common/lease.lua`: numbers, a slot and a fence
per share, its description, and its demand. Functions read only the beginning of the last two.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from struct import Struct, error, unpack_from
from typing import Any

import msgspec
from msgspec import structs

from shared.ledger.rows.joined_texts import escaped, joined_texts, split_texts, unescaped
from shared.ledger.rows.record_sizes import (
    MOST_GROUPS_BYTES,
    MOST_LEASE_BYTES,
    check_amount,
    check_size,
)
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm
from shared.model.errors import RequestError
from shared.model.leases.lease import (
    Booking,
    ClaimAllocation,
    Lease,
    LeaseState,
    MigPlacement,
    RequestedUnits,
    Share,
    ShareSize,
    bookings,
)
from shared.model.leases.ledger import Reservation, TooLarge
from shared.model.names import NodeName
from shared.model.requests.placement import Placement
from shared.model.requests.request import NO_TERM, SharingPolicy, Term

DEVICE_FIELDS = 8
"""Values per device of a demand: uuid, MiB, cores, shares, new slots, sharing policy, slots that
its dialect has, MIG layout."""
NUMBER_OF_STATE = {state: number for number, state in enumerate(LeaseState, start=1)}

_HEADER = Struct("<BddddII")
_GRANT = "id"
_GRANT_BYTES = 12
_UNENCODABLE = (RequestError, OverflowError, UnicodeEncodeError, error)
"""What is raised for numbers and texts that are beyond every limit."""
_EXPIRING = frozenset({LeaseState.RESERVED, LeaseState.EXPIRED})
"""States whose instant is the one of `expires_at`; that of the others is `activated_at`."""
_STATES = dict(enumerate(LeaseState, start=1))
_POLICIES = tuple(SharingPolicy)

_encode_json = msgspec.json.Encoder(order="deterministic").encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_decode_amounts = msgspec.json.Decoder(list[Any]).decode

_BOOKED = ("device", "memory_mib", "cores_percent", "slotted", "slots", "sharing", "container")
_DEVICE = ("index", "device_mib", "device_model")
_OTHERS = ("unit_mib", "init", "whole", "mig", "requested_units")
"""A share's values in their order; those of its device are an array."""
_booked_values = attrgetter(*_BOOKED)
_device_values = attrgetter(*_DEVICE)
_other_values = attrgetter(*_OTHERS)
_described_values = attrgetter("namespace", "name", "dialect", "memo", "trace", "weighed")


def text(value: Any) -> str:
    """Return `value` as JSON text, the same for equal values."""
    return _encode_json(value).decode()


def joined(pieces: Sequence[bytes]) -> tuple[list[int], bytes]:
    """Return where each of the pieces begins and ends when they are joined, and the whole."""
    return list(accumulate(map(len, pieces), initial=0)), b"".join(pieces)


def demand_of(node: NodeName, shares: Sequence[Share]) -> list[Any]:
    """Return what shares take of a node's devices, and which of its new slots each share gets.

    An init container uses the slot that the pod's next container on the device uses after it, as
    the kubelet gives its device IDs to the next container.
    """
    devices = [_booking_values(booking, shares) for booking in bookings(shares)]
    number = {values[0]: at for at, values in enumerate(devices, start=1)}
    slots: list[int] = []
    slots_given: dict[str, int] = {}
    for share in shares:
        slots += (number[share.device], _slot_number(share, slots_given))
    return [node, 2 + DEVICE_FIELDS * len(devices), *chain.from_iterable(devices), *slots]


def _booking_values(booking: Booking, shares: Sequence[Share]) -> list[Any]:
    slotted = [s for s in shares if s.device == booking.device and s.slotted and not s.mig]
    return [
        booking.device,
        booking.memory_mib,
        booking.cores_percent,
        booking.shares,
        booking.slots if slotted else 0,
        booking.sharing,
        min((share.slots for share in slotted), default=0),
        booking.layout,
    ]


def _slot_number(share: Share, slots_given: dict[str, int]) -> int:
    """Number the slot of a share among those its pod gets of the device; 0: it takes none.

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


def encode_demand(node: NodeName, shares: Sequence[Share]) -> bytes:
    """Pack what shares take: the values of one share, or of several also what they add up to.

    Only resized shares, which are few, carry the size that their pod requests, and only shares of
    ResourceClaims a share ID.
    """
    values = list(map(_share_values, shares))
    if len(shares) == 1 and shares[0].mig is None:
        return _pack((node, *values[0]))
    return _pack((node, False, demand_of(node, shares), values))


def _share_values(share: Share) -> tuple[Any, ...]:
    """Return a share's values; with the node, no more than an array of a one-byte header has."""
    values = (*_booked_values(share), _device_values(share), *_other_values(share))
    last = share.requested_size or share.share_id
    return (*values, last) if last else values


def encode_description(
    of: Reservation | Lease, texts: dict[tuple[Any, ...], str], *more: float
) -> bytes:
    """Pack a lease without its demand. `texts` caches the resources of other leases.

    A term is a map, and absent if nothing is known. The description of a ResourceClaim's lease,
    which is never resized, ends with its allocation.
    """
    resources = tuple(of.resources.items())
    resources_text = texts.get(resources)
    if resources_text is None:
        resources_text = texts[resources] = encode_resources(of.resources)
    groups_text = joined_texts(of.anti_affinity_groups) if of.anti_affinity_groups else ""
    check_size("the anti-affinity groups", len(groups_text.encode()), MOST_GROUPS_BYTES)
    gang = of.gang and escaped(of.gang)
    term = () if of.term == NO_TERM else (of.term,)
    claim = (of.claim.generation, of.claim.consumers) if of.claim else ()
    values = (*_described_values(of), *term, *claim, *more)
    return _pack((groups_text, resources_text, of.pod, gang, *values))


def encode_resources(resources: Mapping[str, int]) -> str:
    """Return ordinary resources as the text that a lease stores."""
    for name, amount in resources.items():
        check_amount(name, amount)
    return text([part for item in resources.items() for part in (escaped(item[0]), item[1])])


def encode_reservation(
    wanted: Reservation, texts: dict[tuple[Any, ...], str]
) -> list[bytes] | TooLarge:
    """Pack a reservation: its description, then the demands of its candidates.

    TooLarge: its lease would have more than a lease may have.
    """
    try:
        description = encode_description(wanted, texts)
        demands = [encode_demand(each.node, each.shares) for each in wanted.candidates]
        for each, demand in zip(wanted.candidates, demands, strict=True):
            _check_lease(len(description) + len(demand), len(each.shares))
    except _UNENCODABLE as error:
        return TooLarge(pod=wanted.pod, reason=str(error))
    return [description, *demands]


def encode_repelled(terms: Sequence[AntiAffinityTerm]) -> tuple[bool, str] | None:
    """Pack a pod's required anti-affinity: whether it may concern any node or pod, and terms."""
    if not terms:
        return None
    is_wide = any(term.all_namespaces or term.topology_key != HOSTNAME for term in terms)
    return is_wide, text(terms)


def _check_lease(described_bytes: int, shares: int) -> None:
    check_size(
        "the lease", _HEADER.size + _GRANT_BYTES * shares + described_bytes, MOST_LEASE_BYTES
    )


def new_lease(
    wanted: Reservation, number: int, numbers: Iterator[int], now: float, expires_at: float
) -> Lease:
    """Return the lease of candidate `number`, from its version, slots and fences."""
    candidate = wanted.candidates[number - 1]
    version = next(numbers)
    return Lease(
        pod=wanted.pod,
        namespace=wanted.namespace,
        name=wanted.name,
        node=candidate.node,
        shares=_granted(candidate, numbers),
        claim=wanted.claim,
        dialect=wanted.dialect,
        resources=wanted.resources,
        anti_affinity_groups=wanted.anti_affinity_groups,
        gang=wanted.gang,
        memo=wanted.memo,
        trace=wanted.trace,
        weighed=wanted.weighed,
        term=wanted.term,
        version=version,
        created_at=now,
        expires_at=expires_at,
    )


def _granted(candidate: Placement, numbers: Iterator[int]) -> tuple[Share, ...]:
    slots_and_fences = [(next(numbers), next(numbers)) for _ in candidate.shares]
    return tuple(
        structs.replace(share, slot=None if slot < 0 else slot, fence=fence)
        for share, (slot, fence) in zip(candidate.shares, slots_and_fences, strict=True)
    )


def encode_leases(
    leases: Iterable[Lease],
) -> tuple[list[Lease], list[bytes], list[tuple[Lease, str]]]:
    """Pack leases; return those that can be stored, packed, and the others with the reasons."""
    packed = []
    values = []
    refused = []
    for lease in leases:
        try:
            value = encode_lease(lease)
        except _UNENCODABLE as error:
            refused.append((lease, str(error)))
        else:
            packed.append(lease)
            values.append(value)
    return packed, values, refused


def encode_lease(lease: Lease) -> bytes:
    """Pack a lease as it is, with its slots and fences.

    The time of its last resize, if any, is the last eight bytes of the description: the script that
    resizes overwrites them. Raises RequestError if it would be too large.
    """
    resized_at = (lease.resized_at,) if lease.resized_at else ()
    description = encode_description(lease, {}, *resized_at)
    demand = encode_demand(lease.node, lease.shares)
    _check_lease(len(description) + len(demand), len(lease.shares))
    header = _HEADER.pack(
        NUMBER_OF_STATE[lease.state],
        lease.version,
        lease.version,
        lease.created_at,
        lease.expires_at if lease.state in _EXPIRING else lease.activated_at,
        len(lease.shares),
        len(description),
    )
    grants = [
        Struct("<" + _GRANT).pack(-1 if share.slot is None else share.slot, share.fence)
        for share in lease.shares
    ]
    return b"".join((header, *grants, description, demand))


def decode_lease(value: bytes) -> Lease:
    """Unpack a stored lease."""
    number, version, _, created_at, instant, share_count, length = _HEADER.unpack_from(value)
    state = _STATES[number]
    expires = state in _EXPIRING
    grants = unpack_from("<" + _GRANT * share_count, value, _HEADER.size)
    at = _HEADER.size + _GRANT_BYTES * share_count
    groups_text, resources, pod, gang, namespace, name, *others = _unpack(value[at : at + length])
    dialect, memo, trace, weighed, *last = others
    has_term = bool(last) and isinstance(last[0], dict)
    term = msgspec.convert(last.pop(0), Term) if has_term else NO_TERM
    node, *demand = _unpack(value[at + length :])
    amounts = _decode_amounts(resources)
    share_values = demand[2] if demand[0] is False else [demand]
    return Lease(
        pod=pod,
        namespace=namespace,
        name=name,
        node=node,
        shares=tuple(map(_decode_share, share_values, grants[::2], grants[1::2])),
        claim=ClaimAllocation(generation=last[0], consumers=tuple(last[1])) if last[1:] else None,
        dialect=dialect,
        resources=dict(zip(map(unescaped, amounts[::2]), amounts[1::2], strict=True)),
        anti_affinity_groups=tuple(split_texts(groups_text)),
        gang=unescaped(gang),
        memo=memo,
        trace=trace,
        weighed=weighed,
        term=term,
        state=state,
        version=int(version),
        created_at=created_at,
        expires_at=instant if expires else 0.0,
        activated_at=0.0 if expires else instant,
        resized_at=last[0] if len(last) == 1 else 0.0,
    )


def _decode_share(values: Sequence[Any], slot: int, fence: float) -> Share:
    *booked, device_values, unit_mib, init, whole, mig, units = values[:13]
    fields = dict(zip((*_BOOKED, *_DEVICE), (*booked, *device_values), strict=True))
    last = values[13] if len(values) > 13 else ""
    return Share(
        **fields | {"sharing": _POLICIES[fields["sharing"]]},
        unit_mib=unit_mib,
        init=init,
        whole=whole,
        mig=MigPlacement(**mig) if mig else None,
        requested_units=RequestedUnits(**units) if units else None,
        slot=None if slot < 0 else slot,
        fence=int(fence),
        requested_size=ShareSize(**last) if isinstance(last, dict) else None,
        share_id=last if isinstance(last, str) else "",
    )
