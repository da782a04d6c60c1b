"""The health of devices as a life cycle: what a look at a GPU shows, and what follows; pure.

A device is known by its UUID alone. `healthy` devices are offered. A `suspect` one has shown
something that may have been a hiccup: no new pod is placed on it, pods that are on their way may
still start. A `cordoned` one has left the kubelet's list, and the owners of its leases are told; it
is left in peace for a while, twice as long each time. Then it is `probing`: some looks in a row at
which nothing is wrong make it healthy again, by itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from services.node_agent.gpus.device_faults import NOT_LISTED, Fault, Xid, XidRules
from services.node_agent.gpus.inventory import Gpu
from shared.model.device import DeviceMode
from shared.model.names import DeviceUuid


class HealthState(StrEnum):
    """Where a device stands."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    CORDONED = "cordoned"
    PROBING = "probing"


TRANSITIONS: Mapping[HealthState, frozenset[HealthState]] = {
    HealthState.HEALTHY: frozenset({HealthState.SUSPECT, HealthState.CORDONED}),
    HealthState.SUSPECT: frozenset({HealthState.HEALTHY, HealthState.CORDONED}),
    HealthState.CORDONED: frozenset({HealthState.PROBING}),
    HealthState.PROBING: frozenset({HealthState.HEALTHY, HealthState.CORDONED}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """How patient the life cycle is."""

    first_backoff_s: float = 30.0
    """How long a device that is cordoned for the first time is left in peace."""
    max_backoff_s: float = 960.0
    reset_after_s: float = 3600.0
    """A device that stayed healthy for so long is sick for the first time again."""
    failure_threshold: int = 2
    """So many looks in a row at which something is wrong are no hiccup."""
    success_threshold: int = 3
    """So many in a row at which nothing is wrong make a device healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRecord:
    """What is known of one device's health."""

    state: HealthState = HealthState.HEALTHY
    since: float = 0.0
    """When it came to be so, on a clock that only goes on."""
    fault: Fault | None = None
    """Why it is not healthy."""
    streak: int = 0
    """Bad ones in a row of a suspect, clean ones of a device that is probed."""
    cordons: int = 0
    """How often it was cordoned since it was last steady."""
    probe_at: float = 0.0
    """Until then it is left in peace, if it is cordoned."""

    @property
    def message(self) -> str:
        """Return what is wrong in words; empty: nothing."""
        return "" if self.fault is None else f"{self.state}: {self.fault}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBaseline:
    """What a device looked like when it was last there; a change of it is a fault."""

    memory_mib: int
    mode: DeviceMode
    ecc_errors: int | None
    """The last figure that was told; None: none ever was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """One device."""

    record: HealthRecord
    baseline: DeviceBaseline


def next_record(
    record: HealthRecord, fault: Fault | None, policy: HealthPolicy, now: float
) -> HealthRecord:
    """Return what follows from one look, at which `fault` was wrong, or nothing."""
    match record.state:
        case HealthState.HEALTHY:
            return _healthy(record, fault, policy, now)
        case HealthState.SUSPECT:
            return _suspect(record, fault, policy, now)
        case HealthState.CORDONED:
            return _cordoned(record, fault, policy, now)
        case HealthState.PROBING:
            return _probing(record, fault, policy, now)


def _healthy(
    record: HealthRecord, fault: Fault | None, policy: HealthPolicy, now: float
) -> HealthRecord:
    if record.cordons and now - record.since >= policy.reset_after_s:
        record = replace(record, cordons=0)
    if fault is None:
        return record
    if fault.severe or policy.failure_threshold <= 1:
        return _cordon(record, fault, policy, now)
    return replace(record, state=HealthState.SUSPECT, since=now, fault=fault, streak=1)


def _suspect(
    record: HealthRecord, fault: Fault | None, policy: HealthPolicy, now: float
) -> HealthRecord:
    if fault is None:
        return replace(record, state=HealthState.HEALTHY, since=now, fault=None, streak=0)
    if fault.severe or record.streak + 1 >= policy.failure_threshold:
        return _cordon(record, fault, policy, now)
    return replace(record, streak=record.streak + 1)


def _cordoned(
    record: HealthRecord, fault: Fault | None, policy: HealthPolicy, now: float
) -> HealthRecord:
    """Leave it in peace until its time has come; if something is wrong then, longer."""
    if now < record.probe_at:
        return record
    if fault is not None:
        cordons = record.cordons + 1
        return replace(record, cordons=cordons, probe_at=now + backoff_s(cordons, policy))
    return replace(record, state=HealthState.PROBING, since=now, streak=0)


def _probing(
    record: HealthRecord, fault: Fault | None, policy: HealthPolicy, now: float
) -> HealthRecord:
    if fault is not None:
        return _cordon(record, fault, policy, now)
    if record.streak + 1 < policy.success_threshold:
        return replace(record, streak=record.streak + 1)
    return replace(record, state=HealthState.HEALTHY, since=now, fault=None, streak=0)


def _cordon(record: HealthRecord, fault: Fault, policy: HealthPolicy, now: float) -> HealthRecord:
    cordons = record.cordons + 1
    return HealthRecord(
        state=HealthState.CORDONED,
        since=now,
        fault=fault,
        cordons=cordons,
        probe_at=now + backoff_s(cordons, policy),
    )


def backoff_s(cordons: int, policy: HealthPolicy) -> float:
    """Return how long a device is left in peace that is cordoned for this time in a row."""
    doublings = min(cordons - 1, 32)
    return min(policy.first_backoff_s * 2.0**doublings, policy.max_backoff_s)


def probe_results(
    known: Mapping[DeviceUuid, DeviceHealth],
    gpus: Iterable[Gpu],
    xids: Iterable[Xid],
    *,
    rules: XidRules,
    policy: HealthPolicy,
    now: float,
    driver_fault: Fault | None = None,
) -> dict[DeviceUuid, DeviceHealth]:
    """Return all devices after one look, those included that were not found at it.

    With `silence` nothing could be found, for that reason.
    """
    found = {gpu.uuid: gpu for gpu in gpus}
    events = [xid for xid in xids if rules.is_critical(xid.number)]
    after: dict[DeviceUuid, DeviceHealth] = {}
    for uuid in known.keys() | found.keys():
        gpu, before = found.get(uuid), known.get(uuid)
        struck = next((xid.fault for xid in events if xid.device == uuid), None)
        if gpu is not None:
            fault = struck or gpu.fault or (_change_fault(before.baseline, gpu) if before else None)
            sight = _baseline(gpu, before.baseline if before else None)
        elif before is not None:
            fault, sight = struck or driver_fault or NOT_LISTED, before.baseline
        record = before.record if before else HealthRecord(since=now)
        after[uuid] = DeviceHealth(record=next_record(record, fault, policy, now), baseline=sight)
    return after


def _baseline(gpu: Gpu, before: DeviceBaseline | None) -> DeviceBaseline:
    """Return what a GPU looks like; one that does not answer looks as it did."""
    if gpu.fault is not None and before is not None:
        return before
    told = gpu.ecc_errors
    if told is None and before is not None:
        told = before.ecc_errors
    return DeviceBaseline(memory_mib=gpu.memory_mib, mode=gpu.mode, ecc_errors=told)


def _change_fault(before: DeviceBaseline, gpu: Gpu) -> Fault | None:
    """Return what is not as it was: whoever holds leases was promised something else."""
    if gpu.memory_mib != before.memory_mib:
        text = f"its memory was {before.memory_mib} MiB and is {gpu.memory_mib} MiB now"
        return Fault("MemoryChanged", text, severe=True)
    if gpu.mode is not before.mode:
        text = f"its mode was {before.mode} and is {gpu.mode} now: somebody changed it by hand"
        return Fault("ModeChanged", text, severe=True)
    if gpu.ecc_errors is None or before.ecc_errors is None:
        return None
    if gpu.ecc_errors > before.ecc_errors:
        text = f"{gpu.ecc_errors - before.ecc_errors} uncorrected memory errors more"
        return Fault("EccErrors", text, severe=True)
    return None
