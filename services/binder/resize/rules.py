"""Rules for the new size of a running lease, by its own facts; pure.

The ledger decides about room, and the node agent about the memory in use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.dialect import Paths
from shared.dialects.hami_core import is_limited
from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.device import Device
from shared.model.devices.replicas import is_replica
from shared.model.errors import RequestError
from shared.model.events.request_reply import ResizeReply, ResizeRequest
from shared.model.leases.lease import MIB, Lease, LeaseState, Share, ShareSize, WaitingSize
from shared.model.leases.ledger import LedgerNode, NoCapacity
from shared.model.names import DeviceUuid
from shared.model.requests.request import SharingPolicy
from shared.placing.refusal.quota_refusals import measured

MAX_CORES = 99
"""All cores of a device need the whole device."""
_NOWHERE = Paths(library="/", preload="/", containers="/")


def refused(reason: str, hint: str = "") -> ResizeReply:
    return ResizeReply(outcome="refused", reason=reason, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChange:
    container: str
    stored: Lease
    lease: Lease
    """With its new shares, and the version that this was decided on."""
    actor: str = ""
    """Empty for what a lease waits for."""

    @property
    def before(self) -> tuple[Share, ...]:
        return self.stored.shares_of(self.container)

    @property
    def after(self) -> tuple[Share, ...]:
        return self.lease.shares_of(self.container)

    @property
    def is_none(self) -> bool:
        return self.after == self.before and self.lease.waiting_size == self.stored.waiting_size

    def waiting(self, now: float) -> Lease | ResizeReply:
        """Return the lease that waits for its new size, or why it cannot wait.

        A lease that waits for this size already is the stored one.
        """
        size = size_of(self.after[0])
        earlier = self.stored.waiting_size
        if earlier is not None and earlier.container != self.container:
            return refused(
                f"its container {earlier.container} waits for {earlier.memory_mib} MiB already",
                "wait for that, or withdraw it by a resize of that container to its present size",
            )
        wanted = WaitingSize(
            container=self.container,
            memory_mib=size.memory_mib,
            cores_percent=size.cores_percent,
            since=now,
        )
        if earlier is not None and replace(earlier, since=now) == wanted:
            return self.stored
        return structs.replace(self.stored, waiting_size=wanted)

    @property
    def shrinks(self) -> bool:
        """The node must agree first."""
        pairs = zip(self.before, self.after, strict=True)
        return any(new.memory_mib < old.memory_mib for old, new in pairs)


def decide(
    lease: Lease | None, request: ResizeRequest, node: LedgerNode | None
) -> SizeChange | ResizeReply:
    """`node` has the devices of the lease."""
    if lease is None:
        return refused(
            reason="it has no lease",
            hint="`leasehold explain` shows why; a waiting pod gets what its spec requests",
        )
    container = _container_of(lease, request)
    if isinstance(container, ResizeReply):
        return container
    shares = lease.shares_of(container)
    devices = {device.uuid: device for device, _ in node.devices} if node else {}
    refusal = next(_fixed(lease, shares), None) or next(_wrong(request, shares, devices), None)
    if refusal is not None:
        return refusal
    sized = tuple(
        _sized(share, request) if share.container == container else share for share in lease.shares
    )
    waiting = lease.waiting_size
    if waiting is not None and waiting.container == container:
        waiting = None
    change = SizeChange(
        container=container,
        stored=lease,
        lease=structs.replace(lease, shares=sized, waiting_size=waiting),
        actor=request.actor,
    )
    return change if change.is_none else next(_unenforceable(lease, change, node, devices), change)


def _container_of(lease: Lease, request: ResizeRequest) -> str | ResizeReply:
    names = lease.containers
    listed = ", ".join(names)
    if not names:
        return refused(reason="its lease has no share of a GPU")
    if request.container and request.container not in names:
        return refused(
            reason=f"its container {request.container} has no share; these have: {listed}",
            hint=f"-c {names[0]}",
        )
    if not request.container and len(names) > 1:
        return refused(
            reason=f"{len(names)} of its containers have shares: {listed}",
            hint=f"name one of them: -c {names[0]}",
        )
    return request.container or names[0]


def _fixed(lease: Lease, shares: Sequence[Share]) -> Iterator[ResizeReply]:
    recreate = "delete the pod, and create it with the new size"
    first = shares[0]
    if lease.claim is not None:
        yield refused(
            reason="its ResourceClaim says what it gets",
            hint="delete its pods, and create a claim for the new size",
        )
    if lease.state is not LeaseState.ACTIVE:
        yield refused(
            reason=f"its lease is {lease.state}: its containers have not been started yet",
            hint="try again once the pod runs",
        )
    if first.mig is not None:
        yield refused(
            reason=f"container {first.container} has MIG instance {first.mig.profile} of GPU "
            f"{first.index}, whose size the hardware fixes",
            hint=f"{recreate}: it gets an instance that fits",
        )
    if any(share.whole for share in shares):
        yield refused(
            reason=f"container {first.container} has GPU {first.index} whole, and no limit can be "
            "enforced",
            hint=recreate,
        )
    if is_replica(first.mode):
        yield refused(
            reason=f"container {first.container} has a replica of GPU {first.index}, whose size "
            "the configuration of the node fixes",
            hint="request amounts, on a node whose GPUs are not replicas",
        )
    if any(share.init for share in shares):
        yield refused(
            reason=f"container {first.container} is an init container: its share ends "
            "before the others start",
            hint="name a running container with -c",
        )


def _wrong(
    request: ResizeRequest, shares: Sequence[Share], devices: dict[DeviceUuid, Device]
) -> Iterator[ResizeReply]:
    if request.memory_mib is None and request.cores_percent is None:
        yield refused(reason="no size is requested", hint="--memory 6Gi, --cores 30, or both")
    for share in shares:
        device = devices.get(share.device)
        if device is None:
            yield refused(
                reason=f"GPU {share.index} ({share.device}) is not reported by its node",
                hint="run `leasehold doctor` on the node",
            )
            return
        yield from _wrong_memory(request.memory_mib, share, device)
        yield from _wrong_cores(request.cores_percent, share)


def _wrong_memory(memory_mib: int | None, share: Share, device: Device) -> Iterator[ResizeReply]:
    if memory_mib is None:
        return
    unit = share.unit_mib
    if memory_mib < 1:
        yield refused(reason=f"{memory_mib} MiB is not a size", hint="--memory 1Gi, for example")
    elif memory_mib % unit:
        below = memory_mib // unit * unit
        sizes = [size for size in (below, below + unit) if 0 < size <= device.memory_mib]
        yield refused(
            reason=f"this node counts memory in units of {unit} MiB, and {memory_mib} MiB is no "
            "multiple of that",
            hint=" or ".join(f"--memory {size}Mi" for size in sizes),
        )
    elif memory_mib > device.memory_mib:
        yield refused(
            reason=f"GPU {device.index} has {device.memory_mib} MiB in all, and {memory_mib} "
            "are requested",
            hint="delete the pod, and create it for a larger model or for more GPUs",
        )


def _wrong_cores(cores_percent: int | None, share: Share) -> Iterator[ResizeReply]:
    if cores_percent is None or cores_percent == share.cores_percent:
        return
    if not 1 <= cores_percent <= MAX_CORES:
        yield refused(
            reason=f"cores must be 1 to {MAX_CORES} percent of each device, got {cores_percent}",
            hint="a pod that requests all cores when it is created gets a device to itself",
        )
    elif share.sharing is SharingPolicy.EXCLUSIVE:
        yield refused(
            reason=f"container {share.container} has GPU {share.index} to itself, with all of its "
            "cores",
            hint="--memory alone can be changed; for fewer cores recreate the pod",
        )


def _sized(share: Share, request: ResizeRequest) -> Share:
    memory = share.memory_mib if request.memory_mib is None else request.memory_mib
    cores = share.cores_percent if request.cores_percent is None else request.cores_percent
    size = ShareSize(memory_mib=memory, cores_percent=cores)
    was = size_of(share)
    if size == was:
        return share
    first = share.requested_size or was
    terms = share.requested_units
    if terms is not None and memory != share.memory_mib:
        terms = replace(terms, memory_mib=memory, memory_bytes=memory * MIB, memory_percent=None)
    return structs.replace(
        share,
        memory_mib=memory,
        cores_percent=cores,
        sharing=SharingPolicy.SHARED
        if cores and share.sharing is SharingPolicy.BEST_EFFORT
        else share.sharing,
        requested_units=terms,
        requested_size=None if first == size else first,
    )


def size_of(share: Share) -> ShareSize:
    return ShareSize(memory_mib=share.memory_mib, cores_percent=share.cores_percent)


def _unenforceable(
    lease: Lease, change: SizeChange, node: LedgerNode | None, devices: dict[DeviceUuid, Device]
) -> Iterator[ResizeReply]:
    dialect = DIALECTS.get(lease.dialect)
    if dialect is None or node is None:
        yield refused(
            reason=f"this version does not know how its GPU was requested: {lease.dialect!r}"
        )
        return
    for resource in sorted(dialect.served.intersection(node.served)):
        before, after = (
            sum(dialect.id_count(share, resource) for share in shares)
            for shares in (change.before, change.after)
        )
        if before != after:
            yield refused(
                reason=f"its kubelet counts {resource} in {before} device IDs that the container "
                f"got when it started, and it would need {after}",
                hint="delete the pod, and create it with the new size",
            )
    for sized, verb in ((lease, "has"), (change.lease, "would have")):
        try:
            limited = is_limited(
                dialect.container_setup(sized, change.container, devices, _NOWHERE)
            )
        except RequestError as error:
            yield refused(reason=str(error))
            return
        if not limited and any(share.memory != "driver" for share in change.before):
            yield refused(
                reason=f"container {change.container} {verb} a share of {lease.dialect} that "
                "neither the driver nor HAMi-core enforces",
                hint="delete the pod, and create it with the new size",
            )


def no_capacity(full: NoCapacity, change: SizeChange, node: LedgerNode) -> ResizeReply:
    if full.quotas:
        return _over_quota(change, full.quotas[0])
    code, _, uuid = full.reason.partition(" of ")
    device = next((device for device, _ in node.devices if device.uuid == uuid), None)
    uses = {name: use.taken for name, use in full.devices.items()}
    use = uses.get(DeviceUuid(uuid))
    if device is None or use is None:
        return refused(reason=f"the ledger does not know GPU {uuid} any more")
    pairs = list(zip(change.before, change.after, strict=True))
    more_mib = sum(new.memory_mib - old.memory_mib for old, new in pairs if new.device == uuid)
    more_cores = sum(
        new.cores_percent - old.cores_percent for old, new in pairs if new.device == uuid
    )
    free_mib = device.memory_mib - use.memory_mib
    free_cores = 100 - use.cores_percent
    gpu = f"GPU {device.index} of node {change.lease.node}"
    room = [
        (old, device.memory_mib - taken.memory_mib, 100 - taken.cores_percent)
        for old in change.before
        for device, _ in node.devices
        if device.uuid == old.device and (taken := uses.get(device.uuid)) is not None
    ]
    most = min(old.memory_mib + mib for old, mib, _ in room)
    most -= most % change.before[0].unit_mib
    most_cores = min(MAX_CORES, *(old.cores_percent + cores for old, _, cores in room))
    reasons = {
        "memory": (
            f"{gpu} has {device.memory_mib} MiB, {free_mib} of them free, and {more_mib} more are "
            "needed",
            f"`leasehold gpus` shows the other leases; --memory {most}Mi would fit now",
        ),
        "cores": (
            f"{free_cores} % of the cores of {gpu} are free, and {more_cores} % more are needed",
            "`leasehold gpus` shows the other leases"
            + f"; --cores {most_cores} would fit now" * (most_cores > 0),
        ),
        "claimed": (
            f"{gpu} is reserved for a pod for which other pods are evicted",
            "`leasehold preemptions` shows which; try again when that is over",
        ),
        "device-unhealthy": (
            f"{gpu} is unhealthy: {device.public_fault or 'no new lease can use it'}",
            "a smaller size is possible; to move, delete the pod",
        ),
        "device-excluded": (
            f"{gpu} is cordoned by an annotation of its node",
            "a smaller size is possible; to move, delete the pod",
        ),
    }
    reason, hint = reasons.get(code, (f"{gpu} cannot give more: {code}", "`leasehold doctor`"))
    return refused(reason=reason, hint=hint)


def _over_quota(change: SizeChange, excess: QuotaExcess) -> ResizeReply:
    namespace = change.lease.namespace
    of_model = f" of model {excess.model}" if excess.model else ""
    used, wanted = (measured(excess.measure, n) for n in (excess.used, excess.requested))
    within = _size_within(change, excess)
    return refused(
        reason=f"the GPU quota of namespace {namespace} allows "
        f"{measured(excess.measure, excess.limit)}{of_model}; other leases have {used}, and this "
        f"one would have {wanted}",
        hint=f"{within or 'request less'}, or ask an administrator to raise its GPUQuota (kubectl "
        f"get gpuquota {namespace})",
    )


def _size_within(change: SizeChange, excess: QuotaExcess) -> str:
    shares = change.after
    if excess.model or len(shares) < len(change.lease.shares):
        return ""
    most = (excess.limit - excess.used) // len(shares)
    if excess.measure == "memoryMiB":
        most -= most % shares[0].unit_mib
        return f"--memory {most}Mi would be within it" if most > 0 else ""
    most = min(most // 10, MAX_CORES)
    fits_cores = excess.measure == "cores" and most > 0 and all(s.cores_percent for s in shares)
    return f"--cores {most} would be within it" if fits_cores else ""


def is_smaller(size: ResizeRequest, lease: Lease) -> bool:
    shares = lease.shares_of(size.container)
    return bool(shares) and 0 < (size.memory_mib or 0) <= shares[0].memory_mib
