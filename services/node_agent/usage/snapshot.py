"""Usage of a node's devices at one moment; pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.usage.attribution import attribute_processes
from services.node_agent.usage.leased_containers import Scan
from services.node_agent.usage.measurements import MeasuredContainer, measure_container
from services.node_agent.usage.violations import container_violations, unleased_violations
from shared.model.events.node_events import ViolationFound, ViolationKey
from shared.model.names import DeviceUuid


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSnapshot:
    scanned_at: float = 0.0
    scan_s: float = 0.0
    devices: tuple[DeviceSample, ...] = ()
    containers: tuple[MeasuredContainer, ...] = ()
    violations: tuple[ViolationFound, ...] = ()
    unleased: Mapping[DeviceUuid, int] = field(default_factory=dict)
    unattributed: int = 0
    seen_containers: int = 0


def build_snapshot(scan: Scan) -> UsageSnapshot:
    processes = attribute_processes(scan)
    measured = tuple(
        measure_container(
            container,
            [process for process in processes.leased if process.leased is container],
            scan,
        )
        for container in scan.containers
    )
    unleased = processes.unleased if scan.complete else ()
    violations: dict[ViolationKey, ViolationFound] = {}
    for violation in (
        *chain.from_iterable(map(container_violations, measured)),
        *unleased_violations(scan.node, unleased, scan.containers),
    ):
        violations.setdefault(violation.key, violation)
    counts = Counter(process.device for process in unleased)
    return UsageSnapshot(
        scanned_at=scan.scanned_at,
        devices=tuple(scan.devices),
        containers=measured,
        violations=tuple(violations.values()),
        unleased={sample.device: counts[sample.device] for sample in scan.devices},
        unattributed=processes.unattributed,
    )
