"""Limits of running containers from their leases, and checks against their usage; pure."""

from collections.abc import Iterable, Set
from dataclasses import replace

from msgspec import structs

from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed
from services.node_agent.records.checkpoint_entry import CheckpointEntry, ShrunkLease
from services.node_agent.records.known_leases import was_resized
from services.node_agent.usage.measurements import MeasuredContainer, region_sums
from services.node_agent.usage.violations import UNCOUNTED_BYTES
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import CORES_LIMIT, MEMORY_LIMIT, shares_by_index
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease, Share
from shared.model.names import DeviceUuid


class ShortageError(RequestError):
    def __init__(self, reason: str, used_mib: int, *, may_follow: bool = False) -> None:
        super().__init__(reason)
        self.used_mib = used_mib
        self.may_follow = may_follow
        """The driver may set this limit later, whatever is in use."""


def follow_lease(
    entry: CheckpointEntry, lease: Lease, node: NodeSnapshot
) -> CheckpointEntry | None:
    """Return None without a change. Raises RequestError if the lease cannot be enforced."""
    allocation = entry.allocation
    is_newer = lease.version > entry.lease.version or was_resized(lease, entry.lease)
    if lease.pod != allocation.pod or not is_newer:
        return None
    before = allocation.lease.shares
    if list(map(_place, lease.shares)) != list(map(_place, before)):
        if lease.created_at != allocation.lease.created_at:
            return None  # a later one; a rebuild may lower the time, but no fence
        raise RequestError("its lease is for shares other than those it was allocated")
    if lease.shares == before:
        return replace(entry, lowered=None) if entry.lowered else None
    return replace(
        entry,
        allocation=replace(allocation, lease=lease),
        setup=_setup(entry, lease, node),
        lowered=None,
    )


def lower_limits(
    entry: CheckpointEntry, lease: Lease, resize_id: str, node: NodeSnapshot
) -> CheckpointEntry | None:
    """Return None without a change. Raises RequestError if the lease cannot be enforced."""
    container = entry.allocation.container
    before = entry.allocation.lease
    if list(map(_place, before.shares)) != list(map(_place, lease.shares)):
        raise RequestError("the proposed lease is for other shares than its lease")
    shares = tuple(
        _smaller(old, new) if old.container == container else old
        for old, new in zip(before.shares, lease.shares, strict=True)
    )
    if shares == before.shares and lease.version <= before.version:
        return None
    smaller = structs.replace(lease, shares=shares)
    return replace(
        entry,
        lowered=ShrunkLease(resize_id=resize_id, lease=smaller, setup=_setup(entry, smaller, node)),
    )


def is_larger(entry: CheckpointEntry, before: CheckpointEntry) -> bool:
    shares = zip(entry.lease.shares, before.lease.shares, strict=True)
    return any(
        now.memory_mib > old.memory_mib or now.cores_percent > old.cores_percent
        for now, old in shares
    )


def is_grown(entry: CheckpointEntry, before: CheckpointEntry) -> bool:
    is_resized = entry.lease.resized_at > before.allocation.lease.resized_at
    return is_resized and is_larger(entry, before)


def _place(share: Share) -> tuple[str, DeviceUuid, int | None, int]:
    return share.container, share.device, share.slot, share.fence


def _smaller(old: Share, new: Share) -> Share:
    if new.memory_mib >= old.memory_mib:
        return old
    return structs.replace(new, cores_percent=old.cores_percent, sharing=old.sharing)


def _setup(entry: CheckpointEntry, lease: Lease, node: NodeSnapshot) -> ContainerSetup:
    """A running container keeps its mounts and the path of its region."""
    container = entry.allocation.container
    if any(share.mig for share in lease.shares_of(container)):
        return entry.setup
    fresh = container_setup(lease, container, node).environment
    environment = {
        **{name: text for name, text in entry.setup.environment.items() if not _is_limit(name)},
        **{name: text for name, text in fresh.items() if _is_limit(name)},
    }
    return replace(entry.setup, environment=environment)


def _is_limit(name: str) -> bool:
    return name.startswith((MEMORY_LIMIT, CORES_LIMIT))


def check_use(
    entry: CheckpointEntry,
    region: Region,
    seed: RegionSeed,
    use: MeasuredContainer | None,
    living: Set[int] | None,
) -> None:
    """Raise ShortageError if a limit would be below the memory in use.

    `living` has the PIDs of the container's namespace, if known. HAMi-core compares ended processes
    with the limit too. The driver includes contexts and code, which HAMi-core leaves out:
    `UNCOUNTED_BYTES` of each process are subtracted.
    """
    container = entry.allocation.container
    shares = shares_by_index(entry.allocation.lease, container)
    counted = region_sums(region, shares, living)
    seen = {measured.share.device: measured for measured in use.shares} if use else {}
    for share, added, limit in zip(shares, counted, seed.memory_limits, strict=False):
        by_region = max(added.enforced, added.total) if region.processes(living) else 0
        measured = seen.get(share.device)
        by_driver = (
            (measured.driver_bytes or 0) - UNCOUNTED_BYTES * max(1, measured.processes)
            if measured
            else 0
        )
        used = max(by_region, by_driver)
        if used > limit:
            used_mib = -(-used // MIB)
            source = ", as the driver reports" if by_driver > by_region else ""
            raise ShortageError(
                f"container {container} has {used_mib} MiB of GPU {share.index} ({share.device}) "
                f"in use{source}, and its limit would be {limit // MIB}",
                used_mib,
            )


def excess_requests(entries: Iterable[CheckpointEntry]) -> dict[str, int]:
    """A kubelet admits by requests, which do not change.

    Without this it would refuse pods that get what shrunk leases have freed.
    """
    total: dict[str, int] = {}
    for entry in {entry.key[:2]: entry for entry in entries}.values():
        dialect = DIALECTS.get(entry.lease.dialect)
        for share in entry.lease.shares_of(entry.allocation.container):
            for resource, amount in dialect.released_amounts(share).items() if dialect else ():
                if amount > 0:
                    total[resource] = total.get(resource, 0) + amount
    return total
