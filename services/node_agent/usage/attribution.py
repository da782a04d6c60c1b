"""Attribution of GPU processes to containers; pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from services.node_agent.gpus.inventory import GpuProcess
from services.node_agent.kubelet.pods import ClaimHolding, KubeletPod, ProcessOrigin
from services.node_agent.usage.leased_containers import ContainerKey, LeasedContainer, Scan
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.claim import device_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedProcess:
    process: GpuProcess
    origin: ProcessOrigin
    device: DeviceUuid
    pod: KubeletPod | None
    leased: LeasedContainer | None
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    leased: tuple[AttributedProcess, ...]
    unleased: tuple[AttributedProcess, ...]
    unattributed: int


def attribute_processes(scan: Scan) -> Attribution:
    """A process without an origin has ended and is skipped.

    A process on a device of which its container has no share uses a ResourceClaim of its pod. If
    several requests have shares of the device, the container's is not known.
    """
    names_by_pod = _by_pod(container.key for container in scan.containers)
    by_pod = _by_pod((uid, container) for container in scan.containers for uid in container.pods)
    leased: list[AttributedProcess] = []
    unleased: list[AttributedProcess] = []
    unattributed = 0
    running = [
        (sample.device, process, scan.origins[process.pid])
        for sample in scan.devices
        for process in sample.processes
        if process.pid in scan.origins
    ]
    for device, process, origin in running:
        pod = scan.pods.get(origin.pod) if origin.pod else None
        container = _container_name(origin, pod, names_by_pod)
        usable = by_pod.get(origin.pod, []) if origin.pod else []
        shares = _shares_of(container, device, usable)
        if container is None or len(shares) > 1:
            unattributed += 1
            continue
        attributed = AttributedProcess(
            process=process,
            origin=origin,
            device=device,
            pod=pod,
            leased=shares[0] if shares else None,
            container=container,
        )
        (leased if shares else unleased).append(attributed)
    return Attribution(
        leased=tuple(leased),
        unleased=_without_access(unleased, scan.claims),
        unattributed=unattributed,
    )


def _without_access(
    processes: Iterable[AttributedProcess], claims: Set[ClaimHolding]
) -> tuple[AttributedProcess, ...]:
    held = {(claim.namespace, claim.pod, claim.device) for claim in claims}
    return tuple(
        process
        for process in processes
        if process.pod is None
        or (process.pod.namespace, process.pod.name, device_name(process.device)) not in held
    )


def _shares_of(
    container: str | None, device: DeviceUuid, usable: Iterable[LeasedContainer]
) -> list[LeasedContainer]:
    holders = [
        container
        for container in usable
        if any(share.device == device for share in container.shares)
    ]
    own = [holder for holder in holders if holder.lease.claim is None and holder.name == container]
    return own or [holder for holder in holders if holder.lease.claim is not None]


def living_pids(
    users: Mapping[ContainerKey, Sequence[PodUid]],
    origins: Iterable[ProcessOrigin],
    pods: Mapping[PodUid, KubeletPod],
) -> dict[ContainerKey, frozenset[int]]:
    """A process of an unknown container counts for each of its pod's.

    Every process counts for all claims of its pod.
    """
    names_by_pod = _by_pod(users)
    by_pod = _by_pod((uid, key) for key, uids in users.items() for uid in uids)
    pids: dict[ContainerKey, set[int]] = {key: set() for key in users}
    for origin in origins:
        if origin.pod is None or origin.pod not in by_pod:
            continue
        own = _container_name(origin, pods.get(origin.pod), names_by_pod)
        for key in by_pod[origin.pod]:
            if own is None or key[0] != origin.pod or key[1] == own:
                pids[key].add(origin.inner_pid)
    return {key: frozenset(living) for key, living in pids.items()}


def _by_pod(pairs: Iterable[tuple[PodUid, T]]) -> dict[PodUid, list[T]]:
    values: dict[PodUid, list[T]] = {}
    for uid, value in pairs:
        values.setdefault(uid, []).append(value)
    return values


def _container_name(
    origin: ProcessOrigin, pod: KubeletPod | None, leased_names: Mapping[PodUid, Sequence[str]]
) -> str | None:
    if origin.pod is None:
        return ""
    if pod is None:
        names: Sequence[str] = leased_names.get(origin.pod, ("",))
    else:
        by_id = pod.container_ids.get(origin.container_id)
        names = [by_id] if by_id else [container.name for container in pod.containers]
    return names[0] if len(names) == 1 else None
