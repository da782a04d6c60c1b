"""The records of the ledger, each declared once, as services and Lua functions exchange them; pure.

A record is stored as a MessagePack array of its fields; `functions/common/layouts.lua`, generated
from here, has each field's position. What functions pass on without reading it is declared in the
model.
"""

from typing import Annotated, Any, Literal

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
    MOST_SCHEDULER_REASON,
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
from shared.model.devices.enforcers import SharingMode
from shared.model.leases.lease import LeaseDescription, LeaseState, Share
from shared.model.leases.ledger import UnreadableRecord
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
    pass


class NodeRecord(Record, frozen=True):
    version: Fence
    status: Annotated[int, Meta(ge=-1, le=1)]
    """1 if the API server has it, 0 if only its agent or leases do, -1 if it was removed."""
    number: Number
    """Differs between nodes of one name."""
    name: NodeName
    resources: Annotated[str, Meta(max_length=MOST_NODE_BYTES)]
    """Names, each before a line feed."""
    amounts: Annotated[tuple[float, ...], Meta(max_length=2 * MOST_NODE_RESOURCES)]
    """The capacity and the use of each."""


class NodeRowRecord(Record, frozen=True):
    name: str
    node: Any
    """A `NodeRecord`: one that cannot be read must not hide the others."""
    facts: str
    """`NodeFacts` as JSON; empty if the API server does not have the node."""
    devices: str
    served: str
    states: tuple[Any, ...]
    """A `DeviceRecord` of each, or False for one that cannot be read."""
    lease_count: Number
    mismatches: tuple[str, ...]
    terms: str
    """Anti-affinity that the watcher has not reported yet, as JSON."""


class NodesRecord(Record, frozen=True):
    generation: str
    feed_entry: str
    capacity: int
    version: int
    names: tuple[Any, ...]
    """Other programs may have written bytes."""
    nodes: tuple[NodeRowRecord, ...]
    unreadable: tuple[UnreadableRecord, ...]


class NodeFactsRecord(Record, frozen=True):
    name: NodeName
    facts: str
    rules: str
    room: tuple[Any, ...]
    """Name, escaped, and free amount before leases of each resource; of a host port, its use, below
    0."""
    excluded_devices: tuple[int, ...]
    repelling_pods: tuple[PodUid, ...]
    is_wide: bool
    """Its pods may keep pods off other nodes."""
    revision: int
    pods_revision: int


class ReportedDeviceRecord(Record, frozen=True):
    uuid: DeviceUuid
    memory_mib: int
    slots: int
    is_healthy: bool
    unit_mib: int
    index: int
    is_mig: bool
    held: str
    """A `Held` as JSON."""


class DeviceReportRecord(Record, frozen=True):
    node: NodeName
    devices: str
    served: str
    rows: tuple[ReportedDeviceRecord, ...]
    fences: tuple[Any, ...]
    reported_at: float
    by_agent: int
    """1 if our agent sent the report."""


class DeviceRecord(Record, frozen=True):
    memory_mib: Mib
    slots: Slots
    status: Annotated[int, Meta(ge=0, le=2)]
    """1 if it takes new shares, 0 if it is unhealthy, 2 if an annotation of its node excludes
    it."""
    unit_mib: Mib
    used_mib: Mib
    used_cores: Number
    shares: Number
    fence: Fence
    exclusive: bool
    is_claimed: bool
    claimed_until: Number
    is_mig: bool
    uuid: DeviceUuid
    node: NodeName
    slot_map: DeviceText
    groups: DeviceText
    """Each between line feeds."""
    layout: DeviceText
    mode: SharingMode | Literal[""]
    """Empty without a lease. A reservation in another mode is refused."""
    held: DeviceText


class NumbersRecord(Record, frozen=True):
    state: LeaseState
    version: Fence
    reserved_version: Fence
    created_at: Seconds
    expires_at: Seconds
    """Of a reservation; 0 later."""
    activated_at: Seconds
    resized_at: Seconds
    grants: Annotated[tuple[int, ...], Meta(max_length=2 * MOST_SHARES)]
    """The slot, or `NO_SLOT`, and the fence of each share."""


class RequestRecord(Record, frozen=True):
    pod: PodUid
    namespace: Namespace
    gang: str
    groups: Annotated[str, Meta(max_length=MOST_GROUPS_BYTES)]
    resources: Annotated[str, Meta(max_length=MOST_LEASE_BYTES)]
    """Name, escaped, and amount of each, as a JSON array."""
    limited_run_s: float
    """Where quotas limit that; infinity without an end; 0 where they do not."""


class BookingRecord(Record, frozen=True):
    device: DeviceUuid
    memory_mib: Mib
    cores_percent: Percent
    shares: Count
    slots: Count
    sharing: SharingPolicy
    most_shares: Count
    """0 for those of the device."""
    layout: ShortText
    mode: SharingMode


class DemandRecord(Record, frozen=True):
    node: NodeName
    bookings: Annotated[tuple[BookingRecord, ...], Meta(max_length=MOST_SHARES)]
    slots: Annotated[tuple[int, ...], Meta(max_length=2 * MOST_SHARES)]
    """For each share the number of its booking, from 1, and that of its slot among the new ones of
    the device; 0 if it takes none; below 0, -1 less its position in the MIG layout."""


class LeaseRecord(Record, frozen=True):
    numbers: NumbersRecord
    request: RequestRecord
    demand: DemandRecord
    shares: Annotated[tuple[Share, ...], Meta(max_length=MOST_SHARES)]
    """Without slots and fences, which are `NumbersRecord.grants`."""
    description: LeaseDescription


class WaitingRecord(Record, frozen=True):
    group: str
    """Of equal smallest needs; `-` if it is offered no capacity."""
    order: str
    verdict: Number
    since: Seconds
    record: Annotated[str, Meta(max_length=MOST_WAITING_BYTES)]
    gang: str
    need: str
    namespace: Namespace
    scheduler_reason: Annotated[str, Meta(max_length=MOST_SCHEDULER_REASON)]


class WaitingRowRecord(Record, frozen=True):
    pod: PodUid
    group: str
    """Of equal smallest needs; empty if no freed capacity can help."""
    order: str
    verdict: int
    record: str
    since: Seconds
    gang: str
    receives_offers: bool
    min_members: int
    namespace: Namespace
    scheduler_reason: str


class ExcessRecord(Record, frozen=True):
    measure: ShortText
    model: LongText
    limit: Number
    used: Number
    requested: Number
    label: KeyText
    values: tuple[LongText, ...]
    by_gang: Number


class RefusalRecord(Record, frozen=True):
    reason: str
    devices: tuple[DeviceRecord, ...]
    nodes: tuple[NodeRecord, ...]
    excesses: tuple[ExcessRecord, ...]
    reserved_for_other: bool


class LimitsRecord(Record, frozen=True):
    cores_milli: Limit
    milli_gpu: Limit
    memory_mib: Limit
    cards: Limit


class QuotaRecord(Record, frozen=True):
    limits: LimitsRecord
    models: Annotated[tuple[tuple[LongText, LimitsRecord], ...], Meta(max_length=MOST_ENTRIES)]
    only_models: bool
    model_label: KeyText
    pools: Annotated[tuple[LongText, ...], Meta(max_length=MOST_ENTRIES)]
    pool_label: KeyText
    max_run_s: Limit


class QuotaRowRecord(Record, frozen=True):
    namespace: Namespace
    quota: QuotaRecord


class UsageRecord(Record, frozen=True):
    cores_milli: Number
    milli_gpu: Number
    memory_mib: Number
    devices: dict[DeviceUuid, Number] | tuple[()]
    """Lua packs an empty map like an empty list."""


class ChargeRecord(Record, frozen=True):
    cores_milli: Number
    milli_gpu: Number
    memory_mib: Number
    devices: tuple[DeviceUuid, ...]


class ChargesRecord(Record, frozen=True):
    """The same is taken back when the lease ends."""

    namespace: Namespace
    by_model: dict[LongText, ChargeRecord] | tuple[()]


class ClaimRecord(Record, frozen=True):
    node: NodeName
    node_number: Number
    devices: tuple[DeviceUuid, ...]
    resources: tuple[Any, ...]
    """Name, escaped, and amount of each that the pod requests."""
    reserved: tuple[Number, ...]
    until: Number
    """The second by which leases must end that may use its devices; 0 if none may."""


class RepellingRecord(Record, frozen=True):
    version: Fence
    node: NodeName
    is_wide: bool
    terms: Annotated[str, Meta(max_length=MOST_REPELLING_BYTES)]


class EntitlementRecord(Record, frozen=True):
    is_spent: bool
    weight: Number
    must_wait: bool


class EntitlementRowRecord(Record, frozen=True):
    namespace: Namespace
    entitlement: EntitlementRecord


class UsedAmountRecord(Record, frozen=True):
    namespace: Namespace
    cores: int
    memory_mib: int


class FairShareRecord(Record, frozen=True):
    cores: int
    memory_mib: int
    """At least 1."""
    used: tuple[UsedAmountRecord, ...]
    entitlements: tuple[EntitlementRowRecord, ...]


class SizeRecord(Record, frozen=True):
    cores: Number
    memory_mib: Number


class UnsyncedRecord(Record, frozen=True):
    version: Fence
    resized_at_ms: Number


class ExpiringRecord(Record, frozen=True):
    version: Fence
    pods: tuple[PodUid, ...]


class BudgetRecord(Record, frozen=True):
    reported_at: Seconds
    budget: str


class PreemptionRecord(Record, frozen=True):
    version: Number
    preemption: str
