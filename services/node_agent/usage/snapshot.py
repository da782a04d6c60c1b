"""What containers use, against what they lease, and who breaks the rules; pure.

Two witnesses: the region that HAMi-core keeps inside the container, and the driver. A container can
forge the first, and the second knows nothing of what is held in reserve, so that the larger counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.node_agent.allocate.pod_resolution import KubeletPod
from services.node_agent.isolation.region import DeviceSums, Region, RegionPath, Tampered, sums
from services.node_agent.isolation.region_image import RegionSeed, altered_limits
from services.node_agent.mig.instances import MigInstance
from services.node_agent.usage.cgroups import ProcessOrigin
from shared.model.events.node_events import ViolationReason
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace, PodUid

UNCOUNTED_BYTES = 512 << 20
"""What a process may use of a device beyond HAMi-core's own count: its context and its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process on a device, as the driver tells."""

    pid: int
    memory_bytes: int | None = None
    """None: the driver does not say."""
    busy_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one moment, as the driver tells."""

    device: DeviceUuid
    index: int
    model: str
    used_bytes: int = 0
    busy_percent: int | None = None
    memory_busy_percent: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    sampled_at_s: float | None = None
    """When the driver was asked, in seconds since the machine started; None: not noted. A process
    that is younger cannot have been named: its pid was another's then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedContainer:
    """A container that was given shares."""

    lease: Lease
    name: str
    place: RegionPath | None = None
    """Where its region lies; None: HAMi-core does not hold it."""
    seed: RegionSeed | None = None
    """What its region was made with."""
    instances: tuple[str, ...] = ()
    """UUIDs of its MIG instances, in the order of the lease's shares that are instances."""

    def instance_of(self, share: Share) -> str:
        """Return the UUID of the instance that a share is; empty: it is none, or not known."""
        own = (one for one in self.lease.shares_of(self.name) if one.mig is not None)
        known = {
            (one.device, one.mig): uuid for one, uuid in zip(own, self.instances, strict=False)
        }
        return known.get((share.device, share.mig), "")

    @property
    def shares(self) -> tuple[Share, ...]:
        """Its shares in the order in which it counts its devices."""
        return tuple(sorted(self.lease.shares_of(self.name), key=lambda share: share.index))

    @property
    def key(self) -> tuple[PodUid, str]:
        """Pod and container."""
        return self.lease.pod, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShare:
    """What a container uses of one device."""

    share: Share
    position: int
    """The device's number inside the container."""
    limit_bytes: int | None = None
    """As its region says; None without one."""
    region: DeviceSums | None = None
    driver_bytes: int | None = None
    """None: the driver was not asked, or does not say."""
    driver_percent: int | None = None
    processes: int = 0
    instance: MigInstance | None = None
    """The MIG instance that the share is."""

    @property
    def measured_bytes(self) -> int:
        """What the larger of the two witnesses says."""
        return max(self.driver_bytes or 0, self.region.total if self.region else 0)

    @property
    def overrun_bytes(self) -> int:
        """How much that is beyond the lease."""
        return max(0, self.measured_bytes - self.share.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredContainer:
    """What one container uses."""

    container: LeasedContainer
    region: Region | Tampered | None
    shares: tuple[MeasuredShare, ...]
    uncounted_pids: tuple[int, ...] = ()
    """Pids, as the node counts, of its processes on leased devices that HAMi-core does not know."""

    @property
    def isolation_lost(self) -> bool:
        """Whether HAMi-core should hold it, and does not."""
        held = self.container.place is not None
        return held and (not isinstance(self.region, Region) or bool(self.uncounted_pids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a container breaks."""

    reason: ViolationReason
    pod: PodUid
    namespace: Namespace
    name: str
    container: str
    device: DeviceUuid | None = None
    message: str = field(compare=False)
    """For people; numbers in it may change while the violation is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSnapshot:
    """Everything one look has shown."""

    scanned_at: float = 0.0
    scan_s: float = 0.0
    devices: tuple[DeviceSample, ...] = ()
    containers: tuple[MeasuredContainer, ...] = ()
    violations: tuple[Violation, ...] = ()
    unleased: Mapping[DeviceUuid, int] = field(default_factory=dict)
    """Processes on each device that no lease is for."""
    unattributed: int = 0
    """Processes whose container could not be told (yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttributedProcess:
    """A process on a device, with whose it is."""

    process: GpuProcess
    origin: ProcessOrigin
    device: DeviceUuid
    pod: KubeletPod | None
    leased: LeasedContainer | None
    container: str


def build_snapshot(
    containers: Sequence[LeasedContainer],
    regions: Mapping[tuple[PodUid, str], Region | Tampered | None],
    devices: Sequence[DeviceSample],
    origins: Mapping[int, ProcessOrigin],
    pods: Mapping[PodUid, KubeletPod],
    *,
    complete: bool,
    scanned_at: float = 0.0,
    instances: Mapping[str, MigInstance] | None = None,
) -> UsageSnapshot:
    """Join the witnesses.

    `instances` are MIG's, by UUID. `origins` lacks processes that have ended since the driver named
    them. Unless `complete`, more containers may have leases than `tenants` tells, and nobody is
    said to be without.
    """
    held, unleased, unknown = _attribute(containers, devices, origins, pods)
    measured = tuple(
        _measure_container(
            container,
            regions.get(container.key),
            [one for one in held if one.leased is container],
            {sample.device for sample in devices},
            instances or {},
        )
        for container in containers
    )
    outside = [one for one in unleased if one.origin.pod is not None]
    violations = [violation for use in measured for violation in _container_violations(use)]
    violations += _unleased_violations(outside, containers) if complete else []
    counts: dict[DeviceUuid, int] = {sample.device: 0 for sample in devices}
    for one in unleased if complete else ():
        counts[one.device] += 1
    return UsageSnapshot(
        scanned_at=scanned_at,
        devices=tuple(devices),
        containers=measured,
        violations=tuple(dict.fromkeys(violations)),
        unleased=counts,
        unattributed=unknown,
    )


def _attribute(
    tenants: Sequence[LeasedContainer],
    devices: Sequence[DeviceSample],
    origins: Mapping[int, ProcessOrigin],
    pods: Mapping[PodUid, KubeletPod],
) -> tuple[list[_AttributedProcess], list[_AttributedProcess], int]:
    """Return who uses what with a lease, who without, and of how many that cannot be told."""
    by_key = {tenant.key: tenant for tenant in tenants}
    by_pod: dict[PodUid, list[str]] = {}
    for uid, leasing in by_key:
        by_pod.setdefault(uid, []).append(leasing)
    leased: list[_AttributedProcess] = []
    unleased: list[_AttributedProcess] = []
    unknown = 0
    for sample in devices:
        for process in sample.processes:
            origin = origins.get(process.pid)
            if origin is None:
                continue
            pod = pods.get(origin.pod) if origin.pod else None
            container = _container_name(origin, pod, by_pod)
            if container is None:
                unknown += 1
                continue
            tenant = by_key.get((origin.pod, container)) if origin.pod else None
            one = _AttributedProcess(
                process=process,
                origin=origin,
                device=sample.device,
                pod=pod,
                leased=tenant,
                container=container,
            )
            holds = tenant and any(share.device == sample.device for share in tenant.shares)
            (leased if holds else unleased).append(one)
    return leased, unleased, unknown


def _container_name(
    origin: ProcessOrigin, pod: KubeletPod | None, tenants: Mapping[PodUid, Sequence[str]]
) -> str | None:
    """Return the container's name, empty for a process of no pod; None if it cannot be told yet."""
    if origin.pod is None:
        return ""
    if pod is None:
        names: Sequence[str] = tenants.get(origin.pod, ("",))
    else:
        told = pod.container_ids.get(origin.container_id)
        names = [told] if told else [container.name for container in pod.containers]
    return names[0] if len(names) == 1 else None


def _measure_container(
    tenant: LeasedContainer,
    region: Region | Tampered | None,
    held: Sequence[_AttributedProcess],
    sampled: set[DeviceUuid],
    instances: Mapping[str, MigInstance],
) -> MeasuredContainer:
    places = region_positions(region, tenant.shares) if isinstance(region, Region) else ()
    uses = []
    for position, share in enumerate(tenant.shares):
        own = [one.process for one in held if one.device == share.device]
        told = [one.memory_bytes for one in own if one.memory_bytes is not None]
        known = share.device in sampled and len(told) == len(own)
        uses.append(
            MeasuredShare(
                share=share,
                position=position,
                limit_bytes=region.memory_limits[position] if isinstance(region, Region) else None,
                region=sums(region, places[position]) if isinstance(region, Region) else None,
                driver_bytes=sum(told) if known else None,
                driver_percent=sum(one.busy_percent for one in own)
                if share.device in sampled
                else None,
                processes=len(own),
                instance=instances.get(tenant.instance_of(share)),
            )
        )
    return MeasuredContainer(
        container=tenant,
        region=region,
        shares=tuple(uses),
        uncounted_pids=_uncounted_pids(region, held),
    )


def region_positions(region: Region, shares: Sequence[Share]) -> tuple[int, ...]:
    """Return where the region counts each share: by its device's name if all are named there.

    Shares come in the order in which the container counts its devices.
    """
    named = region.uuids[: len(shares)]
    if len(set(named)) == len(shares) and set(named) == {share.device for share in shares}:
        return tuple(named.index(share.device) for share in shares)
    return tuple(range(len(shares)))


def _uncounted_pids(
    region: Region | Tampered | None, held: Sequence[_AttributedProcess]
) -> tuple[int, ...]:
    known = region if isinstance(region, Region) else None
    return tuple(
        sorted(
            {
                one.process.pid
                for one in held
                if known is None
                or not (one.origin.inner_pid in known.pids or one.process.pid in known.host_pids)
            }
        )
    )


def _container_violations(use: MeasuredContainer) -> Iterator[Violation]:
    tenant = use.container
    for one in use.shares:
        allowed = one.share.limit_bytes + UNCOUNTED_BYTES * max(1, one.processes)
        if one.measured_bytes > allowed:
            yield _violation(
                tenant,
                ViolationReason.OVERRUN,
                f"uses {one.measured_bytes} bytes of GPU {one.share.device}, and its lease is for "
                f"{one.share.limit_bytes}",
                one.share.device,
            )
    if tenant.place is None or tenant.seed is None:
        return
    match use.region:
        case Tampered(reason):
            yield _violation(
                tenant, ViolationReason.TAMPERED, f"has changed its region file: {reason}"
            )
        case None:
            yield _violation(tenant, ViolationReason.ISOLATION_LOST, "has no region file any more")
        case region:
            changed = altered_limits(region, tenant.seed)
            if changed:
                yield _violation(
                    tenant,
                    ViolationReason.TAMPERED,
                    f"has changed its limits: {'; '.join(changed)}",
                )
            if use.uncounted_pids:
                pids = ", ".join(map(str, use.uncounted_pids[:5]))
                yield _violation(
                    tenant,
                    ViolationReason.ISOLATION_LOST,
                    f"has {len(use.uncounted_pids)} processes on its GPUs that no limit applies to "
                    f"(pids {pids} on the node): they do not load libvgpu.so, because they are "
                    "linked statically or started with another dynamic linker",
                )


def _violation(
    tenant: LeasedContainer, rule: ViolationReason, what: str, device: DeviceUuid | None = None
) -> Violation:
    lease = tenant.lease
    return Violation(
        reason=rule,
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        container=tenant.name,
        device=device,
        message=f"container {tenant.name} {what}",
    )


def _unleased_violations(
    unleased: Iterable[_AttributedProcess], tenants: Sequence[LeasedContainer]
) -> Iterator[Violation]:
    names = {tenant.lease.pod: (tenant.lease.namespace, tenant.lease.name) for tenant in tenants}
    for one in unleased:
        if one.origin.pod is None:
            continue
        namespace, name = (
            (one.pod.namespace, one.pod.name)
            if one.pod
            else names.get(one.origin.pod, (Namespace(""), ""))
        )
        yield Violation(
            reason=ViolationReason.UNLEASED,
            pod=one.origin.pod,
            namespace=namespace,
            name=name,
            container=one.container,
            device=one.device,
            message=f"container {one.container or 'unknown'} uses GPU {one.device} without a lease "
            f"(pid {one.process.pid} on the node): let it ask for a share, or take the GPU from it",
        )
