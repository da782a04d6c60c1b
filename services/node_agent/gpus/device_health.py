"""The health states of devices, and what a probe changes in them; pure.

A `suspect` device gets no new pod. A `cordoned` one is not probed for a backoff time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from services.node_agent.gpus.device_faults import (
    LISTED_AGAIN,
    NOT_LISTED,
    Fault,
    Xid,
    XidRules,
)
from services.node_agent.gpus.inventory import Gpu
from shared.model.devices.device import DeviceMode
from shared.model.names import DeviceUuid


class HealthState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    CORDONED = "cordoned"
    PROBING = "probing"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    state: HealthState = HealthState.HEALTHY
    since: float = 0.0
    fault: Fault | None = None
    streak: int = 0
    """Of probes: failed while suspect, successful while probing."""
    cordons: int = 0
    probe_at: float = 0.0
    memory_mib: int = 0
    mode: DeviceMode = DeviceMode.HAMI_CORE
    ecc_errors: int | None = None

    @property
    def message(self) -> str:
        return "" if self.fault is None else f"{self.state}: {self.fault}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    first_backoff_s: float = 30.0
    """How long a device that is cordoned for the first time is not probed; it doubles."""
    max_backoff_s: float = 960.0
    """The longest such time."""
    reset_after_s: float = 3600.0
    """After this time in good health, the backoff starts anew."""
    failure_threshold: int = 2
    success_threshold: int = 3

    def next_record(self, record: DeviceHealth, fault: Fault | None, now: float) -> DeviceHealth:
        match record.state:
            case HealthState.HEALTHY:
                return self._healthy(record, fault, now)
            case HealthState.SUSPECT:
                return self._suspect(record, fault, now)
            case HealthState.CORDONED:
                return self._cordoned(record, fault, now)
            case HealthState.PROBING:
                return self._probing(record, fault, now)

    def _healthy(self, record: DeviceHealth, fault: Fault | None, now: float) -> DeviceHealth:
        if record.cordons and now - record.since >= self.reset_after_s:
            record = replace(record, cordons=0)
        if fault is None:
            return record
        if fault.severe or self.failure_threshold <= 1:
            return self._cordon(record, fault, now)
        return replace(record, state=HealthState.SUSPECT, since=now, fault=fault, streak=1)

    def _suspect(self, record: DeviceHealth, fault: Fault | None, now: float) -> DeviceHealth:
        if fault is None:
            return replace(record, state=HealthState.HEALTHY, since=now, fault=None, streak=0)
        if fault.severe or record.streak + 1 >= self.failure_threshold:
            return self._cordon(record, fault, now)
        return replace(record, fault=fault, streak=record.streak + 1)

    def _cordoned(self, record: DeviceHealth, fault: Fault | None, now: float) -> DeviceHealth:
        """A severe fault stays until the device is healthy; of others, the latest one counts."""
        if fault is not None and record.fault is not None and not record.fault.severe:
            record = replace(record, fault=fault)
        if now < record.probe_at:
            return record
        if fault is not None:
            cordons = record.cordons + 1
            return replace(record, cordons=cordons, probe_at=now + self.backoff_s(cordons))
        return replace(record, state=HealthState.PROBING, since=now, streak=0)

    def _probing(self, record: DeviceHealth, fault: Fault | None, now: float) -> DeviceHealth:
        if fault is not None:
            return self._cordon(record, fault, now)
        if record.streak + 1 < self.success_threshold:
            return replace(record, streak=record.streak + 1)
        return replace(record, state=HealthState.HEALTHY, since=now, fault=None, streak=0)

    def _cordon(self, record: DeviceHealth, fault: Fault, now: float) -> DeviceHealth:
        cordons = record.cordons + 1
        return replace(
            record,
            state=HealthState.CORDONED,
            since=now,
            fault=fault,
            streak=0,
            cordons=cordons,
            probe_at=now + self.backoff_s(cordons),
        )

    def backoff_s(self, cordons: int) -> float:
        doublings = min(cordons - 1, 32)
        return min(self.first_backoff_s * 2.0**doublings, self.max_backoff_s)


def update_health(
    records: Mapping[DeviceUuid, DeviceHealth],
    gpus: Iterable[Gpu],
    xids: Iterable[Xid],
    *,
    rules: XidRules,
    policy: HealthPolicy,
    now: float,
    missing_fault: Callable[[DeviceUuid], Fault] = lambda _: NOT_LISTED,
) -> dict[DeviceUuid, DeviceHealth]:
    present = {gpu.uuid: gpu for gpu in gpus}
    xid_faults: dict[DeviceUuid, Fault] = {}
    for xid in xids:
        if rules.is_critical(xid.number):
            xid_faults.setdefault(xid.device, xid.fault)
    return {
        uuid: _probed(records.get(uuid), gpu, xid_faults.get(uuid), policy, now)
        for uuid, gpu in present.items()
    } | {
        uuid: policy.next_record(before, xid_faults.get(uuid) or missing_fault(uuid), now)
        for uuid, before in records.items()
        if uuid not in present
    }


def _probed(
    before: DeviceHealth | None, gpu: Gpu, xid_fault: Fault | None, policy: HealthPolicy, now: float
) -> DeviceHealth:
    fault = xid_fault or gpu.fault
    if before is None:
        before = DeviceHealth(since=now, memory_mib=gpu.usable_mib, mode=gpu.mode)
    health = policy.next_record(before, fault or _change_fault(before, gpu), now)
    if health.fault == NOT_LISTED:
        health = replace(health, fault=LISTED_AGAIN)
    if gpu.fault is not None:
        return health
    ecc_errors = before.ecc_errors if gpu.ecc_errors is None else gpu.ecc_errors
    return replace(health, memory_mib=gpu.usable_mib, mode=gpu.mode, ecc_errors=ecc_errors)


def _change_fault(before: DeviceHealth, gpu: Gpu) -> Fault | None:
    if (
        abs(gpu.usable_mib - before.memory_mib) > gpu.reserved_mib
    ):  # the driver may keep more or less
        text = f"its memory was {before.memory_mib} MiB and is now {gpu.usable_mib} MiB"
        return Fault(code="MemoryChanged", text=text, severe=True)
    if gpu.mode is not before.mode:
        text = f"its mode was {before.mode} and is now {gpu.mode}: it was changed manually"
        return Fault(code="ModeChanged", text=text, severe=True)
    if gpu.ecc_errors is None or before.ecc_errors is None:
        return None
    if gpu.ecc_errors > before.ecc_errors:
        text = f"{gpu.ecc_errors - before.ecc_errors} new uncorrected memory errors"
        return Fault(code="EccErrors", text=text, severe=True)
    return None
