"""NVML's limits on the memory of cgroups, from R615 on."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from services.node_agent.gpus.memory_limits import TOO_OLD, LimitError, LimitFault, MemoryLimit
from services.node_agent.gpus.nvml.calls import TIMEOUT_S, with_nvml
from services.node_agent.gpus.worker_threads import SingleFlight
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid

T = TypeVar("T")
BATCH = 64

FAULTS = {
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (LimitFault.TOO_OLD, TOO_OLD),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (LimitFault.NOT_SUPPORTED, "it does not support limits there"),
    pynvml.NVML_ERROR_NOT_FOUND: (
        LimitFault.NO_CGROUP,
        "the cgroup does not exist, or has no files of the controller dmem",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        LimitFault.NOT_PERMITTED,
        "it needs CAP_SYS_ADMIN outside any user namespace",
    ),
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (LimitFault.REFUSED, "it refuses the limit"),
    pynvml.NVML_ERROR_UNKNOWN: (LimitFault.REFUSED, "it refuses the limit"),
}
"""NVML's reference names no error for a limit below the use: the last two may be that."""


class NvmlMemoryLimits:
    """One call at a time for each GPU; hard limits only.

    A soft limit would raise the protection of all cgroups above, which stays when the cgroup is
    removed. NVML stays initialised: a GPU that is torn down while no process has it open may lose
    its limits.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._calls: SingleFlight[Any] = SingleFlight()
        self._is_held = False

    async def set(self, device: DeviceUuid, cgroup: Path, hard_bytes: int) -> None:
        """Raises RequestError for a GPU that has no such limits, LimitError, or UnavailableError.

        Read it back: with `dmem`, a limit below the use is ignored.
        """
        await self._call(device, lambda: _set(device, cgroup, hard_bytes))

    async def get(self, device: DeviceUuid, cgroup: Path) -> MemoryLimit:
        return await self._call(device, lambda: _get(device, cgroup))

    async def list(
        self, device: DeviceUuid, cgroups: Sequence[Path]
    ) -> dict[Path, MemoryLimit | None]:
        """None is no limit.

        Cgroups that were removed meanwhile are left out, and those that the driver refuses, as for
        the length of a name that a container has made.
        """
        limits: dict[Path, MemoryLimit | None] = {}
        for first in range(0, len(cgroups), BATCH):
            batch = cgroups[first : first + BATCH]
            limits |= await self._call(device, functools.partial(_list, device, batch))
        return limits

    async def _call(self, device: DeviceUuid, function: Callable[[], T]) -> T:
        call = functools.partial(with_nvml, lambda: self._checked(function))
        result: T = await self._calls.call_next(device, call, lambda: self.timeout_s)
        return result

    def _checked(self, function: Callable[[], T]) -> T:
        if not self._is_held:
            pynvml.nvmlInit()
            self._is_held = True
        return function()


def _set(device: DeviceUuid, cgroup: Path, hard_bytes: int) -> None:
    limits = pynvml.c_nvmlSetMemoryLimits_v1_t()
    limits.nameSpace = os.fsencode(cgroup)
    limits.softLimit = 0
    limits.hardLimit = hard_bytes
    handle = _handle(device)
    _translated(cgroup, lambda: pynvml.nvmlDeviceSetMemoryLimits_v1(handle, limits))


def _get(device: DeviceUuid, cgroup: Path) -> MemoryLimit:
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
    limits.nameSpace = os.fsencode(cgroup)
    handle = _handle(device)
    _translated(cgroup, lambda: pynvml.nvmlDeviceGetMemoryLimits_v1(handle, limits))
    return MemoryLimit(
        hard_bytes=int(limits.hardLimit),
        soft_bytes=int(limits.softLimit),
        used_bytes=int(limits.currentUsed),
    )


def _list(device: DeviceUuid, cgroups: Iterable[Path]) -> dict[Path, MemoryLimit | None]:
    limits: dict[Path, MemoryLimit | None] = {}
    for cgroup in cgroups:
        try:
            limits[cgroup] = _get(device, cgroup)
        except LimitError as error:
            if error.fault is LimitFault.NOT_SUPPORTED:  # misc: there is none up to the root
                limits[cgroup] = None
            elif error.fault not in {LimitFault.NO_CGROUP, LimitFault.REFUSED}:
                raise
    return limits


def _handle(device: DeviceUuid) -> Any:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device)
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotFound as error:
        raise RequestError(f"device {device} is not on this node") from error
    except pynvml.NVMLError_NotSupported:
        return handle
    if current == pynvml.NVML_DEVICE_MIG_ENABLE:
        raise RequestError(f"device {device} is in MIG mode: its instances hold memory themselves")
    return handle


def _translated(cgroup: Path, function: Callable[[], None]) -> None:
    try:
        function()
    except pynvml.NVMLError as error:
        fault, text = FAULTS.get(error.value, (None, ""))
        if fault is None:
            raise
        where = "" if fault is LimitFault.TOO_OLD else f" for {cgroup} ({error})"
        raise LimitError(fault, f"{text}{where}") from error
