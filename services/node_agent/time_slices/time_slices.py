"""Keeps the time slices of GPUs as long as leases ask for.

The driver forgets their length when the node reboots, so a new agent sets it again.
"""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from services.node_agent.files import replace_file
from services.node_agent.node import Node
from services.node_agent.time_slices.slice_setter import (
    NO_PARTITIONER,
    SetTimeSlices,
)
from shared.model.devices.device import DeviceMode
from shared.model.devices.time_slices import DEFAULT, Interval
from shared.model.errors import UNDECODABLE, LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
"""Interval of looks for GPUs whose leases ask for another length than was set."""


class TimeSlices:
    def __init__(self, node: Node, set_slices: SetTimeSlices | None, file: Path) -> None:
        self.node = node
        self.set_slices = set_slices
        """None if nothing may set them."""
        self.file = file
        self._changed: frozenset[DeviceUuid] | None = None
        """GPUs whose slices may have another length than the default; None until the file is
        read."""
        self._set: dict[DeviceUuid, Interval] = {}
        self._faults: dict[DeviceUuid, str] = {}
        self._locks = WeakValueDictionary[DeviceUuid, asyncio.Lock]()
        self._writing = asyncio.Lock()

    async def ensure(self, devices: Iterable[DeviceUuid]) -> None:
        """Raises UnavailableError or RequestError, with what to do, if the length is not set."""
        for device in devices:
            if not await self._is_set(device):
                async with self._locks.setdefault(device, asyncio.Lock()):
                    await self._set_wanted(device)

    async def settle(self) -> None:
        concerned = await self._read_changed() | self._wanted().keys()
        for device in self.node.devices:
            if device.uuid not in concerned or device.mode is DeviceMode.MIG:
                continue
            try:
                await self.ensure((device.uuid,))
            except LeaseholdError as error:
                self._report(device.uuid, str(error))
            else:
                self._faults.pop(device.uuid, None)

    def _report(self, device: DeviceUuid, fault: str) -> None:
        if self._faults.get(device) != fault:
            text = f"time slices of GPU {device} have another length than its leases ask for"
            logger.warning("%s: %s", text, fault)
            self.node.config_errors.append(f"{text}: {fault}")
            self.node.report_due.set()
        self._faults[device] = fault

    def _wanted(self) -> dict[DeviceUuid, Interval]:
        """The leases of a GPU agree."""
        return {
            device: interval
            for entry in self.node.checkpoint.entries
            for device, interval in entry.lease.time_slices.items()
        }

    async def _is_set(self, device: DeviceUuid) -> bool:
        wanted = self._wanted().get(device, DEFAULT)
        if wanted == DEFAULT and device not in await self._read_changed():
            return True
        return self._set.get(device) == wanted

    async def _set_wanted(self, device: DeviceUuid) -> None:
        if await self._is_set(device):  # meanwhile
            return
        if self.set_slices is None:
            raise UnavailableError(f"time slices of GPU {device} cannot be set: {NO_PARTITIONER}")
        wanted = self._wanted().get(device, DEFAULT)
        await self._note(device, is_changed=True)  # before, so that a next agent sets it back
        self._set.pop(device, None)
        await self.set_slices(device, wanted)
        self._set[device] = wanted
        logger.info("time slices of GPU %s have the length %s", device, wanted)
        if wanted == DEFAULT:
            await self._note(device, is_changed=False)

    async def _note(self, device: DeviceUuid, *, is_changed: bool) -> None:
        changed = await self._read_changed()
        if (device in changed) is is_changed:
            return
        async with self._writing:
            changed = self._changed or frozenset()  # others may have been noted meanwhile
            kept = changed | {device} if is_changed else changed - {device}
            try:
                await asyncio.to_thread(replace_file, self.file, msgspec.json.encode(sorted(kept)))
            except OSError as error:
                raise UnavailableError(f"{self.file}: {error.strerror}") from error
            self._changed = kept

    async def _read_changed(self) -> frozenset[DeviceUuid]:
        async with self._writing:
            if self._changed is None:
                self._changed = await asyncio.to_thread(self._load)
            return self._changed

    def _load(self) -> frozenset[DeviceUuid]:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=frozenset[DeviceUuid])
        except FileNotFoundError:
            return frozenset()
        except (OSError, *UNDECODABLE) as error:
            logger.warning(
                "%s is not used: which GPUs have time slices of another length is not known: %s",
                self.file,
                error,
            )
            return frozenset()
