"""The records of the ledger, each declared once, as services and Lua functions exchange them; pure.

A record is stored as a MessagePack array of its fields, in the order of their declaration.
`functions/common/layouts.lua`, generated from here, gives functions each field's position under its
name in capitals. Each field has a place of its own, and a value that says that it does not apply.

Lists of texts that functions search are joined (`rows/joined_texts.py`). What functions pass on
without reading it is declared in the model: the rest of a lease (`shared/model/leases/lease.py`),
and budget accounts (`shared/model/budgets/budget.py`).
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
    """An array of fields."""


class NodeRecord(Record, frozen=True):
    version: Fence
    status: Annotated[int, Meta(ge=-1, le=1)]
    """1 if the API server has it, 0 if only its agent or leases do, -1 if it was removed."""
    number: Number
    """Differs between nodes of one name, one of which was removed."""
    name: NodeName
    resources: Annotated[str, Meta(max_length=MOST_NODE_BYTES)]
    """Names, each before a line feed."""
    amounts: Annotated[tuple[float, ...], Meta(max_length=2 * MOST_NODE_RESOURCES)]
    """The capacity and the use of each resource."""


class NodeRowRecord(Record, frozen=True):
    """A node with its devices, as `read_nodes` returns it."""

    name: str
    node: Any
    """A `NodeRecord`: one that cannot be read must not hide the others."""
    facts: str
    """`NodeFacts` as JSON; empty if the API server does not have the node."""
    devices: str
    """As its agent reported them, as JSON."""
    served: str
    states: tuple[Any, ...]
    """A `DeviceRecord` of each of its devices, or False for one that cannot be read."""
    lease_count: Number
    """So many of the leases that follow are on it."""
    mismatches: tuple[str, ...]
    terms: str
    """Anti-affinity that the watcher has not reported yet, as JSON."""


class NodesRecord(Record, frozen=True):
    """Nodes as `read_nodes` returns them, and where the ledger was at that moment."""

    generation: str
    feed_entry: str
    """The ID of the last one."""
    capacity: int
    version: int
    names: tuple[Any, ...]
    """Of these nodes, or of all. Other programs may have written bytes."""
    nodes: tuple[NodeRowRecord, ...]
    unreadable: tuple[UnreadableRecord, ...]


class NodeFactsRecord(Record, frozen=True):
    """The facts of a node, as `save_nodes` takes them."""

    name: NodeName
    facts: str
    """All of them, as JSON."""
    rules: str
    """Those that decide placement, amounts aside, as JSON."""
    room: tuple[Any, ...]
    """The name, escaped, and the amount of each resource that is free, before leases; of a host
    port, what is in use of it, below 0."""
    excluded_devices: tuple[int, ...]
    repelling_pods: tuple[PodUid, ...]
    """With required anti-affinity."""
    is_wide: bool
    """Whether its pods may keep pods off other nodes."""
    revision: int
    pods_revision: int


class ReportedDeviceRecord(Record, frozen=True):
    """A device, as its node's agent reports it."""

    uuid: DeviceUuid
    memory_mib: int
    slots: int
    is_healthy: bool
    unit_mib: int
    index: int
    """By which annotations of its node exclude devices."""
    is_mig: bool
    held: str
    """What its agent has given out beyond the leases: a `Held` as JSON; or empty."""


class DeviceReportRecord(Record, frozen=True):
    """All devices of a node, as `save_devices` takes them."""

    node: NodeName
    devices: str
    """As JSON."""
    served: str
    rows: tuple[ReportedDeviceRecord, ...]
    fences: tuple[Any, ...]
    """The UUID and the lowest possible fence of each device that has one."""
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
    """Whether a claim reserves it for a pod: see `ClaimRecord`."""
    claimed_until: Number
    """The second by which leases must end to use it although it is claimed; 0 if none may."""
    is_mig: bool
    uuid: DeviceUuid
    node: NodeName
    slot_map: DeviceText
    """`1` for each slot, or position of `layout`, that leases use, up to the last one."""
    groups: DeviceText
    """Anti-affinity groups of its leases, each between line feeds; or empty."""
    layout: DeviceText
    """The MIG layout that its leases require; or empty."""
    mode: SharingMode | Literal[""]
    """The mode of its leases; empty without a lease. A reservation in another mode is refused."""
    held: DeviceText
    """What its agent has given out beyond the leases: a `Held` as JSON; or empty."""


class NumbersRecord(Record, frozen=True):
    """What changes in the life of a lease."""

    state: LeaseState
    version: Fence
    reserved_version: Fence
    created_at: Seconds
    expires_at: Seconds
    """Of a reservation; 0 later."""
    activated_at: Seconds
    """0 if it has not been active."""
    resized_at: Seconds
    """0 if it was not."""
    grants: Annotated[tuple[int, ...], Meta(max_length=2 * MOST_SHARES)]
    """The slot, or `NO_SLOT`, and the fence of each share."""


class RequestRecord(Record, frozen=True):
    """What functions read of the request of a lease."""

    pod: PodUid
    namespace: Namespace
    gang: str
    """Escaped; or empty."""
    groups: Annotated[str, Meta(max_length=MOST_GROUPS_BYTES)]
    """Anti-affinity groups, each but the last before a line feed."""
    resources: Annotated[str, Meta(max_length=MOST_LEASE_BYTES)]
    """The name, escaped, and the amount of each ordinary resource, as a JSON array."""
    limited_run_s: float
    """How long its pod may run, where quotas limit that; infinity without an end; 0 where they do
    not, as for a ResourceClaim or a pod that its node runs for ever."""


class BookingRecord(Record, frozen=True):
    """What a lease takes of one device: `Booking`, as functions read it."""

    device: DeviceUuid
    memory_mib: Mib
    cores_percent: Percent
    shares: Count
    slots: Count
    """New ones."""
    sharing: SharingPolicy
    most_shares: Count
    """Slots that the dialect has on the device; 0 for those of the device."""
    layout: ShortText
    mode: SharingMode


class DemandRecord(Record, frozen=True):
    node: NodeName
    bookings: Annotated[tuple[BookingRecord, ...], Meta(max_length=MOST_SHARES)]
    slots: Annotated[tuple[int, ...], Meta(max_length=2 * MOST_SHARES)]
    """For each share the number of its booking, from 1, and that of its slot among the new ones of
    the device; 0 if it takes none; below 0, -1 less its position in the MIG layout."""


class LeaseRecord(Record, frozen=True):
    """A lease; functions do not read the last two fields."""

    numbers: NumbersRecord
    request: RequestRecord
    demand: DemandRecord
    shares: Annotated[tuple[Share, ...], Meta(max_length=MOST_SHARES)]
    """Without slots and fences, which are `NumbersRecord.grants`."""
    description: LeaseDescription


class WaitingRecord(Record, frozen=True):
    group: str
    """The group of equal smallest needs with which it is offered capacity; `-` if it is not."""
    order: str
    """The sort key, by priority and age."""
    verdict: Number
    """The capacity number of the state that its verdict is about."""
    since: Seconds
    record: Annotated[str, Meta(max_length=MOST_WAITING_BYTES)]
    """The pod as queued and its refusal, as JSON."""
    gang: str
    """Escaped; empty if it may run alone."""
    need: str
    """`group`, even if it is offered nothing."""
    namespace: Namespace
    scheduler_reason: Annotated[str, Meta(max_length=MOST_SCHEDULER_REASON)]
    """Why kube-scheduler, which chooses its node, has not placed it; empty for other pods."""


class WaitingRowRecord(Record, frozen=True):
    """A waiting pod, as `wait` takes it."""

    pod: PodUid
    group: str
    """The group of equal smallest needs; empty if no freed capacity can help."""
    order: str
    verdict: int
    """The capacity number that it is based on, or `RESERVED_FOR_OTHER`."""
    record: str
    since: Seconds
    gang: str
    """Escaped; empty if it may run alone."""
    receives_offers: bool
    min_members: int
    """The verdict holds while fewer pods of its gang exist; 0 for any number."""
    namespace: Namespace
    scheduler_reason: str


class ExcessRecord(Record, frozen=True):
    """Which limit of a quota refuses a lease: a `QuotaExcess`, as functions return it."""

    measure: ShortText
    model: LongText
    limit: Number
    used: Number
    requested: Number
    label: KeyText
    values: tuple[LongText, ...]
    by_gang: Number


class RefusalRecord(Record, frozen=True):
    """Why a pod gets no lease, or a lease not the size that it was to get."""

    reason: str
    devices: tuple[DeviceRecord, ...]
    """Of the candidates, as they are."""
    nodes: tuple[NodeRecord, ...]
    excesses: tuple[ExcessRecord, ...]
    reserved_for_other: bool
    """A candidate's capacity is reserved for another pod."""


class LimitsRecord(Record, frozen=True):
    """Limits on all devices or on those of a model."""

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
    """A quota, as `quotas` takes it."""

    namespace: Namespace
    quota: QuotaRecord


class UsageRecord(Record, frozen=True):
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
    """What a lease was charged when it began; the same is taken back when it ends."""

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
    """The second by which leases must end that may use its devices; 0 if none may."""


class RepellingRecord(Record, frozen=True):
    """Required anti-affinity of a pod that the watcher has not reported on its node yet."""

    version: Fence
    """Of its reservation."""
    node: NodeName
    is_wide: bool
    """Whether it may repel pods on other nodes, or of any namespace."""
    terms: Annotated[str, Meta(max_length=MOST_REPELLING_BYTES)]
    """As JSON."""


class EntitlementRecord(Record, frozen=True):
    """What the budget of a namespace means for its waiting pods."""

    is_spent: bool
    weight: Number
    must_wait: bool
    """Whether its new pods are queued."""


class EntitlementRowRecord(Record, frozen=True):
    namespace: Namespace
    entitlement: EntitlementRecord


class UsedAmountRecord(Record, frozen=True):
    """What the leases of a namespace take of healthy devices."""

    namespace: Namespace
    cores: int
    memory_mib: int


class FairShareRecord(Record, frozen=True):
    """What orders waiting pods, as `query` returns it."""

    cores: int
    memory_mib: int
    """Of all healthy devices; at least 1."""
    used: tuple[UsedAmountRecord, ...]
    entitlements: tuple[EntitlementRowRecord, ...]


class SizeRecord(Record, frozen=True):
    """The healthy devices of a node."""

    cores: Number
    memory_mib: Number


class UnsyncedRecord(Record, frozen=True):
    version: Fence
    resized_at_ms: Number


class ExpiringRecord(Record, frozen=True):
    """Reservations that were made, and expire, together."""

    version: Fence
    pods: tuple[PodUid, ...]


class BudgetRecord(Record, frozen=True):
    reported_at: Seconds
    budget: str
    """A `BudgetChanged`, as JSON."""


class PreemptionRecord(Record, frozen=True):
    version: Number
    preemption: str
    """A `Preemption`, as JSON."""
