"""The records of the ledger, each declared once, as services and Lua functions exchange them; pure.

A record is stored as a MessagePack array of its fields, in the order of their declaration. The
functions know the position of a field by its name in capitals: `functions/common/layouts.lua` is
generated from here. Each field has a place of its own, and a value that says that it does not
apply; nothing is left out.

Lists of texts that functions search are joined (`rows/joined_texts.py`).
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.ledger.rows.record_sizes import (
    MOST_AMOUNT,
    MOST_DEVICE_BYTES,
    MOST_GROUPS_BYTES,
    MOST_LEASE_BYTES,
    MOST_MIB,
    MOST_NODE_BYTES,
    MOST_NODE_RESOURCES,
    MOST_REPELLING_BYTES,
    MOST_SLOT,
    MOST_WAITING_BYTES,
)
from shared.model.bounds import (
    MOST_ENTRIES,
    MOST_SHARES,
    Count,
    Fence,
    KeyText,
    LongText,
    Percent,
    Seconds,
    ShortText,
)
from shared.model.leases.lease import LeaseDescription, LeaseState, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.request import SharingPolicy

Mib = Annotated[int, Meta(ge=0, le=MOST_MIB)]
Slots = Annotated[int, Meta(ge=0, le=MOST_SLOT)]
Number = Annotated[int, Meta(ge=0, le=MOST_AMOUNT)]
NO_SLOT = -1
NO_LIMIT = -1
Limit = Annotated[int, Meta(ge=NO_LIMIT, le=MOST_AMOUNT)]
DeviceText = Annotated[str, Meta(max_length=MOST_DEVICE_BYTES)]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An array of fields."""


class NodeRecord(Record, frozen=True):
    """A node, and how much of its ordinary resources leases use."""

    version: Fence
    status: Annotated[int, Meta(ge=-1, le=1)]
    """1: the API server has it; 0: only its agent, or leases; -1: it was removed."""
    number: Number
    """Differs between nodes of one name, one of which was removed."""
    name: NodeName
    resources: Annotated[str, Meta(max_length=MOST_NODE_BYTES)]
    """Names of resources, each before a line feed."""
    amounts: Annotated[tuple[float, ...], Meta(max_length=2 * MOST_NODE_RESOURCES)]
    """The capacity and the use of each."""


class DeviceRecord(Record, frozen=True):
    """A device, and what leases use of it."""

    memory_mib: Mib
    slots: Slots
    status: Annotated[int, Meta(ge=0, le=2)]
    """1: it takes new shares; 0: it is unhealthy; 2: an annotation of its node excludes it."""
    unit_mib: Mib
    used_mib: Mib
    used_cores: Number
    shares: Number
    fence: Fence
    exclusive: bool
    """One share has it exclusively."""
    is_claimed: bool
    """A claim reserves it for a pod: see `ClaimRecord`."""
    claimed_until: Number
    """The second by which leases must end that may use it although it is claimed; 0: none may."""
    is_mig: bool
    """It has MIG instances, not shares."""
    uuid: DeviceUuid
    node: NodeName
    slot_map: DeviceText
    """`1` for each slot, or position of `layout`, that leases use, up to the last one."""
    groups: DeviceText
    """Anti-affinity groups of its leases, each between line feeds; empty if there is none."""
    layout: DeviceText
    """The MIG layout that its leases require; empty if there is none."""
    held: DeviceText
    """What its agent has given out beyond the leases: a `Held` as JSON; empty if there is none."""


class NumbersRecord(Record, frozen=True):
    """What changes in the life of a lease."""

    state: LeaseState
    version: Fence
    reserved_version: Fence
    """The version that it was reserved with."""
    created_at: Seconds
    expires_at: Seconds
    """Of a reservation; 0 later."""
    activated_at: Seconds
    """0: it has not been active."""
    resized_at: Seconds
    """0: it was not."""
    grants: Annotated[tuple[int, ...], Meta(max_length=2 * MOST_SHARES)]
    """The slot (`NO_SLOT`: it has none) and the fence of each share."""


class RequestRecord(Record, frozen=True):
    """What functions read of the request of a lease."""

    pod: PodUid
    namespace: Namespace
    gang: str
    """Escaped; empty if there is none."""
    groups: Annotated[str, Meta(max_length=MOST_GROUPS_BYTES)]
    """Anti-affinity groups, each but the last before a line feed."""
    resources: Annotated[str, Meta(max_length=MOST_LEASE_BYTES)]
    """The name, escaped, and the amount of each ordinary resource, as a JSON array."""
    limited_run_s: float
    """How long its pod may run, where quotas limit that; infinity: without an end; 0: they do
    not, as for a ResourceClaim or a pod that its node runs for ever."""


class BookingRecord(Record, frozen=True):
    """What a lease takes of one device: `Booking`, as functions read it."""

    device: DeviceUuid
    memory_mib: Mib
    cores_percent: Percent
    shares: Count
    slots: Count
    """New slots."""
    sharing: SharingPolicy
    most_shares: Count
    """Slots that the dialect has on the device; 0: those of the device."""
    layout: ShortText


class DemandRecord(Record, frozen=True):
    """What a lease takes of the devices of a node."""

    node: NodeName
    bookings: Annotated[tuple[BookingRecord, ...], Meta(max_length=MOST_SHARES)]
    slots: Annotated[tuple[int, ...], Meta(max_length=2 * MOST_SHARES)]
    """For each share the number of its booking, from 1, and that of its slot among the new ones of
    the device: 0, it takes none; below 0, -1 less its position in the MIG layout."""


class LeaseRecord(Record, frozen=True):
    """A lease. Functions pass the last two on as they are."""

    numbers: NumbersRecord
    request: RequestRecord
    demand: DemandRecord
    shares: Annotated[tuple[Share, ...], Meta(max_length=MOST_SHARES)]
    """Without slots and fences, which are `NumbersRecord.grants`."""
    description: LeaseDescription


class WaitingRecord(Record, frozen=True):
    """A pod that waits, with its verdict."""

    group: str
    """The group of equal smallest needs with which it is offered capacity; `-`: it is not."""
    order: str
    """Its sort key, by priority and age."""
    verdict: Number
    """The capacity number of the state that its verdict is about."""
    since: Seconds
    record: Annotated[str, Meta(max_length=MOST_WAITING_BYTES)]
    """The pod as queued and its refusal, as JSON."""
    gang: str
    """Escaped; empty if it may run alone."""
    need: str
    """`group`, whether or not it is offered anything."""
    namespace: Namespace


class LimitsRecord(Record, frozen=True):
    """Limits of a quota, on all devices or on those of a model."""

    cores_milli: Limit
    milli_gpu: Limit
    memory_mib: Limit
    cards: Limit


class QuotaRecord(Record, frozen=True):
    """The quota of a namespace."""

    limits: LimitsRecord
    models: Annotated[tuple[tuple[LongText, LimitsRecord], ...], Meta(max_length=MOST_ENTRIES)]
    only_models: bool
    model_label: KeyText
    pools: Annotated[tuple[LongText, ...], Meta(max_length=MOST_ENTRIES)]
    pool_label: KeyText
    max_run_s: Limit


class UsageRecord(Record, frozen=True):
    """What the leases of a namespace use, of all devices or of those of a model."""

    cores_milli: Number
    milli_gpu: Number
    memory_mib: Number
    devices: dict[DeviceUuid, Number] | tuple[()]
    """Leases on each device. Lua packs an empty map like an empty list."""


class ChargeRecord(Record, frozen=True):
    """What one lease counts as, of all devices or of those of a model."""

    cores_milli: Number
    milli_gpu: Number
    memory_mib: Number
    devices: tuple[DeviceUuid, ...]


class ChargesRecord(Record, frozen=True):
    """What a lease was charged when it began: it ends with that, whatever changed meanwhile."""

    namespace: Namespace
    by_model: dict[LongText, ChargeRecord] | tuple[()]
    """By name of a model; the total under the empty name."""


class ClaimRecord(Record, frozen=True):
    """What a preemption or a planned start reserves for a pod."""

    node: NodeName
    node_number: Number
    devices: tuple[DeviceUuid, ...]
    resources: tuple[Any, ...]
    """The name, escaped, and the amount of each ordinary resource that the pod requests."""
    reserved: tuple[Number, ...]
    """How much of each is reserved."""
    until: Number
    """The second by which leases must end that may use its devices; 0: none may."""


class RepellingRecord(Record, frozen=True):
    """Required anti-affinity of a pod that the watcher has not reported on its node yet."""

    version: Fence
    """Of its reservation."""
    node: NodeName
    is_wide: bool
    """It may repel pods on other nodes, or of any namespace."""
    terms: Annotated[str, Meta(max_length=MOST_REPELLING_BYTES)]
    """As JSON."""


class EntitlementRecord(Record, frozen=True):
    """What the budget of a namespace means for its waiting pods."""

    is_spent: bool
    weight: Number
    must_wait: bool
    """Its new pods are queued."""


class SizeRecord(Record, frozen=True):
    """The healthy devices of a node."""

    cores: Number
    memory_mib: Number


class UnsyncedRecord(Record, frozen=True):
    """A lease whose node or annotations may be outdated after a resize."""

    version: Fence
    resized_at_ms: Number


class ExpiringRecord(Record, frozen=True):
    """Reservations that were made, and expire, together."""

    version: Fence
    pods: tuple[PodUid, ...]


class BudgetRecord(Record, frozen=True):
    """The state of a namespace's budget."""

    reported_at: Seconds
    budget: str
    """A `BudgetChanged`, as JSON."""


class PreemptionRecord(Record, frozen=True):
    """A preemption in progress."""

    version: Number
    preemption: str
    """A `Preemption`, as JSON."""
