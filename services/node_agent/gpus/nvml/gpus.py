"""The GPUs of this machine, as NVML reports them."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from services.node_agent.gpus.device_faults import ROW_REMAP_FAILED, Fault, Xid, no_response
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.kernel_gpus import KernelGpus
from services.node_agent.gpus.nvml import mig, topology
from services.node_agent.gpus.nvml.calls import (
    NOT_AVAILABLE,
    TIMEOUT_S,
    count_gpus,
    if_available,
    index_of,
    memory_of,
    model_of,
    text_of,
    value_or,
    with_nvml,
)
from services.node_agent.gpus.nvml.xid_listener import XidListener
from services.node_agent.gpus.probes import GpuProber
from services.node_agent.gpus.worker_threads import SingleFlight
from services.node_agent.mig.instances import MigInstance
from shared.model.devices.device import UnreadDevice
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

LINKS_REFRESH_S = 300.0
"""How long links between devices are used; reading them takes seconds on large nodes."""
MIB = 1024 * 1024
RESERVED_STEP_MIB = 64
MEMINFO = Path("/proc/meminfo")

T = TypeVar("T")

Links = Mapping[DeviceUuid, Mapping[DeviceUuid, int]]


class NvmlGpus:
    def __init__(self, *, timeout_s: float = TIMEOUT_S, proc: Path | None = None) -> None:
        self.timeout_s = timeout_s
        self.unread: tuple[UnreadDevice, ...] = ()
        self._kernel = None if proc is None else KernelGpus(proc, limit_s=self._limit_s)
        self._prober = GpuProber(count_gpus, _read_gpu, limit_s=self._limit_s)
        self._events = XidListener()
        self._link_calls: SingleFlight[Links] = SingleFlight()
        self._links: Links = {}
        self._links_valid: tuple[frozenset[DeviceUuid], float] | None = None
        """Until when the links of these GPUs count as current."""
        self._mig_calls: SingleFlight[Any] = SingleFlight()

    def _limit_s(self) -> float:
        return self.timeout_s

    async def discover(self) -> tuple[Gpu, ...]:
        """Raises UnavailableError, with a remedy, without a driver that responds."""
        gpus = await self._prober.probe()
        if self._kernel is not None:
            self.unread = await self._kernel.unread(gpus)
        self._events.listen(gpu.uuid for gpu in gpus)
        await self._refresh_links(frozenset(gpu.uuid for gpu in gpus if gpu.fault is None))
        return tuple(replace(gpu, links=self._links.get(gpu.uuid, {})) for gpu in gpus)

    @property
    def unreadable(self) -> Mapping[int, str]:
        return self._prober.unreadable

    async def _refresh_links(self, sound: frozenset[DeviceUuid]) -> None:
        """Errors keep the links."""
        now = asyncio.get_running_loop().time()
        if self._links_valid is not None:
            known_gpus, valid_until = self._links_valid
            if known_gpus == sound and now < valid_until:
                return
        read = functools.partial(topology.links_among, sorted(sound))
        try:
            links = await self._link_calls.call(sound, lambda: with_nvml(read), self._limit_s)
        except UnavailableError as error:
            logger.debug("links between GPUs are unknown: %s", error)
            return
        self._links = {**self._links, **links}
        self._links_valid = (sound, now + LINKS_REFRESH_S)

    def xids(self) -> tuple[Xid, ...]:
        return self._events.drain()

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        return await self._call(device, lambda: mig.instances(device))

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        return await self._call(device, lambda: mig.create_instance(device, profile, start))

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        await self._call(device, lambda: mig.create_compute(device, gi))

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        await self._call(device, lambda: mig.destroy_compute(device, gi, compute))

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        await self._call(device, lambda: mig.destroy_instance(device, gi))

    async def _call(self, device: DeviceUuid, function: Callable[[], T]) -> T:
        result: T = await self._mig_calls.call_next(
            device, lambda: with_nvml(function), self._limit_s
        )
        return result


def _read_gpu(number: int) -> Gpu:
    return with_nvml(lambda: _gpu(number))


def _gpu(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    location = topology.location_of(handle)
    state = mig.state_of(handle)
    memory: Any = if_available(lambda: memory_of(handle), None)
    return Gpu(
        uuid=DeviceUuid(text_of(pynvml.nvmlDeviceGetUUID(handle))),
        index=index_of(handle, number),
        model=model_of(handle),
        memory_mib=_host_memory_mib() if memory is None else int(memory.total) // MIB,
        reserved_mib=_reserved_mib(memory),
        measured=memory is not None,
        fault=_fault_of(handle),
        ecc_errors=value_or(lambda: _uncorrected_ecc_errors(handle), None),
        numa=location.numa,
        pcie=location.root_complex,
        bus=location.address,
        exclusive_process=_compute_mode(handle) != pynvml.NVML_COMPUTEMODE_DEFAULT,
        power_limit_w=value_or(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) // 1000, 0),
        driver=value_or(lambda: text_of(pynvml.nvmlSystemGetDriverVersion()), ""),
        mig=state,
        instances=value_or(lambda: mig.instances_of(handle, state.profiles), ())
        if state is not None and state.enabled
        else (),
    )


def _compute_mode(handle: Any) -> int:
    return value_or(
        lambda: int(pynvml.nvmlDeviceGetComputeMode(handle)), pynvml.NVML_COMPUTEMODE_DEFAULT
    )


def _reserved_mib(memory: Any) -> int:
    """Round up: what the driver reserves varies, and contexts need a few MiB more."""
    reserved, total = (getattr(memory, name, 0) for name in ("reserved", "total"))
    step = RESERVED_STEP_MIB * MIB
    rounded = -(-reserved // step) * RESERVED_STEP_MIB
    return int(rounded) if 0 < rounded < total // MIB else 0


def _host_memory_mib() -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemTotal":
            return int(amount.split()[0]) // 1024
    return 0


def _fault_of(handle: Any) -> Fault | None:
    rows = value_or(lambda: pynvml.nvmlDeviceGetRemappedRows(handle), None)
    if rows is not None and rows[3]:
        return ROW_REMAP_FAILED
    try:
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError as error:
        if error.value not in NOT_AVAILABLE:
            return no_response(f"NVML: {error}")
    return None


def _uncorrected_ecc_errors(handle: Any) -> int:
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    counter = pynvml.NVML_VOLATILE_ECC
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))
