"""Steers containers that share a GPU's time."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from services.node_agent.compute_time.time_files import write_time_limits
from services.node_agent.compute_time.time_layouts import TimeLimit, TimeUse
from services.node_agent.compute_time.time_shares import (
    JudgedPeriod,
    TimeShare,
    allowed_percents,
    need_measurement,
)
from services.node_agent.enforcers.compute_time import (
    ComputeTime,
    limits_path,
    priority_of,
    time_limits,
    written_use,
)
from services.node_agent.gpus.driver import SampleDevices
from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.kubelet.cgroups import read_origin
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.clock import until_tick
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.names import DeviceUuid, PodUid

STEER_S = 0.5
"""NVML's periods are shorter; with measurements every 2 s the correction is unstable."""
IDLE_S = 5.0
"""While no container has its cores held by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    entry: CheckpointEntry
    limit: TimeLimit
    use: TimeUse

    @property
    def share(self) -> TimeShare:
        return TimeShare(percent=self.limit.percent, use=self.use, priority=priority_of(self.entry))

    @property
    def key(self) -> "PartKey":
        return (*self.entry.key, self.limit.device)


PartKey = tuple[PodUid, str, str, DeviceUuid]
BusyPods = Mapping[tuple[DeviceUuid, PodUid], int]
"""Percent of the device's time, by NVML."""


class TimeSteering:
    def __init__(
        self,
        node: Node,
        enforcer: ComputeTime,
        policy: str,
        *,
        sample: SampleDevices,
        proc: Path = Path("/proc"),
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.node = node
        self.enforcer = enforcer
        self.policy = policy
        self.sample = sample
        self.proc = proc
        self.now_ns = now_ns
        """`CLOCK_MONOTONIC`, as the library has it."""
        self._parts: tuple[TimePart, ...] = ()
        self._periods: dict[PartKey, JudgedPeriod] = {}
        self._overcharges: dict[PartKey, ViolationFound] = {}

    async def run(self) -> None:
        while True:
            await self.steer()
            await self.node.clock.sleep(until_tick(STEER_S if self._parts else IDLE_S))

    async def steer(self) -> None:
        """The driver may hang, so it is not queried while the records are locked."""
        contended = _contended(self._parts, self.now_ns())
        busy = await self._busy_pods(contended) if contended else {}
        pods = {entry.key[0] for entry in self.node.checkpoint.entries if limits_path(entry)}
        if not (pods or self._parts):
            return
        async with self.node.checkpoint.changing.hold_free(pods) as held:
            entries = [entry for entry in self.node.checkpoint.entries if limits_path(entry)]
            self._parts = await asyncio.to_thread(self._steer, entries, contended, busy, held)
        self.enforcer.overcharges = tuple(self._overcharges.values())

    async def _busy_pods(self, devices: Iterable[DeviceUuid]) -> BusyPods:
        try:
            samples = await self.sample()
        except UnavailableError:  # the usage monitor reports it
            return {}
        of_devices = [sample for sample in samples if sample.device in set(devices)]
        return await asyncio.to_thread(self._attribute, of_devices)

    def _attribute(self, samples: Sequence[DeviceSample]) -> BusyPods:
        busy: dict[tuple[DeviceUuid, PodUid], int] = defaultdict(int)
        for sample in samples:
            for process in sample.processes:
                origin = read_origin(process.pid, self.proc, reported_at_s=sample.sampled_at_s)
                if origin is not None and origin.pod is not None:
                    busy[sample.device, origin.pod] += process.busy_percent or 0
        return busy

    def _steer(
        self,
        entries: Sequence[CheckpointEntry],
        contended: Sequence[DeviceUuid],
        busy: BusyPods,
        held: Set[PodUid],
    ) -> tuple[TimePart, ...]:
        earlier = {part.key: part for part in self._parts}
        now_ns = self.now_ns()
        parts = [
            TimePart(entry=entry, limit=limit, use=use)
            for entry in entries
            for limit, use in zip(time_limits(entry), written_use(entry), strict=False)
        ]
        # Nothing is known while the driver does not respond.
        measured = _measured(parts, earlier, contended, busy) if busy else {}
        allowed = self._allowed(parts, now_ns)
        steered = []
        for part in parts:
            before = earlier[part.key].limit if part.key in earlier else part.limit
            percent = measured.get(part.key)
            limit = replace(
                part.limit,
                allowed=allowed[part.key],
                measured=before.measured if percent is None else percent,
                measured_at=before.measured_at if percent is None else now_ns,
            )
            steered.append(replace(part, limit=limit))
        for entry in [entry for entry in entries if entry.key[0] in held]:
            limits = [part.limit for part in steered if part.entry.key == entry.key]
            path = limits_path(entry)
            if path is not None and path.is_file():  # otherwise the audit reports it
                _write(path, limits)
        self._judge(steered, now_ns)
        return tuple(steered)

    def _allowed(self, parts: Sequence[TimePart], now_ns: int) -> dict[PartKey, int]:
        allowed: dict[PartKey, int] = {}
        for on_device in _by_device(parts).values():
            shares = [part.share for part in on_device]
            percents = allowed_percents(shares, self.policy, now_ns)
            allowed |= {
                part.key: percent for part, percent in zip(on_device, percents, strict=True)
            }
        return allowed

    def _judge(self, parts: Sequence[TimePart], now_ns: int) -> None:
        periods: dict[PartKey, JudgedPeriod] = {}
        for part in parts:
            period = self._periods.get(part.key)
            if period is not None and not period.is_over(now_ns):
                allowed = max(period.allowed, part.limit.allowed)
                periods[part.key] = replace(period, allowed=allowed)
                continue
            self._overcharges.pop(part.key, None)
            if period is not None and (text := period.overcharge(part.use, now_ns)):
                self._overcharges[part.key] = self._violation(part, text)
            periods[part.key] = JudgedPeriod(
                began_ns=now_ns, charged_ns=part.use.charged_ns, allowed=part.limit.allowed
            )
        self._periods = periods
        self._overcharges = {
            key: overcharge for key, overcharge in self._overcharges.items() if key in periods
        }

    def _violation(self, part: TimePart, text: str) -> ViolationFound:
        allocation = part.entry.allocation
        is_claim = part.entry.lease.claim is not None
        kind = "request" if is_claim else "container"
        return ViolationFound(
            node=self.node.name,
            reason=ViolationReason.CORES_NOT_LIMITED,
            pod=allocation.pod,
            namespace=allocation.namespace,
            name=allocation.name,
            container=allocation.container,
            device=part.limit.device,
            claim=is_claim,
            message=(
                f"{kind} {allocation.container}: {text}: it changes the file in which it counts "
                "its GPU time, or its kernels take longer than they did when they were measured"
            ),
        )


def _write(path: Path, limits: Sequence[TimeLimit]) -> None:
    try:
        write_time_limits(path, limits)
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error


def _by_device(parts: Iterable[TimePart]) -> dict[DeviceUuid, list[TimePart]]:
    by_device: dict[DeviceUuid, list[TimePart]] = defaultdict(list)
    for part in parts:
        by_device[part.limit.device].append(part)
    return by_device


def _contended(parts: Iterable[TimePart], now_ns: int) -> tuple[DeviceUuid, ...]:
    return tuple(
        device
        for device, on_device in _by_device(parts).items()
        if need_measurement([part.share for part in on_device], now_ns)
    )


def _measured(
    parts: Iterable[TimePart],
    earlier: Mapping[PartKey, TimePart],
    contended: Sequence[DeviceUuid],
    busy: BusyPods,
) -> dict[PartKey, int]:
    """A pod's containers divide what NVML measured as they were charged."""
    measured: dict[PartKey, int] = {}
    for device, on_device in _by_device(parts).items():
        if device not in contended:
            continue
        charged = {
            part.key: max(0, part.use.charged_ns - earlier[part.key].use.charged_ns)
            for part in on_device
            if part.key in earlier
        }
        by_pods: dict[tuple[PodUid, ...], list[TimePart]] = defaultdict(list)
        for part in on_device:
            if part.key in charged:
                by_pods[tuple(part.entry.lease.users)].append(part)
        for pods, of_pods in by_pods.items():
            percent = sum(busy.get((device, pod), 0) for pod in pods)
            total = sum(charged[part.key] for part in of_pods)
            for part in of_pods:
                own = charged[part.key] / total if total else 1 / len(of_pods)
                measured[part.key] = min(100, round(percent * own))
    return measured
