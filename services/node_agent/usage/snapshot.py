"""Usage of one node's devices at one moment; pure."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.isolation.region import Region, Tampered
from services.node_agent.kubelet.pods import ClaimHolding, KubeletPod, ProcessOrigin
from services.node_agent.mig.instances import MigInstance
from services.node_agent.usage.attribution import attribute_processes
from services.node_agent.usage.leased_containers import ContainerKey, LeasedContainer
from services.node_agent.usage.measurements import MeasuredContainer, measure_container
from services.node_agent.usage.violations import (
    Violation,
    container_violations,
    unleased_violations,
)
from shared.model.names import DeviceUuid, PodUid

_NONE_STUCK: Mapping[ContainerKey, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSnapshot:
    """The result of one scan."""

    scanned_at: float = 0.0
    scan_s: float = 0.0
    """Duration of the scan."""
    devices: tuple[DeviceSample, ...] = ()
    containers: tuple[MeasuredContainer, ...] = ()
    violations: tuple[Violation, ...] = ()
    unleased: Mapping[DeviceUuid, int] = field(default_factory=dict)
    """Number of processes without a lease on each device."""
    unattributed: int = 0
    """Number of processes whose container is not known (yet)."""


def build_snapshot(
    containers: Sequence[LeasedContainer],
    regions: Mapping[ContainerKey, Region | Tampered | None],
    devices: Sequence[DeviceSample],
    origins: Mapping[int, ProcessOrigin],
    pods: Mapping[PodUid, KubeletPod],
    *,
    complete: bool,
    scanned_at: float = 0.0,
    instances: Mapping[str, MigInstance] | None = None,
    living: Mapping[ContainerKey, Set[int]] | None = None,
    stuck: Mapping[ContainerKey, str] = _NONE_STUCK,
    uncapped: Set[ContainerKey] = frozenset(),
    claims: Set[ClaimHolding] = frozenset(),
) -> UsageSnapshot:
    """Combine what regions, driver, /proc and kubelet show.

    `instances` are MIG instances by UUID, `living` the PIDs of each container's processes in its
    own namespace, `stuck` why processes of a container hang, `uncapped` the containers with a
    process whose cores are not limited. `origins` has no entry for processes
    that ended since the driver listed them. Unless `complete`, there may be more leases than those
    of `containers`, so no process is reported as unleased.
    """
    processes = attribute_processes(containers, devices, origins, pods, claims)
    sampled = {sample.device for sample in devices}
    measured = tuple(
        measure_container(
            container,
            regions.get(container.key),
            [one for one in processes.leased if one.leased is container],
            sampled,
            instances or {},
            living=None if living is None else living.get(container.key, frozenset()),
            stuck=stuck.get(container.key, ""),
            uncapped=container.key in uncapped,
        )
        for container in containers
    )
    violations = [violation for use in measured for violation in container_violations(use)]
    unleased = processes.unleased if complete else ()
    violations += unleased_violations(unleased, containers)
    counts = Counter(one.device for one in unleased)
    return UsageSnapshot(
        scanned_at=scanned_at,
        devices=tuple(devices),
        containers=measured,
        violations=tuple(dict.fromkeys(violations)),
        unleased={sample.device: counts[sample.device] for sample in devices},
        unattributed=processes.unattributed,
    )
