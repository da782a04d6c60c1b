"""Simulated GPUs: a layout, stable UUIDs, MIG, and faults read from a file."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.node_agent.gpus.device_faults import Fault, Xid
from services.node_agent.gpus.inventory import DeviceSample, Gpu
from services.node_agent.gpus.probes import GpuProber
from services.node_agent.mig.gpu_models import GPU_MODELS, GpuModel
from services.node_agent.mig.instances import MigInstance, MigState
from shared.model.devices.device import TEMPERATURE, UNNAMED, Hardware, UnreadDevice
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import MIB
from shared.model.names import DeviceUuid, NodeName
from simcluster.node_agent.mig import SimulatedMig

UNHEALTHY = "unhealthy"
HANG = "hang"
HANG_UNNAMED = "hang-unnamed"
"""Like `hang`, and the driver has not initialised the GPU: it lists it without its UUID."""
HANGS = frozenset({HANG, HANG_UNNAMED})
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
HOT = "hot"
DRIVER_FAULTS = (
    UNHEALTHY,
    HANG,
    VANISH,
    CREATE_FAILS,
    COMPUTE_FAILS,
    CREATE_NOTHING,
    CREATE_HANGS,
    BUSY,
    HOT,
)
"""Faults that the driver in C knows by name, in this order: a GPU is unhealthy; NVML hangs; does
not list it; creating an instance fails; creating a compute instance fails; no instance is created
although NVML reports success; creating an instance hangs; processes use all instances; its
temperature slows it down. Besides these: `mode-flip`, its MIG mode inverted; `xid-79`, such an
event at each probe; `memory-8192`, its memory in MiB from now on; and a UUID, which it reports
instead of its own."""
HANG_LIMIT_S = 1.0
"""Time limit of a probe while a simulated GPU is to hang."""
LIMIT_S = 20.0
"""Time limit otherwise, as for real GPUs."""
HANG_POLL_S = 0.05
_NAMESPACE = uuid.UUID("0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11")
_LAYOUT_PART = re.compile(r"(\d+)x(.+?)(?:@(\d{1,3}))?(:mig)?")
_MISSING_INSTANCE_ID = 99
"""The ID that NVML returns for an instance that it has not created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """One GPU of a layout."""

    model: GpuModel
    mig: bool = False
    """MIG mode is on."""
    numa: int | None = None


def parse_layout(text: str) -> tuple[SimulatedGpu, ...]:
    """Read `8xA100-80GB`, `2xT4@0+2xT4@1` or `4xA100-40GB:mig`, one entry per GPU in order.

    Raises RequestError naming the invalid part and the known models.
    """
    return tuple(gpu for part in text.split("+") for gpu in _parse_part(part.strip()))


def _parse_part(part: str) -> Iterator[SimulatedGpu]:
    match = _LAYOUT_PART.fullmatch(part)
    profile = GPU_MODELS.get(match[2]) if match else None
    if match is None or profile is None or not 1 <= int(match[1]) <= 64:
        raise RequestError(
            f"{part!r} is not a GPU layout: write COUNTxMODEL, such as 8xA100-80GB or 4xT4+2xA10 "
            "(or 4xA100-40GB:mig for GPUs in MIG mode, 2xT4@0+2xT4@1 for those of two NUMA "
            "nodes), with a count of 1 to 64 and a model of "
            f"{', '.join(GPU_MODELS)}"
        )
    if match[4] and not profile.mig:
        able = ", ".join(name for name, model in GPU_MODELS.items() if model.mig)
        raise RequestError(f"{part!r}: {match[2]} does not support MIG; {able} do")
    numa = int(match[3]) if match[3] else None
    yield from [SimulatedGpu(model=profile, mig=bool(match[4]), numa=numa)] * int(match[1])


def uuid_of(node: NodeName, index: int) -> DeviceUuid:
    """Return the UUID of a node's simulated GPU, the same after every start."""
    return DeviceUuid(f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}")


def uuids_of(node: NodeName, gpus: Sequence[SimulatedGpu]) -> list[DeviceUuid]:
    """Return the UUIDs of a node's GPUs by index."""
    return [uuid_of(node, index) for index in range(len(gpus))]


class FaultFile:
    """The faults of a node's GPUs: the file maps a UUID or an index to a word."""

    def __init__(self, path: Path | None, uuids: Sequence[DeviceUuid]) -> None:
        self.path = path
        self.uuids = uuids
        self.latest: tuple[str, ...] = ("",) * len(uuids)
        """The fault of each GPU by index, as last read; empty without one."""

    def read(self) -> tuple[str, ...]:
        """Return each GPU's fault; an empty file is being written, and counts as unchanged.

        Raises RequestError if the file is invalid.
        """
        try:
            text = self.path.read_text() if self.path is not None else "{}"
            faults = json.loads(text) if text else None
        except FileNotFoundError:
            faults = {}
        except ValueError as error:
            raise RequestError(f"{self.path} is not JSON: {error}") from error
        if isinstance(faults, dict):
            named = {str(device): str(state) for device, state in faults.items()}
            self.latest = tuple(
                named.get(uuid) or named.get(str(index), "")
                for index, uuid in enumerate(self.uuids)
            )
        elif faults is not None:
            raise RequestError(f'{self.path} must be an object such as {{"0": "{UNHEALTHY}"}}')
        return self.latest

    def xids(self) -> tuple[Xid, ...]:
        """Return an event of each GPU whose latest fault is one."""
        matches = zip(self.uuids, map(_XID.fullmatch, self.latest), strict=True)
        return tuple(Xid(uuid, int(match[1])) for uuid, match in matches if match)


def reported(gpu: SimulatedGpu, uuid: DeviceUuid, fault: str) -> tuple[DeviceUuid, int, bool]:
    """Return the UUID, the memory in MiB and the MIG mode that a GPU with a fault reports."""
    memory = _MEMORY.fullmatch(fault)
    return (
        DeviceUuid(fault) if fault.startswith(_UUID) else uuid,
        int(memory[1]) if memory else gpu.model.memory_mib,
        gpu.mig is not (fault == MODE_FLIP and bool(gpu.model.mig)),
    )


def hanging_gpus(gpus: Sequence[SimulatedGpu], faults: FaultFile) -> tuple[UnreadDevice, ...]:
    """Return the GPUs of a node that hang, as the driver in the kernel lists them."""
    return tuple(
        UnreadDevice(
            uuid=uuid if fault == HANG else UNNAMED,
            index=index,
            model=gpus[index].model.product,
            reason=f"the driver lists GPU {index}, and NVML cannot read it: set in the fault file",
        )
        for index, (uuid, fault) in enumerate(zip(faults.uuids, faults.latest, strict=True))
        if fault in HANGS
    )


class SimulatedGpus:
    """A GPU driver without hardware, in Python: for machines that cannot have the one in C."""

    def __init__(
        self,
        node: NodeName,
        layout: str,
        fault_file: Path | None = None,
        mig_file: Path | None = None,
        *,
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.gpus = parse_layout(layout)
        self.uuids = uuids_of(node, self.gpus)
        self.faults = FaultFile(fault_file, self.uuids)
        self.hang_limit_s = hang_limit_s
        self._prober = GpuProber(self._count, self._read_gpu, limit_s=self._limit_s)
        self.mig = SimulatedMig(
            mig_file or Path("simulated-mig.json"),
            {
                name: gpu.model.mig
                for name, gpu in zip(self.uuids, self.gpus, strict=True)
                if gpu.mig
            },
        )

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises RequestError if the fault file is invalid."""
        return await self._prober.probe()

    @property
    def unreadable(self) -> Mapping[int, str]:
        """By index, why the latest probe could not read a GPU."""
        return self._prober.unreadable

    @property
    def unread(self) -> tuple[UnreadDevice, ...]:
        """The GPUs that hang, which a kernel's driver would list all the same."""
        return hanging_gpus(self.gpus, self.faults)

    def xids(self) -> tuple[Xid, ...]:
        """Return an event of each GPU that had one in the fault file at the last probe."""
        return self.faults.xids()

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
        return self.hang_limit_s if HANGS.intersection(self.faults.latest) else LIMIT_S

    def _count(self) -> int:
        return len(self.faults.read())

    def _read_gpu(self, index: int) -> Gpu | None:
        gpu = self.gpus[index]
        while (fault := self.faults.latest[index]) in HANGS:
            time.sleep(HANG_POLL_S)
            self.faults.read()
        if fault == VANISH:
            return None
        name, memory_mib, mig = reported(gpu, self.uuids[index], fault)
        return Gpu(
            uuid=name,
            index=index,
            model=gpu.model.product,
            memory_mib=memory_mib,
            fault=Fault(code="Unhealthy", text="set in the fault file", severe=True)
            if fault == UNHEALTHY
            else None,
            driver=DRIVER,
            numa=gpu.numa,
            mig=MigState(enabled=mig, pending=mig, profiles=gpu.model.mig if mig else ())
            if gpu.model.mig
            else None,
            instances=self._instances(self.uuids[index]) if gpu.mig and mig else (),
        )

    def _instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        busy = self._fault_of(device) == BUSY
        return tuple(replace(instance, busy=busy) for instance in self.mig.instances(device))

    async def _fault(self, device: DeviceUuid) -> str:
        return await asyncio.to_thread(self._fault_of, device)

    def _fault_of(self, device: DeviceUuid) -> str:
        return self.faults.read()[self.uuids.index(device)]


class NoUsage:
    """Usage of simulated GPUs: no process ever runs on them."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self.gpus = gpus

    async def sample(self) -> tuple[DeviceSample, ...]:
        """Return the devices, idle."""
        devices = await self.gpus.discover()
        hot = {index for index, fault in enumerate(self.gpus.faults.latest) if fault == HOT}
        return tuple(
            DeviceSample(
                device=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                memory_bytes=gpu.memory_mib * MIB,
                busy_percent=0,
                memory_busy_percent=0,
                hardware=Hardware(
                    device=gpu.uuid,
                    at=time.time(),
                    temperature_c=93 if gpu.index in hot else 31,
                    throttle=(TEMPERATURE,) if gpu.index in hot else (),
                    power_w=55,
                    power_limit_w=400,
                    sm_clock_mhz=210,
                    memory_clock_mhz=1593,
                    busy_percent=0,
                ),
            )
            for gpu in devices
        )
