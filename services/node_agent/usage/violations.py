"""Violations: more memory than leased, altered limits, use without a lease; pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.isolation.region_image import RegionSeed, altered_limits
from services.node_agent.usage.attribution import AttributedProcess
from services.node_agent.usage.leased_containers import LeasedContainer
from services.node_agent.usage.measurements import MeasuredContainer
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

UNCOUNTED_BYTES = 512 << 20
"""Device memory that a process may use beyond HAMi-core's count: its context and its code."""

CORES_NOT_LIMITED = (
    "has a process whose use of the cores HAMi-core does not limit, since it has not found the "
    "process's PID on the node; its memory is limited. Start the processes one after the other, "
    "and hide the container's first device from none, or give the container a MIG instance or a "
    "whole device"
)
"""It has no PIDs, so that it is one Event per container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a container breaks."""

    reason: ViolationReason
    pod: PodUid
    namespace: Namespace
    name: str
    container: str
    device: DeviceUuid | None = None
    claim: bool = False
    """See `ViolationFound.claim`."""
    message: str = field(compare=False)
    """Its numbers may change while the violation is the same."""


def container_violations(use: MeasuredContainer) -> Iterator[Violation]:
    """Return the rules that a container with a lease breaks."""
    yield from _overruns(use)
    seed = use.container.seed
    if use.container.region_path is None or seed is None:
        return
    match use.region:
        case Tampered(reason):
            message = f"has changed its region file: {reason}"
            yield _violation(use.container, ViolationReason.TAMPERED, message)
        case None:
            message = "has lost its region file"
            yield _violation(use.container, ViolationReason.ISOLATION_LOST, message)
        case region:
            yield from _region_violations(use, region, seed)


def _overruns(use: MeasuredContainer) -> Iterator[Violation]:
    for one in use.shares:
        allowed = one.share.limit_bytes + UNCOUNTED_BYTES * max(1, one.processes)
        if one.measured_bytes > allowed:
            yield _violation(
                use.container,
                ViolationReason.OVERRUN,
                f"uses {one.measured_bytes} bytes of GPU {one.share.device}, and its lease allows "
                f"{one.share.limit_bytes} bytes",
                one.share.device,
            )


def _region_violations(
    use: MeasuredContainer, region: Region, seed: RegionSeed
) -> Iterator[Violation]:
    changed = altered_limits(region, seed)
    if changed:
        message = f"has changed its limits: {'; '.join(changed)}"
        yield _violation(use.container, ViolationReason.TAMPERED, message)
    if use.stuck:
        message = (
            f"hangs: {use.stuck}. Processes that start, end or allocate GPU memory wait for it: "
            "restart the container"
        )
        yield _violation(use.container, ViolationReason.STUCK, message)
    if use.uncapped:
        yield _violation(use.container, ViolationReason.CORES_NOT_LIMITED, CORES_NOT_LIMITED)
    if use.lost_pids:
        pids = ", ".join(map(str, use.lost_pids[:5]))
        yield _violation(
            use.container,
            ViolationReason.ISOLATION_LOST,
            f"has {len(use.lost_pids)} processes whose new allocations HAMi-core does not count "
            f"(PIDs {pids} in the container), because another process was killed: restart the "
            "container",
        )
    if use.uncounted_pids:
        pids = ", ".join(map(str, use.uncounted_pids[:5]))
        yield _violation(
            use.container,
            ViolationReason.ISOLATION_LOST,
            f"has {len(use.uncounted_pids)} processes on its GPUs that no limit applies to "
            f"(PIDs {pids} on the node): they do not load libvgpu.so, because they are linked "
            "statically or started with another dynamic linker",
        )


def _violation(
    container: LeasedContainer,
    reason: ViolationReason,
    message: str,
    device: DeviceUuid | None = None,
) -> Violation:
    lease = container.lease
    return Violation(
        reason=reason,
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        container=container.name,
        device=device,
        claim=lease.claim is not None,
        message=f"{container.described} {message}",
    )


def unleased_violations(
    unleased: Iterable[AttributedProcess], containers: Sequence[LeasedContainer]
) -> Iterator[Violation]:
    """Return a violation for each process of a pod that uses a device without a lease."""
    names = {one.lease.pod: (one.lease.namespace, one.lease.name) for one in containers}
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
            f"(PID {one.process.pid} on the node): request a share, or remove the GPU from the "
            "container",
        )


def violation_events(
    violations: Iterable[Violation], node: NodeName, now: float
) -> list[ViolationFound]:
    """Return an event for each violation whose pod's name is known."""
    return [
        ViolationFound(
            node=node,
            pod=one.pod,
            namespace=one.namespace,
            name=one.name,
            container=one.container,
            reason=one.reason,
            message=one.message,
            claim=one.claim,
            found_at=now,
        )
        for one in violations
        if one.name
    ]
