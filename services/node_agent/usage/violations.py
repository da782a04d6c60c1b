"""Violations: more memory than leased, altered limits, use without a lease; pure."""

from collections.abc import Iterable, Iterator, Sequence

from services.node_agent.isolation.region import InvalidRegion
from services.node_agent.usage.attribution import AttributedProcess
from services.node_agent.usage.leased_containers import LeasedContainer
from services.node_agent.usage.measurements import MeasuredContainer
from shared.model.devices.device import MIB
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.names import DeviceUuid, Namespace, NodeName

UNCOUNTED_BYTES = 512 << 20
"""Device memory that a process may use beyond HAMi-core's count: its context and its code."""

CORES_NOT_LIMITED = (
    "has a process whose use of the cores HAMi-core does not limit, since neither it nor the node "
    "agent has found the process's PID on the node; its memory is limited. Start the processes "
    "one after the other, each with the container's first GPU visible, or request a MIG instance "
    "or a whole GPU"
)
"""Without PIDs, so that it is one Event per container."""

_BrokenRule = tuple[ViolationReason, str, DeviceUuid | None]


def container_violations(use: MeasuredContainer) -> Iterator[ViolationFound]:
    container = use.container
    lease = use.container.lease
    for reason, message, device in (*overruns(use), *_region_rules(use)):
        yield ViolationFound(
            node=lease.node,
            reason=reason,
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=container.name,
            device=device,
            claim=lease.claim is not None,
            message=f"{container.described} {message}",
        )


def overruns(use: MeasuredContainer) -> Iterator[_BrokenRule]:
    for share in use.shares:
        device = share.share.device
        limit = share.share.limit_bytes
        if share.measured_bytes > limit + UNCOUNTED_BYTES * max(1, share.processes):
            used = f"uses {share.measured_bytes // MIB} MiB of GPU {device}"
            yield ViolationReason.OVERRUN, f"{used}, and its share has {limit // MIB} MiB", device


def _region_rules(use: MeasuredContainer) -> Iterator[_BrokenRule]:
    if use.container.region_path is None:
        return
    if use.region is None:
        yield ViolationReason.ISOLATION_LOST, "has lost the file with its GPU limits", None
        return
    if isinstance(use.region, InvalidRegion):
        message = f"has changed the file with its GPU limits: {use.region.reason}"
        yield ViolationReason.TAMPERED, message, None
        return
    if use.altered:
        message = f"has changed its GPU limits: {'; '.join(use.altered)}"
        yield ViolationReason.TAMPERED, message, None
    if use.stuck:
        message = (
            f"hangs: {use.stuck}. Processes that start, end or allocate GPU memory wait for it: "
            "restart the container"
        )
        yield ViolationReason.STUCK, message, None
    if use.uncapped:
        yield ViolationReason.CORES_NOT_LIMITED, CORES_NOT_LIMITED, None
    if use.lost_pids:
        message = (
            f"has processes whose new allocations HAMi-core does not count "
            f"({_some(use.lost_pids)} in the container), because another process was killed: "
            "restart the container"
        )
        yield ViolationReason.ISOLATION_LOST, message, None
    if use.uncounted_pids:
        message = (
            f"has processes on its GPUs that no limit applies to "
            f"({_some(use.uncounted_pids)} on the node): they do not load libvgpu.so, because "
            "they are linked statically or started with another dynamic linker"
        )
        yield ViolationReason.ISOLATION_LOST, message, None


def _some(pids: Sequence[int]) -> str:
    more = f" and {len(pids) - 5} more" if len(pids) > 5 else ""
    return f"PIDs {', '.join(map(str, pids[:5]))}{more}"


def unleased_violations(
    node: NodeName, unleased: Iterable[AttributedProcess], containers: Iterable[LeasedContainer]
) -> Iterator[ViolationFound]:
    names = {
        container.lease.pod: (container.lease.namespace, container.lease.name)
        for container in containers
    }
    for process in unleased:
        if process.origin.pod is None:
            continue
        namespace, name = (
            (process.pod.namespace, process.pod.name)
            if process.pod
            else names.get(process.origin.pod, (Namespace(""), ""))
        )
        yield ViolationFound(
            node=node,
            reason=ViolationReason.UNLEASED,
            pod=process.origin.pod,
            namespace=namespace,
            name=name,
            container=process.container,
            device=process.device,
            message=f"container {process.container or 'unknown'} uses GPU {process.device} without "
            f"a lease (PID {process.process.pid} on the node): request a share, or remove the GPU "
            "from the container",
        )
