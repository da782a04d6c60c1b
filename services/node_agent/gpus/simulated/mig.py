"""MIG instances of simulated GPUs: NVML's rules, and a file that outlives agents as hardware does.

An instance is refused where slices it needs are taken, so that a device can be fragmented; ids are
given as NVML gives them, by where an instance lies and in no order that would mean anything.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.mig.instances import InstanceProfile, MigInstance
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid

_NAMESPACE = uuid.UUID("3f6a0d52-0d6f-4f0a-9a5e-6c1f6f1d2b10")
_FIRST_ID = {8: 0, 4: 1, 2: 3, 1: 7}
"""Of NVML's instance ids, the first for instances with this many memory slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredInstance:
    """One instance, as the file has it."""

    gi: int
    profile: int
    start: int
    computes: tuple[int, ...]


class SimulatedMig:
    """The instances of all GPUs of one node."""

    def __init__(
        self, file: Path, profiles: Mapping[DeviceUuid, Sequence[InstanceProfile]]
    ) -> None:
        self.file = file
        self.profiles = {
            device: {profile.id: profile for profile in known} for device, known in profiles.items()
        }

    def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """List a device's instances, by id."""
        return tuple(
            self._to_instance(device, kept)
            for kept in sorted(self._load().get(device, ()), key=lambda kept: kept.gi)
        )

    def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Make an instance; return its id. Raises UnavailableError as NVML refuses."""
        state = self._load()
        there = state.get(device, ())
        wanted = self._profile(device, profile)
        self._check_room(device, there, wanted, start)
        gi = _id_of(wanted.memory_slices, start)
        self._save(
            {
                **state,
                device: (*there, _StoredInstance(gi=gi, profile=profile, start=start, computes=())),
            }
        )
        return gi

    def create_compute(self, device: DeviceUuid, gi: int) -> int:
        """Make the compute instance that takes all of an instance; return its id."""
        kept = self._find(device, gi)
        if kept.computes:
            raise UnavailableError("NVML: Insufficient Resources")
        self._replace(device, kept, (0,))
        return 0

    def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Remove a compute instance."""
        kept = self._find(device, gi)
        if compute not in kept.computes:
            raise UnavailableError("NVML: Not Found")
        self._replace(device, kept, tuple(one for one in kept.computes if one != compute))

    def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Remove an instance that has no compute instance any more."""
        kept = self._find(device, gi)
        if kept.computes:
            raise UnavailableError("NVML: In use by another client")
        state = self._load()
        self._save({**state, device: tuple(one for one in state[device] if one != kept)})

    def _check_room(
        self,
        device: DeviceUuid,
        there: Sequence[_StoredInstance],
        wanted: InstanceProfile,
        start: int,
    ) -> None:
        if start not in wanted.starts:
            raise UnavailableError("NVML: Invalid Argument")
        others = [(self._profile(device, kept.profile), kept.start) for kept in there]
        taken = {n for one, first in others for n in range(first, first + one.memory_slices)}
        slices = sum(one.compute_slices for one, _ in others) + wanted.compute_slices
        most = max(one.compute_slices for one in self.profiles[device].values())
        alike = sum(one.id == wanted.id for one, _ in others)
        needed = range(start, start + wanted.memory_slices)
        if taken.intersection(needed) or slices > most or alike >= wanted.count:
            raise UnavailableError("NVML: Insufficient Resources")

    def _to_instance(self, device: DeviceUuid, kept: _StoredInstance) -> MigInstance:
        profile = self._profile(device, kept.profile)
        name = f"{device}/{kept.gi}/{kept.computes[0]}" if len(kept.computes) == 1 else ""
        return MigInstance(
            gi=kept.gi,
            profile=profile.name,
            start=kept.start,
            memory_slices=profile.memory_slices,
            compute_slices=profile.compute_slices,
            compute_ids=kept.computes,
            uuid=f"MIG-{uuid.uuid5(_NAMESPACE, name)}" if name else "",
        )

    def _profile(self, device: DeviceUuid, number: int) -> InstanceProfile:
        found = self.profiles.get(device, {}).get(number)
        if found is None:
            raise UnavailableError("NVML: Not Supported")
        return found

    def _find(self, device: DeviceUuid, gi: int) -> _StoredInstance:
        for kept in self._load().get(device, ()):
            if kept.gi == gi:
                return kept
        raise UnavailableError("NVML: Not Found")

    def _replace(self, device: DeviceUuid, old: _StoredInstance, computes: tuple[int, ...]) -> None:
        state = self._load()
        new = _StoredInstance(gi=old.gi, profile=old.profile, start=old.start, computes=computes)
        changed = tuple(new if one == old else one for one in state[device])
        self._save({**state, device: changed})

    def _load(self) -> dict[DeviceUuid, tuple[_StoredInstance, ...]]:
        try:
            state = json.loads(self.file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RequestError(f"{self.file} is not JSON: {error}") from error
        return {
            DeviceUuid(device): tuple(
                _StoredInstance(gi=gi, profile=profile, start=start, computes=tuple(computes))
                for gi, profile, start, computes in rows
            )
            for device, rows in state.items()
        }

    def _save(self, state: Mapping[DeviceUuid, Sequence[_StoredInstance]]) -> None:
        rows = {
            device: [[kept.gi, kept.profile, kept.start, list(kept.computes)] for kept in there]
            for device, there in state.items()
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps(rows, indent=1))
        draft.replace(self.file)


def _id_of(memory_slices: int, start: int) -> int:
    """Return NVML's id of the instance that lies there: no two at once have the same."""
    number = start // memory_slices
    return _FIRST_ID[memory_slices] + (number * 3 % 7 if memory_slices == 1 else number)
