"""Usage of one node's devices at one moment; pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.usage.attribution import attribute_processes
from services.node_agent.usage.leased_containers import Scan
from services.node_agent.usage.measurements import MeasuredContainer, measure_container
from services.node_agent.usage.violations import (
    Violation,
    container_violations,
    unleased_violations,
)
from shared.model.names import DeviceUuid


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSnapshot:
    """The result of one scan."""

    scanned_at: float = 0.0
    scan_s: float = 0.0
    devices: tuple[DeviceSample, ...] = ()
    containers: tuple[MeasuredContainer, ...] = ()
    violations: tuple[Violation, ...] = ()
    unleased: Mapping[DeviceUuid, int] = field(default_factory=dict)
    """Number of processes without a lease on each device."""
    unattributed: int = 0
    """Number of processes whose container is not known (yet)."""


def build_snapshot(scan: Scan) -> UsageSnapshot:
    """Return what a scan shows of each container, and the rules that are broken."""
    processes = attribute_processes(scan)
    measured = tuple(
        measure_container(
            container, [one for one in processes.leased if one.leased is container], scan
        )
        for container in scan.containers
    )
    violations = [violation for use in measured for violation in container_violations(use)]
    unleased = processes.unleased if scan.complete else ()
    violations += unleased_violations(unleased, scan.containers)
    counts = Counter(one.device for one in unleased)
    return UsageSnapshot(
        scanned_at=scan.scanned_at,
        devices=tuple(scan.devices),
        containers=measured,
        violations=tuple(dict.fromkeys(violations)),
        unleased={sample.device: counts[sample.device] for sample in scan.devices},
        unattributed=processes.unattributed,
    )
