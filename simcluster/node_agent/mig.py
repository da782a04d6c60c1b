"""MIG instances of simulated GPUs, by NVML's rules, in a file that outlives the agent.

An instance is refused if slices that it needs are in use, so a device can be fragmented. IDs are
assigned as by NVML: by the position of an instance, in no meaningful order.
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
"""The first of NVML's instance IDs, by number of memory slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredInstance:
    """One instance, as it is in the file."""

    gi: int
    profile: int
    start: int
    computes: tuple[int, ...]


class SimulatedMig:
    """The instances of all GPUs of one node."""

    def __init__(
        self,
        file: Path,
        profiles: Mapping[DeviceUuid, Sequence[InstanceProfile]],
    ) -> None:
        self.file = file
        self.profiles = {
            device: {profile.id: profile for profile in device_profiles}
            for device, device_profiles in profiles.items()
        }

    def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return a device's instances in the order of their IDs."""
        return tuple(
            self._to_instance(device, stored)
            for stored in sorted(self._load().get(device, ()), key=lambda stored: stored.gi)
        )

    def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Create an instance; return its ID. Raises UnavailableError with NVML's error."""
        state = self._load()
        existing = state.get(device, ())
        wanted = self._profile(device, profile)
        self._check_room(device, existing, wanted, start)
        gi = _id_of(wanted.memory_slices, start)
        created = _StoredInstance(gi=gi, profile=profile, start=start, computes=())
        self._save({**state, device: (*existing, created)})
        return gi

    def create_compute(self, device: DeviceUuid, gi: int) -> int:
        """Create the compute instance that fills a GPU instance; return its ID."""
        stored = self._find(device, gi)
        if stored.computes:
            raise UnavailableError("NVML: Insufficient Resources")
        self._replace(device, stored, (0,))
        return 0

    def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Destroy a compute instance."""
        stored = self._find(device, gi)
        if compute not in stored.computes:
            raise UnavailableError("NVML: Not Found")
        self._replace(
            device,
            stored,
            tuple(other_compute for other_compute in stored.computes if other_compute != compute),
        )

    def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Destroy a GPU instance that has no compute instances."""
        stored = self._find(device, gi)
        if stored.computes:
            raise UnavailableError("NVML: In use by another client")
        state = self._load()
        self._save(
            {**state, device: tuple(instance for instance in state[device] if instance != stored)}
        )

    def _check_room(
        self,
        device: DeviceUuid,
        existing: Sequence[_StoredInstance],
        wanted: InstanceProfile,
        start: int,
    ) -> None:
        if start not in wanted.starts:
            raise UnavailableError("NVML: Invalid Argument")
        others = [(self._profile(device, stored.profile), stored.start) for stored in existing]
        taken = {
            n for instance, first in others for n in range(first, first + instance.memory_slices)
        }
        slices = sum(instance.compute_slices for instance, _ in others) + wanted.compute_slices
        max_slices = max(profile.compute_slices for profile in self.profiles[device].values())
        same_profile = sum(instance.id == wanted.id for instance, _ in others)
        needed = range(start, start + wanted.memory_slices)
        if taken.intersection(needed) or slices > max_slices or same_profile >= wanted.count:
            raise UnavailableError("NVML: Insufficient Resources")

    def _to_instance(self, device: DeviceUuid, stored: _StoredInstance) -> MigInstance:
        profile = self._profile(device, stored.profile)
        name = f"{device}/{stored.gi}/{stored.computes[0]}" if len(stored.computes) == 1 else ""
        return MigInstance(
            gi=stored.gi,
            profile=profile.name,
            start=stored.start,
            memory_slices=profile.memory_slices,
            compute_slices=profile.compute_slices,
            compute_ids=stored.computes,
            uuid=f"MIG-{uuid.uuid5(_NAMESPACE, name)}" if name else "",
        )

    def _profile(self, device: DeviceUuid, number: int) -> InstanceProfile:
        profile = self.profiles.get(device, {}).get(number)
        if profile is None:
            raise UnavailableError("NVML: Not Supported")
        return profile

    def _find(self, device: DeviceUuid, gi: int) -> _StoredInstance:
        for stored in self._load().get(device, ()):
            if stored.gi == gi:
                return stored
        raise UnavailableError("NVML: Not Found")

    def _replace(self, device: DeviceUuid, old: _StoredInstance, computes: tuple[int, ...]) -> None:
        state = self._load()
        new = _StoredInstance(gi=old.gi, profile=old.profile, start=old.start, computes=computes)
        changed = tuple(new if instance == old else instance for instance in state[device])
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
            device: [
                [stored.gi, stored.profile, stored.start, list(stored.computes)]
                for stored in existing
            ]
            for device, existing in state.items()
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps(rows, indent=1))
        draft.replace(self.file)


def _id_of(memory_slices: int, start: int) -> int:
    """Return NVML's ID of the instance at this position; no two at once have the same."""
    number = start // memory_slices
    return _FIRST_ID[memory_slices] + (number * 3 % 7 if memory_slices == 1 else number)
