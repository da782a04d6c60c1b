"""NVML, the NVIDIA driver's own account of its GPUs. The only door to `pynvml`.

NVML blocks, and a sick driver blocks for ever: a question runs in a thread of its own, under a time
limit, and no second one is put before the first has come back. A look at one GPU asks nothing of
the others; how they are linked is asked by itself, now and then, of those that have just answered.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pynvml

from services.node_agent.gpus.device_faults import ROW_REMAP_FAILED, Fault, Xid, no_response
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.nvml import mig as nvml_mig
from services.node_agent.gpus.nvml import topology as nvml_topology
from services.node_agent.gpus.nvml.xid_listener import XidListener
from services.node_agent.gpus.probes import GpuProber
from services.node_agent.gpus.worker_threads import SingleFlight, start_in_thread
from services.node_agent.mig.instances import MigInstance
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

TIMEOUT_S = 20.0
LINKS_REFRESH_S = 300.0
"""How often it is asked anew how GPUs are linked."""
MIB = 1024 * 1024
NOT_AVAILABLE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
"""How a driver that works says that it does not tell something: of this model, us, or ever."""

T = TypeVar("T")

Links = Mapping[DeviceUuid, Mapping[DeviceUuid, int]]
"""Scores of pairs."""


class NvmlGpus:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        self._prober = GpuProber(_count_gpus, _read_gpu, limit_s=lambda: TIMEOUT_S)
        self._events = XidListener()
        self._link_calls: SingleFlight[Links] = SingleFlight(pynvml.NVMLError)
        self._links: Links = {}
        self._links_valid: tuple[frozenset[DeviceUuid], float] | None = None
        """Of which GPUs the links are known, and until when they are believed."""
        self._latest_calls: dict[DeviceUuid, asyncio.Future[Any]] = {}
        self._overdue: set[DeviceUuid] = set()
        """Devices that owe an answer for which nobody waits any more."""

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs, with what is wrong with each.

        Raises UnavailableError, saying what to do, while there is no driver or it does not answer.
        """
        found = await self._prober.probe()
        self._events.listen(gpu.uuid for gpu in found)
        await self._refresh_links(frozenset(gpu.uuid for gpu in found if gpu.fault is None))
        return tuple(replace(gpu, links=self._links.get(gpu.uuid, {})) for gpu in found)

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Why GPUs are not among those that were found at last, by the driver's number."""
        return self._prober.unreadable

    async def _refresh_links(self, sound: frozenset[DeviceUuid]) -> None:
        """Ask how GPUs are linked, if others answer than did, or the last answer is old.

        Without an answer they are taken to be linked as they were.
        """
        now = asyncio.get_running_loop().time()
        if (
            self._links_valid is not None
            and self._links_valid[0] == sound
            and now < self._links_valid[1]
        ):
            return
        try:
            links = await self._link_calls.call(
                sound,
                lambda: _initialised(lambda: nvml_topology.links_among(sorted(sound))),
                lambda: TIMEOUT_S,
            )
        except (TimeoutError, pynvml.NVMLError, UnavailableError) as error:
            logger.debug("how GPUs are linked is not told: %s", str(error) or "no answer in time")
            return
        self._links = {**self._links, **links}
        self._links_valid = (sound, now + LINKS_REFRESH_S)

    def xids(self) -> tuple[Xid, ...]:
        """Return the XID events since the last call."""
        return self._events.drain()

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a device in MIG mode."""
        return await self._call(device, lambda: nvml_mig.instances(device))

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Make an instance at a place; return its id."""
        return await self._call(device, lambda: nvml_mig.create_instance(device, profile, start))

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        """Make the compute instance that takes all of an instance."""
        await self._call(device, lambda: nvml_mig.create_compute(device, gi))

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Remove a compute instance."""
        await self._call(device, lambda: nvml_mig.destroy_compute(device, gi, compute))

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Remove an instance without compute instances."""
        await self._call(device, lambda: nvml_mig.destroy_instance(device, gi))

    async def _call(self, device: DeviceUuid, question: Callable[[], T]) -> T:
        """Put a question about one device, after the last one has come back.

        Raises UnavailableError in NVML's words, or if it takes longer than `TIMEOUT_S`; at once
        while a device still owes an answer that took longer.
        """
        last = self._latest_calls.get(device)
        if device in self._overdue and last is not None and not last.done():
            raise _no_response()
        self._overdue.discard(device)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if last is not None and not last.done():
                    await asyncio.wait([last])
                asked = in_own_thread(lambda: _initialised(question))
                self._latest_calls[device] = asked
                return await asyncio.shield(asked)
        except TimeoutError as error:
            self._overdue.add(device)
            raise _no_response() from error
        except pynvml.NVMLError as error:
            raise UnavailableError(f"NVML: {error}") from error


def _no_response() -> UnavailableError:
    return UnavailableError(f"the NVIDIA driver did not answer within {TIMEOUT_S:g} s")


def _initialised(question: Callable[[], T]) -> T:
    pynvml.nvmlInit()
    try:
        return question()
    finally:
        pynvml.nvmlShutdown()


def in_own_thread(question: Callable[[], T]) -> asyncio.Future[T]:
    """Begin; the answer may be an NVMLError."""
    return start_in_thread(question, pynvml.NVMLError)


def _count_gpus() -> int:
    try:
        return int(_initialised(pynvml.nvmlDeviceGetCount))
    except pynvml.NVMLError as error:
        raise UnavailableError(
            f"NVML: {error}. Install the NVIDIA driver on this node and mount its libraries "
            "here, or give --gpus a layout such as 8xA100-80GB to simulate GPUs"
        ) from error


def _read_gpu(number: int) -> Gpu:
    try:
        return _initialised(lambda: _gpu(number))
    except pynvml.NVMLError as error:
        raise UnavailableError(f"NVML: {error}") from error


def _gpu(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    place = nvml_topology.place_of(handle)
    mig = nvml_mig.state_of(handle)
    return Gpu(
        uuid=DeviceUuid(_text(pynvml.nvmlDeviceGetUUID(handle))),
        index=_asked(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), number),
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
        fault=_fault_of(handle),
        ecc_errors=_asked(lambda: _uncorrected_ecc_errors(handle), None),
        numa=place.numa,
        pcie=place.pcie,
        bus=place.bus,
        driver=_asked(lambda: _text(pynvml.nvmlSystemGetDriverVersion()), ""),
        mig=mig,
        instances=_asked(lambda: nvml_mig.instances_of(handle, mig.profiles), ())
        if mig is not None and mig.enabled
        else (),
    )


def _fault_of(handle: Any) -> Fault | None:
    """Return what a lost or broken GPU shows: it does not answer, or its memory is broken."""
    rows = _asked(lambda: pynvml.nvmlDeviceGetRemappedRows(handle), None)
    if rows is not None and rows[3]:
        return ROW_REMAP_FAILED
    try:
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError as error:
        if error.value not in NOT_AVAILABLE:
            return no_response(f"NVML: {error}")
    return None


def _uncorrected_ecc_errors(handle: Any) -> int:
    kind, counter = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or `otherwise` where this model or driver does not know it."""
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return otherwise


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
