"""Simulated GPUs: a layout, stable UUIDs, MIG, and faults read from a file."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.node_agent.gpus.device_faults import Fault, Xid
from services.node_agent.gpus.inventory import DeviceSample, Gpu
from services.node_agent.gpus.probes import GpuProber
from services.node_agent.mig.gpu_models import GPU_MODELS, GpuModel
from services.node_agent.mig.instances import MigInstance, MigState
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, NodeName
from simcluster.node_agent.mig import SimulatedMig

UNHEALTHY = "unhealthy"
HANG = "hang"
VANISH = "vanish"
MODE_FLIP = "mode-flip"
_XID = re.compile(r"xid-(\d+)")
_MEMORY = re.compile(r"memory-(\d+)")
_UUID = "GPU-"
DRIVER = "simulated"
"""Reported as the driver's version."""
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
"""In this order: it is unhealthy; NVML hangs; does not list it; reports its MIG mode inverted;
creating an instance fails; creating a compute instance fails; no instance is created although NVML
reports success; creating an instance hangs; processes use all instances. Besides these: `xid-79`,
such an event at each probe, `memory-8192`, its memory in MiB from now on, and a UUID, which it
reports instead of its own."""
HANG_LIMIT_S = 1.0
"""Time limit of a probe while a simulated GPU is to hang."""
LIMIT_S = 20.0
"""Time limit otherwise, as for real GPUs."""
HANG_POLL_S = 0.05
_NAMESPACE = uuid.UUID("0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11")
_LAYOUT_PART = re.compile(r"(\d+)x(.+?)(:mig)?")
_MISSING_INSTANCE_ID = 99
"""The ID that NVML returns for an instance that it has not created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """One GPU of a layout."""

    model: GpuModel
    mig: bool = False
    """MIG mode is on."""


def parse_layout(text: str) -> tuple[SimulatedGpu, ...]:
    """Read `8xA100-80GB`, `4xT4+2xA10` or `4xA100-40GB:mig`, one entry per GPU in order.

    Raises RequestError naming the invalid part and the known models.
    """
    return tuple(gpu for part in text.split("+") for gpu in _parse_part(part.strip()))


def _parse_part(part: str) -> Iterator[SimulatedGpu]:
    match = _LAYOUT_PART.fullmatch(part)
    profile = GPU_MODELS.get(match[2]) if match else None
    if match is None or profile is None or not 1 <= int(match[1]) <= 64:
        raise RequestError(
            f"{part!r} is not a GPU layout: write COUNTxMODEL, such as 8xA100-80GB or 4xT4+2xA10 "
            "(or 4xA100-40GB:mig for GPUs in MIG mode), with a count of 1 to 64 and a model of "
            f"{', '.join(GPU_MODELS)}"
        )
    if match[3] and not profile.mig:
        able = ", ".join(name for name, one in GPU_MODELS.items() if one.mig)
        raise RequestError(f"{part!r}: {match[2]} does not support MIG; {able} do")
    yield from [SimulatedGpu(model=profile, mig=bool(match[3]))] * int(match[1])


def uuid_of(node: NodeName, index: int) -> DeviceUuid:
    """Return the UUID of a node's simulated GPU, the same after every start."""
    return DeviceUuid(f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}")


class SimulatedGpus:
    """A GPU driver without hardware. The fault file maps a UUID or an index to one of `FAULTS`."""

    def __init__(
        self,
        node: NodeName,
        layout: str,
        fault_file: Path | None = None,
        mig_file: Path | None = None,
        *,
        hang_limit_s: float = HANG_LIMIT_S,
        on_instances: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.node = node
        self.gpus = parse_layout(layout)
        self.uuids = [uuid_of(node, index) for index in range(len(self.gpus))]
        self.fault_file = fault_file
        self.hang_limit_s = hang_limit_s
        self._last_faults: dict[str, str] = {}
        self._prober = GpuProber(self._count, self._read_gpu, limit_s=self._limit_s)
        self.mig = SimulatedMig(
            mig_file or Path("simulated-mig.json"),
            {
                name: gpu.model.mig
                for name, gpu in zip(self.uuids, self.gpus, strict=True)
                if gpu.mig
            },
            on_change=on_instances,
        )

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises RequestError if the fault file is invalid."""
        return await self._prober.probe()

    @property
    def unreadable(self) -> Mapping[int, str]:
        """By index, why the latest probe could not read a GPU."""
        return self._prober.unreadable

    def xids(self) -> tuple[Xid, ...]:
        """Return an event of each GPU that had one in the fault file at the last probe."""
        if not self._last_faults:
            return ()
        return tuple(
            Xid(name, int(match[1]))
            for index, name in enumerate(self.uuids)
            if (match := _XID.fullmatch(self._fault_named(self._last_faults, index)))
        )

    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        """Return the instances of a GPU in MIG mode."""
        return await asyncio.to_thread(self._instances, device)

    async def create_instance(self, device: DeviceUuid, profile: int, start: int) -> int:
        """Create a GPU instance at a memory slice; return its ID."""
        fault = await self._fault(device)
        if fault == CREATE_HANGS:
            await asyncio.Event().wait()
        if fault == CREATE_FAILS:
            raise UnavailableError("NVML: Unknown Error")
        if fault == CREATE_NOTHING:
            return _MISSING_INSTANCE_ID
        return await asyncio.to_thread(self.mig.create_instance, device, profile, start)

    async def create_compute(self, device: DeviceUuid, gi: int) -> None:
        """Create the compute instance that fills a GPU instance."""
        if gi == _MISSING_INSTANCE_ID:
            return
        if await self._fault(device) == COMPUTE_FAILS:
            raise UnavailableError("NVML: Insufficient Resources")
        await asyncio.to_thread(self.mig.create_compute, device, gi)

    async def destroy_compute(self, device: DeviceUuid, gi: int, compute: int) -> None:
        """Destroy a compute instance; NVML refuses if a process uses it."""
        if await self._fault(device) == BUSY:
            raise UnavailableError("NVML: In use by another client")
        await asyncio.to_thread(self.mig.destroy_compute, device, gi, compute)

    async def destroy_instance(self, device: DeviceUuid, gi: int) -> None:
        """Destroy a GPU instance that has no compute instances."""
        await asyncio.to_thread(self.mig.destroy_instance, device, gi)

    def _limit_s(self) -> float:
        return self.hang_limit_s if HANG in self._last_faults.values() else LIMIT_S

    def _count(self) -> int:
        self._faults()
        return len(self.gpus)

    def _read_gpu(self, index: int) -> Gpu | None:
        name, gpu = self.uuids[index], self.gpus[index]
        while (fault := self._fault_named(self._last_faults, index)) == HANG:
            time.sleep(HANG_POLL_S)
            self._faults()
        if fault == VANISH:
            return None
        memory = _MEMORY.fullmatch(fault)
        return Gpu(
            uuid=DeviceUuid(fault) if fault.startswith(_UUID) else name,
            index=index,
            model=gpu.model.product,
            memory_mib=int(memory[1]) if memory else gpu.model.memory_mib,
            fault=Fault(code="Unhealthy", text="set in the fault file", severe=True)
            if fault == UNHEALTHY
            else None,
            driver=DRIVER,
            mig=_mig_state(gpu, flipped=fault == MODE_FLIP),
            instances=self._instances(name) if gpu.mig and fault != MODE_FLIP else (),
        )

    def _fault_named(self, faults: dict[str, str], index: int) -> str:
        return faults.get(self.uuids[index]) or faults.get(str(index), "")

    def _instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        busy = self._fault_of(device) == BUSY
        return tuple(replace(one, busy=busy) for one in self.mig.instances(device))

    async def _fault(self, device: DeviceUuid) -> str:
        return await asyncio.to_thread(self._fault_of, device)

    def _fault_of(self, device: DeviceUuid) -> str:
        return self._fault_named(self._faults(), self.uuids.index(device))

    def _faults(self) -> dict[str, str]:
        """Return the faults in the file; an empty one is being written: it counts as unchanged."""
        if self.fault_file is None:
            return {}
        try:
            text = self.fault_file.read_text()
            faults = json.loads(text) if text else self._last_faults
        except FileNotFoundError:
            faults = {}
        except ValueError as error:
            raise RequestError(f"{self.fault_file} is not JSON: {error}") from error
        if not isinstance(faults, dict):
            raise RequestError(
                f'{self.fault_file} must be an object such as {{"0": "{UNHEALTHY}"}}'
            )
        self._last_faults = {str(device): str(state) for device, state in faults.items()}
        return self._last_faults


class NoUsage:
    """Usage of simulated GPUs: no process ever runs on them."""

    def __init__(self, discover: Callable[[], Awaitable[tuple[Gpu, ...]]]) -> None:
        self.discover = discover

    async def sample(self) -> tuple[DeviceSample, ...]:
        """Return the devices, idle."""
        return tuple(
            DeviceSample(
                device=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                busy_percent=0,
                memory_busy_percent=0,
            )
            for gpu in await self.discover()
        )


def _mig_state(gpu: SimulatedGpu, *, flipped: bool) -> MigState | None:
    if not gpu.model.mig:
        return None
    mig = gpu.mig is not flipped
    return MigState(enabled=mig, pending=mig, profiles=gpu.model.mig if mig else ())
