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

from services.node_agent.gpus.device_faults import GONE, Fault, Xid, XidRules
from services.node_agent.gpus.inventory import Gpu
from shared.model.device import DeviceMode
from shared.model.names import DeviceUuid


class Health(StrEnum):
    """Where a device stands."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    CORDONED = "cordoned"
    PROBING = "probing"


TRANSITIONS: Mapping[Health, frozenset[Health]] = {
    Health.HEALTHY: frozenset({Health.SUSPECT, Health.CORDONED}),
    Health.SUSPECT: frozenset({Health.HEALTHY, Health.CORDONED}),
    Health.CORDONED: frozenset({Health.PROBING}),
    Health.PROBING: frozenset({Health.HEALTHY, Health.CORDONED}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How patient the life cycle is."""

    first_s: float = 30.0
    """How long a device that is cordoned for the first time is left in peace."""
    longest_s: float = 960.0
    steady_s: float = 3600.0
    """A device that stayed healthy for so long is sick for the first time again."""
    bad_looks: int = 2
    """So many looks in a row at which something is wrong are no hiccup."""
    clean_looks: int = 3
    """So many in a row at which nothing is wrong make a device healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of one device's health."""

    state: Health = Health.HEALTHY
    since: float = 0.0
    """When it came to be so, on a clock that only goes on."""
    fault: Fault | None = None
    """Why it is not healthy."""
    looks: int = 0
    """Bad ones in a row of a suspect, clean ones of a device that is probed."""
    cordons: int = 0
    """How often it was cordoned since it was last steady."""
    probe_at: float = 0.0
    """Until then it is left in peace, if it is cordoned."""

    @property
    def said(self) -> str:
        """Return what is wrong in words; empty: nothing."""
        return "" if self.fault is None else f"{self.state}: {self.fault}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a device looked like when it was last there; a change of it is a fault."""

    memory_mib: int
    mode: DeviceMode
    ecc_errors: int | None
    """The last figure that was told; None: none ever was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """One device."""

    record: Record
    sight: Sight


def step(record: Record, fault: Fault | None, policy: Policy, now: float) -> Record:
    """Return what follows from one look, at which `fault` was wrong, or nothing."""
    match record.state:
        case Health.HEALTHY:
            return _healthy(record, fault, policy, now)
        case Health.SUSPECT:
            return _suspect(record, fault, policy, now)
        case Health.CORDONED:
            return _cordoned(record, fault, policy, now)
        case Health.PROBING:
            return _probing(record, fault, policy, now)


def _healthy(record: Record, fault: Fault | None, policy: Policy, now: float) -> Record:
    if record.cordons and now - record.since >= policy.steady_s:
        record = replace(record, cordons=0)
    if fault is None:
        return record
    if fault.grave or policy.bad_looks <= 1:
        return _cordon(record, fault, policy, now)
    return replace(record, state=Health.SUSPECT, since=now, fault=fault, looks=1)


def _suspect(record: Record, fault: Fault | None, policy: Policy, now: float) -> Record:
    if fault is None:
        return replace(record, state=Health.HEALTHY, since=now, fault=None, looks=0)
    if fault.grave or record.looks + 1 >= policy.bad_looks:
        return _cordon(record, fault, policy, now)
    return replace(record, looks=record.looks + 1)


def _cordoned(record: Record, fault: Fault | None, policy: Policy, now: float) -> Record:
    """Leave it in peace until its time has come; if something is wrong then, longer."""
    if now < record.probe_at:
        return record
    if fault is not None:
        cordons = record.cordons + 1
        return replace(record, cordons=cordons, probe_at=now + pause_s(cordons, policy))
    return replace(record, state=Health.PROBING, since=now, looks=0)


def _probing(record: Record, fault: Fault | None, policy: Policy, now: float) -> Record:
    if fault is not None:
        return _cordon(record, fault, policy, now)
    if record.looks + 1 < policy.clean_looks:
        return replace(record, looks=record.looks + 1)
    return replace(record, state=Health.HEALTHY, since=now, fault=None, looks=0)


def _cordon(record: Record, fault: Fault, policy: Policy, now: float) -> Record:
    cordons = record.cordons + 1
    return Record(
        state=Health.CORDONED,
        since=now,
        fault=fault,
        cordons=cordons,
        probe_at=now + pause_s(cordons, policy),
    )


def pause_s(cordons: int, policy: Policy) -> float:
    """Return how long a device is left in peace that is cordoned for this time in a row."""
    doublings = min(cordons - 1, 32)
    return min(policy.first_s * 2.0**doublings, policy.longest_s)


def examine(
    patients: Mapping[DeviceUuid, Patient],
    gpus: Iterable[Gpu],
    xids: Iterable[Xid],
    *,
    rules: XidRules,
    policy: Policy,
    now: float,
    silence: Fault | None = None,
) -> dict[DeviceUuid, Patient]:
    """Return all devices after one look, those included that were not found at it.

    With `silence` nothing could be found, for that reason.
    """
    found = {gpu.uuid: gpu for gpu in gpus}
    events = [xid for xid in xids if rules.condemns(xid.number)]
    after: dict[DeviceUuid, Patient] = {}
    for uuid in patients.keys() | found.keys():
        gpu, before = found.get(uuid), patients.get(uuid)
        struck = next((xid.fault for xid in events if xid.device == uuid), None)
        if gpu is not None:
            fault = struck or gpu.fault or (_changed(before.sight, gpu) if before else None)
            sight = _sight(gpu, before.sight if before else None)
        elif before is not None:
            fault, sight = struck or silence or GONE, before.sight
        record = before.record if before else Record(since=now)
        after[uuid] = Patient(record=step(record, fault, policy, now), sight=sight)
    return after


def _sight(gpu: Gpu, before: Sight | None) -> Sight:
    """Return what a GPU looks like; one that does not answer looks as it did."""
    if gpu.fault is not None and before is not None:
        return before
    told = gpu.ecc_errors
    if told is None and before is not None:
        told = before.ecc_errors
    return Sight(memory_mib=gpu.memory_mib, mode=gpu.mode, ecc_errors=told)


def _changed(before: Sight, gpu: Gpu) -> Fault | None:
    """Return what is not as it was: whoever holds leases was promised something else."""
    if gpu.memory_mib != before.memory_mib:
        text = f"its memory was {before.memory_mib} MiB and is {gpu.memory_mib} MiB now"
        return Fault("MemoryChanged", text, grave=True)
    if gpu.mode is not before.mode:
        text = f"its mode was {before.mode} and is {gpu.mode} now: somebody changed it by hand"
        return Fault("ModeChanged", text, grave=True)
    if gpu.ecc_errors is None or before.ecc_errors is None:
        return None
    if gpu.ecc_errors > before.ecc_errors:
        text = f"{gpu.ecc_errors - before.ecc_errors} uncorrected memory errors more"
        return Fault("EccErrors", text, grave=True)
    return None
