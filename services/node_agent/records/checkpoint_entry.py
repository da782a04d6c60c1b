"""Content of the checkpoint; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from shared.dialects.dialect import ContainerSetup
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid, PodUid

ContainerPlace = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    fence: int
    pod: PodUid


def slot_key(share: Share, pod: PodUid) -> str:
    slot = pod if share.slot is None else str(share.slot)
    return f"{share.device}/{slot}"


def device_of_key(key: str) -> DeviceUuid:
    return DeviceUuid(key.rpartition("/")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkLease:
    """Limits that a container has already; the ledger may not have the lease yet."""

    resize_id: str
    lease: Lease
    """Its version is the one that the resize is based on."""
    setup: ContainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A repeated call gets the same reply."""

    allocation: Allocation
    setup: ContainerSetup
    init: bool = False
    instances: tuple[str, ...] = ()
    lowered: ShrunkLease | None = None

    @property
    def key(self) -> tuple[PodUid, str, str]:
        allocation = self.allocation
        return allocation.pod, allocation.container, allocation.resource

    @property
    def place(self) -> ContainerPlace:
        allocation = self.allocation
        return allocation.namespace, allocation.name, allocation.container

    @property
    def holder(self) -> str:
        allocation = self.allocation
        kind = "pod" if allocation.lease.claim is None else "ResourceClaim"
        return f"{kind} {allocation.namespace}/{allocation.name}"

    @property
    def limits(self) -> ContainerSetup:
        return self.lowered.setup if self.lowered else self.setup

    @property
    def lease(self) -> Lease:
        return self.lowered.lease if self.lowered else self.allocation.lease


def new_entry(
    lease: Lease,
    container: str,
    resource: str,
    device_ids: tuple[str, ...],
    *,
    setup: ContainerSetup,
    instances: Mapping[tuple[DeviceUuid, int], str],
    now: float,
    init: bool = False,
) -> CheckpointEntry:
    allocation = Allocation(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        container=container,
        resource=resource,
        device_ids=device_ids,
        lease=structs.replace(lease, activated_at=now),
        activated_at=now,
    )
    return CheckpointEntry(
        allocation=allocation, setup=setup, init=init, instances=tuple(instances.values())
    )
