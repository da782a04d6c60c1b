"""GPUs for a machine that has none: a layout, stable UUIDs, MIG, and faults read from a file."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.node_agent.gpus.device_faults import Fault, Xid
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.probes import GpuProber
from services.node_agent.gpus.simulated.mig import SimulatedMig
from services.node_agent.gpus.simulated.models import GPU_MODELS, GpuModel
from services.node_agent.mig.instances import MigInstance, MigState
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, NodeName

UNHEALTHY = "unhealthy"
HANG = "hang"
VANISH = "vanish"
MODE_FLIP = "mode-flip"
_XID = re.compile(r"xid-(\d+)")
_MEMORY = re.compile(r"memory-(\d+)")
DRIVER = "simulated"
"""What stands where the driver's version does."""
CREATE_FAILS = "create-fails"
COMPUTE_FAILS = "compute-fails"
CREATE_NOTHING = "create-nothing"
CREATE_HANGS = "create-hangs"
BUSY = "busy"
FAULTS = (
    UNHEALTHY,
    HANG,
    VANISH,
    MODE_FLIP,
    CREATE_FAILS,
    COMPUTE_FAILS,
    CREATE_NOTHING,
    CREATE_HANGS,
    BUSY,
)
"""Sick; NVML does not come back, does not list it, says that MIG is on where it was off; no
instance is made, no compute instance is, none is although NVML says so, NVML does not come back
from making one; processes use all instances. Besides `xid-79`, such an event at each look, and
`memory-8192`, its memory in MiB from now on."""
LIMIT_S = 1.0
"""So long simulated GPUs may take to answer while one of them is to hang."""
SLOW_S = 20.0
"""And so long otherwise, as real ones may: it is the machine that is slow then, and not a GPU."""
HANGING_S = 0.05
_NAMESPACE = uuid.UUID("0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11")
_LAYOUT_PART = re.compile(r"(\d+)x(.+?)(:mig)?")
_MISSING_INSTANCE_ID = 99
"""An id that NVML gives for an instance it has not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """One GPU of a layout."""

    model: GpuModel
    mig: bool = False
    """MIG mode is on."""


def parse_layout(text: str) -> tuple[SimulatedGpu, ...]:
    """Read `8xA100-80GB`, `4xT4+2xA10` or `4xA100-40GB:mig`, one entry per GPU in order.

    Raises RequestError naming the part that is none, and the models there are.
    """
    return tuple(gpu for part in text.split("+") for gpu in _parse_part(part.strip()))


def _parse_part(part: str) -> Iterator[SimulatedGpu]:
    match = _LAYOUT_PART.fullmatch(part)
    profile = GPU_MODELS.get(match[2]) if match else None
    if match is None or profile is None or not 1 <= int(match[1]) <= 64:
        raise RequestError(
            f"{part!r} is no GPU layout: write COUNTxMODEL, such as 8xA100-80GB or 4xT4+2xA10 (or "
            f"4xA100-40GB:mig for GPUs in MIG mode), with a count of 1 to 64 and a model of "
            f"{', '.join(GPU_MODELS)}"
        )
    if match[3] and not profile.mig:
        able = ", ".join(name for name, one in GPU_MODELS.items() if one.mig)
        raise RequestError(f"{part!r}: {match[2]} has no MIG mode; {able} have")
    yield from [SimulatedGpu(model=profile, mig=bool(match[3]))] * int(match[1])


def uuid_of(node: NodeName, index: int) -> DeviceUuid:
    """Return the UUID of a node's simulated GPU, the same at every start."""
    return DeviceUuid(f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}")


class SimulatedGpus:
    """Behind the same door as NVML. The fault file maps a UUID or an index to one of `FAULTS`."""

    def __init__(
        self,
        node: NodeName,
        layout: str,
        fault_file: Path | None = None,
        mig_file: Path | None = None,
    ) -> None:
        self.node = node
        self.gpus = parse_layout(layout)
        self.fault_file = fault_file
        self._prober = GpuProber(self._count, self._read_gpu, limit_s=self._limit_s)
        self.mig = SimulatedMig(
            mig_file or Path("simulated-mig.json"),
            {uuid_of(node, index): gpu.model.mig for index, gpu in enumerate(self.gpus) if gpu.mig},
        )

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises RequestError if the fault file is not what it should be."""
        return await self._prober.probe()

    @property
    def unreadable(self) -> Mapping[int, str]:
        """Why GPUs are not among those that were found at last, by number."""
        return self._prober.unreadable

    def xids(self) -> tuple[Xid, ...]:
        """Return an event of each GPU that the fault file says has some."""
        try:
            faults = self._faults()
        except RequestError:  # said at the next look
            return ()
        return tuple(
            Xid(name, int(match[1]))
            for index in range(len(self.gpus))
            if (match := _XID.fullmatch(self._named(faults, index)))
            and (name := uuid_of(self.node, index))
        )

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a GPU in MIG mode."""
        return await asyncio.to_thread(self._instances, device)

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Make an instance at a place; return its id."""
        fault = await self._fault(device)
        if fault == CREATE_HANGS:
            await asyncio.Event().wait()
        if fault == CREATE_FAILS:
            raise UnavailableError("NVML: Unknown Error")
        if fault == CREATE_NOTHING:
            return _MISSING_INSTANCE_ID
        return await asyncio.to_thread(self.mig.create_instance, device, profile, start)

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        """Make the compute instance that takes all of an instance."""
        if gi == _MISSING_INSTANCE_ID:
            return
        if await self._fault(device) == COMPUTE_FAILS:
            raise UnavailableError("NVML: Insufficient Resources")
        await asyncio.to_thread(self.mig.create_compute, device, gi)

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Remove a compute instance; NVML refuses if a process uses it."""
        if await self._fault(device) == BUSY:
            raise UnavailableError("NVML: In use by another client")
        await asyncio.to_thread(self.mig.destroy_compute, device, gi, compute)

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Remove an instance without compute instances."""
        await asyncio.to_thread(self.mig.destroy_instance, device, gi)

    def _limit_s(self) -> float:
        return LIMIT_S if HANG in self._faults().values() else SLOW_S

    def _count(self) -> int:
        self._faults()
        return len(self.gpus)

    def _read_gpu(self, index: int) -> Gpu | None:
        name, gpu = uuid_of(self.node, index), self.gpus[index]
        while (fault := self._named(self._faults(), index)) == HANG:
            time.sleep(HANGING_S)
        if fault == VANISH:
            return None
        memory = _MEMORY.fullmatch(fault)
        return Gpu(
            uuid=name,
            index=index,
            model=gpu.model.product,
            memory_mib=int(memory[1]) if memory else gpu.model.memory_mib,
            fault=Fault("Unhealthy", "the fault file says so", severe=True)
            if fault == UNHEALTHY
            else None,
            driver=DRIVER,
            mig=_mig_state(gpu, flipped=fault == MODE_FLIP),
            instances=self._instances(name) if gpu.mig and fault != MODE_FLIP else (),
        )

    def _named(self, faults: dict[str, str], index: int) -> str:
        return faults.get(uuid_of(self.node, index)) or faults.get(str(index), "")

    def _instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        busy = self._fault_of(device) == BUSY
        return tuple(replace(one, busy=busy) for one in self.mig.instances(device))

    async def _fault(self, device: DeviceUuid) -> str:
        return await asyncio.to_thread(self._fault_of, device)

    def _fault_of(self, device: DeviceUuid) -> str:
        names = [uuid_of(self.node, index) for index in range(len(self.gpus))]
        return self._named(self._faults(), names.index(device))

    def _faults(self) -> dict[str, str]:
        if self.fault_file is None:
            return {}
        try:
            faults = json.loads(self.fault_file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RequestError(f"{self.fault_file} is not JSON: {error}") from error
        if not isinstance(faults, dict):
            raise RequestError(f'{self.fault_file} must look like {{"0": "{UNHEALTHY}"}}')
        return {str(device): str(state) for device, state in faults.items()}


def _mig_state(gpu: SimulatedGpu, *, flipped: bool) -> MigState | None:
    if not gpu.model.mig:
        return None
    mig = gpu.mig is not flipped
    return MigState(enabled=mig, pending=mig, profiles=gpu.model.mig if mig else ())
