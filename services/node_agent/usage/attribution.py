"""Attribution of GPU processes to containers; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.node_agent.gpus.device_samples import DeviceSample, GpuProcess
from services.node_agent.kubelet.pods import KubeletPod, ProcessOrigin
from services.node_agent.usage.leased_containers import ContainerKey, LeasedContainer
from shared.model.names import DeviceUuid, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedProcess:
    """A process on a device, with the container it belongs to."""

    process: GpuProcess
    origin: ProcessOrigin
    device: DeviceUuid
    pod: KubeletPod | None
    leased: LeasedContainer | None
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """All processes of the node's devices."""

    leased: tuple[AttributedProcess, ...]
    """Processes whose container leases the device they use."""
    unleased: tuple[AttributedProcess, ...]
    """Processes that use a device without a lease."""
    unattributed: int
    """Processes whose container is not known (yet)."""


def attribute_processes(
    containers: Sequence[LeasedContainer],
    devices: Sequence[DeviceSample],
    origins: Mapping[int, ProcessOrigin],
    pods: Mapping[PodUid, KubeletPod],
) -> Attribution:
    """Find the container of each process; one without an origin has ended and is skipped."""
    by_key = {container.key: container for container in containers}
    names_by_pod: dict[PodUid, list[str]] = {}
    for uid, name in by_key:
        names_by_pod.setdefault(uid, []).append(name)
    leased: list[AttributedProcess] = []
    unleased: list[AttributedProcess] = []
    unattributed = 0
    running = [
        (sample.device, process, origins[process.pid])
        for sample in devices
        for process in sample.processes
        if process.pid in origins
    ]
    for device, process, origin in running:
        pod = pods.get(origin.pod) if origin.pod else None
        container = _container_name(origin, pod, names_by_pod)
        if container is None:
            unattributed += 1
            continue
        found = AttributedProcess(
            process=process,
            origin=origin,
            device=device,
            pod=pod,
            leased=by_key.get((origin.pod, container)) if origin.pod else None,
            container=container,
        )
        holds_lease = found.leased is not None and found.leased.leases_device(device)
        (leased if holds_lease else unleased).append(found)
    return Attribution(leased=tuple(leased), unleased=tuple(unleased), unattributed=unattributed)


def living_pids(
    containers: Iterable[ContainerKey],
    origins: Iterable[ProcessOrigin],
    pods: Mapping[PodUid, KubeletPod],
) -> dict[ContainerKey, frozenset[int]]:
    """Return the PIDs of each container's processes in its own namespace.

    A process whose container is not known counts for each of its pod's.
    """
    names_by_pod: dict[PodUid, list[str]] = {}
    for uid, name in containers:
        names_by_pod.setdefault(uid, []).append(name)
    found: dict[ContainerKey, set[int]] = {
        (uid, name): set() for uid, names in names_by_pod.items() for name in names
    }
    for origin in origins:
        if origin.pod is None or origin.pod not in names_by_pod:
            continue
        own = _container_name(origin, pods.get(origin.pod), names_by_pod)
        for name in names_by_pod[origin.pod] if own is None else (own,):
            found.get((origin.pod, name), set()).add(origin.inner_pid)
    return {key: frozenset(pids) for key, pids in found.items()}


def _container_name(
    origin: ProcessOrigin, pod: KubeletPod | None, leased_names: Mapping[PodUid, Sequence[str]]
) -> str | None:
    """Return the container's name: empty for a process of no pod, None while it is unknown."""
    if origin.pod is None:
        return ""
    if pod is None:
        names: Sequence[str] = leased_names.get(origin.pod, ("",))
    else:
        by_id = pod.container_ids.get(origin.container_id)
        names = [by_id] if by_id else [container.name for container in pod.containers]
    return names[0] if len(names) == 1 else None
