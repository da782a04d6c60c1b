"""NVML's MIG calls, with a fake of the driver's own functions below pynvml."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.mig.gpu_models import GPU_MODELS
from services.node_agent.mig.instances import MigInstance, is_laid_out
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, layouts_for
from services.node_agent.mig.partitioner import Partitioner
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid
from simcluster.node_agent.mig import SimulatedMig
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("no_xid_threads")

GPU = DeviceUuid("GPU-m")
MODEL = GPU_MODELS["A100-80GB"]
SLICES = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
"""Number of slices to NVML's number of the compute instance profile."""
NUMBERS = {19: 0, 20: 7, 15: 9, 14: 1, 9: 2, 5: 3, 0: 4}
"""Id of a profile to NVML's number of it."""


class Driver:
    """The C functions that pynvml calls, for one A100 in MIG mode; handles are plain numbers."""

    def __init__(self, state: Path, *, named: bool = True) -> None:
        self.mig = SimulatedMig(state, {GPU: MODEL.mig})
        self.named = named
        self.busy: list[int] = []
        self.initialised = 0
        self.hangs = False
        self.came_back = threading.Event()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in self.answers():
            monkeypatch.setattr(pynvml, name, answer)

    def answers(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield "nvmlInit", self._init
        yield "nvmlShutdown", self._shutdown
        yield "nvmlDeviceGetCount", lambda: 1
        yield "nvmlDeviceGetHandleByIndex", lambda _: "gpu"
        yield "nvmlDeviceGetHandleByUUID", self._by_uuid
        yield "nvmlDeviceGetUUID", self._uuid
        yield "nvmlDeviceGetMinorNumber", lambda _: 0
        yield "nvmlDeviceGetName", lambda _: MODEL.product
        yield "nvmlDeviceGetMemoryInfo", lambda _: _memory()
        yield "nvmlDeviceGetNumaNodeId", _unsupported
        yield "nvmlDeviceGetRemappedRows", _unsupported
        yield "nvmlDeviceGetUtilizationRates", _unsupported
        yield "nvmlDeviceGetMigMode", lambda _: [1, 1]
        yield "nvmlDeviceGetMaxMigDeviceCount", lambda _: 7
        yield "nvmlDeviceGetComputeRunningProcesses", self._processes
        yield "nvmlDeviceGetGpuInstanceProfileInfo", self._profile
        yield "nvmlDeviceGetGpuInstancePossiblePlacements", self._placements
        yield "nvmlDeviceCreateGpuInstanceWithPlacement", self._create
        yield "nvmlDeviceGetGpuInstances", self._instances
        yield "nvmlDeviceGetGpuInstanceById", lambda _, gi: gi
        yield "nvmlGpuInstanceGetInfo", self._info
        yield "nvmlGpuInstanceGetComputeInstanceProfileInfo", self._compute_profile
        yield "nvmlGpuInstanceCreateComputeInstance", self._create_compute
        yield "nvmlGpuInstanceGetComputeInstances", self._computes
        yield "nvmlGpuInstanceGetComputeInstanceById", lambda gi, compute: (gi, compute)
        yield "nvmlComputeInstanceGetInfo", lambda _: pynvml.c_nvmlComputeInstanceInfo_t(id=0)
        yield "nvmlComputeInstanceDestroy", lambda pair: self._do("destroy_compute", *pair)
        yield "nvmlGpuInstanceDestroy", lambda gi: self._do("destroy_instance", _number(gi))
        yield "nvmlDeviceGetMigDeviceHandleByIndex", self._mig_device
        yield "nvmlDeviceGetGpuInstanceId", lambda device: device.gi
        yield "nvmlDeviceGetComputeInstanceId", lambda device: device.compute_ids[0]

    def _init(self) -> None:
        self.initialised += 1

    def _shutdown(self) -> None:
        self.initialised -= 1

    def _by_uuid(self, uuid: str) -> str:
        assert uuid == GPU
        assert self.initialised
        return "gpu"

    def _uuid(self, handle: Any) -> bytes:
        return (GPU if handle == "gpu" else handle.uuid).encode()

    def _processes(self, _: str) -> list[Any]:
        return [pynvml.c_nvmlProcessInfo_v3_t(pid=1, gpuInstanceId=gi) for gi in self.busy]

    def _profile(self, _: str, number: int, version: int = 2) -> Any:
        known = {NUMBERS[p.id]: p for p in MODEL.mig}.get(number)
        if known is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if version == 2 and not self.named:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        kinds = {
            1: pynvml.c_nvmlGpuInstanceProfileInfo_t,
            2: pynvml.c_nvmlGpuInstanceProfileInfo_v2_t,
        }
        info = kinds[version]()
        info.id, info.sliceCount, info.instanceCount = known.id, known.compute_slices, known.count
        info.memorySizeMB = known.memory_mib
        if version == 2:
            info.name = f"MIG {known.name}".encode()
        return info

    def _placements(self, _: str, profile: int, places: Any, count: Any) -> None:
        known = next(p for p in MODEL.mig if p.id == profile)
        if places is not None:
            assert count._obj.value >= len(known.starts)
            for number, start in enumerate(known.starts):
                places[number].start, places[number].size = start, known.memory_slices
        count._obj.value = len(known.starts)

    def _create(self, _: str, profile: int, place: Any) -> Any:
        if self.hangs:
            self.came_back.wait(30)
        return _handle(self._do("create_instance", profile, int(place._obj.start)))

    def _instances(self, _: str, profile: int, found: Any, count: Any) -> None:
        name = next(p.name for p in MODEL.mig if p.id == profile)
        listed = [one for one in self.mig.instances(GPU) if one.profile == name]
        for number, one in enumerate(listed):
            found[number] = _handle(one.gi)
        count._obj.value = len(listed)

    def _info(self, gi: Any) -> Any:
        one = self._find(gi)
        info = pynvml.c_nvmlGpuInstanceInfo_t(id=one.gi)
        info.profileId = next(p.id for p in MODEL.mig if p.name == one.profile)
        info.placement.start, info.placement.size = one.start, one.memory_slices
        return info

    def _compute_profile(self, gi: Any, number: int, _: int, version: int = 2) -> Any:
        whole = self._find(gi).compute_slices
        slices = next((s for s, known in SLICES.items() if known == number and s <= whole), None)
        if slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.instanceCount = 100 + slices, slices, whole // slices
        return info

    def _create_compute(self, gi: Any, profile: int) -> None:
        assert profile == 100 + self._find(gi).compute_slices, "the one that takes all of it"
        self._do("create_compute", _number(gi))

    def _computes(self, gi: Any, profile: int, found: Any, count: Any) -> None:
        one = self._find(gi)
        count._obj.value = len(one.compute_ids) if profile == 100 + one.compute_slices else 0
        for number in range(count._obj.value):
            found[number] = ctypes.cast(1, type(found[number]))

    def _mig_device(self, _: str, number: int) -> Any:
        there = [one for one in self.mig.instances(GPU)[::-1] if one.uuid]
        if number >= len(there):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return there[number]

    def _find(self, gi: Any) -> Any:
        return next(one for one in self.mig.instances(GPU) if one.gi == _number(gi))

    def _do(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self.mig, call)(GPU, *map(_number, arguments))
        except UnavailableError:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES) from None


def _handle(gi: int) -> Any:
    """Return an opaque pointer, never null, as NVML gives them."""
    return ctypes.cast(gi + 1, pynvml.c_nvmlGpuInstance_t)


def _number(handle: Any) -> int:
    if isinstance(handle, int):
        return handle
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


def _memory() -> Any:
    return type("Memory", (), {"total": MODEL.memory_mib << 20})


def _unsupported(_: Any) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    made = Driver(tmp_path / "mig.json")
    made.install(monkeypatch)
    return made


async def test_drivers_that_do_not_name_profiles_are_understood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Driver(tmp_path / "mig.json", named=False).install(monkeypatch)

    (gpu,) = await NvmlGpus().discover()

    assert gpu.mig is not None
    names = {p.id: p.name for p in gpu.mig.profiles}
    assert names[19] == names[20] == "1g.10gb"
    assert [names[n] for n in (15, 14, 9, 5, 0)] == [
        "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"
    ]  # fmt: skip


async def test_every_layout_is_made_through_nvml_and_listed_by_ids(driver: Driver) -> None:
    gpus = NvmlGpus()
    layouts, _ = layouts_for(MODEL.product, MODEL.mig, KNOWN_GEOMETRIES)
    for layout in (*layouts, *layouts):
        made = await Partitioner(gpus).partition(GPU, layout, MODEL.mig, frozenset())

        assert is_laid_out(layout, made)
        by_place = {one.start: one.uuid for one in driver.mig.instances(GPU)}
        assert {one.start: one.uuid for one in made} == by_place
    assert driver.initialised == 0


async def test_an_instance_without_a_compute_instance_has_no_uuid(driver: Driver) -> None:
    driver.mig.create_instance(GPU, 9, 0)

    (one,) = await NvmlGpus().instances(GPU)

    assert (one.profile, one.start, one.compute_ids, one.uuid) == ("3g.40gb", 0, (), "")


async def test_errors_have_the_message_of_nvml(driver: Driver) -> None:
    gpus = NvmlGpus()
    await gpus.create_instance(GPU, 9, 0)

    with pytest.raises(UnavailableError, match=r"NVML: (Insufficient Resources|.*code 23)"):
        await gpus.create_instance(GPU, 14, 2)
    with pytest.raises(UnavailableError, match=r"NVML: (Not Found|.*code 6)"):
        await gpus.create_instance(GPU, 9, 3)


async def test_a_hanging_call_times_out_and_no_second_call_starts_beside_it(driver: Driver) -> None:
    driver.hangs = True
    gpus = NvmlGpus(timeout_s=0.1)

    with pytest.raises(UnavailableError, match=r"did not respond within 0\.1 s"):
        await gpus.create_instance(GPU, 9, 0)
    with pytest.raises(UnavailableError, match="did not respond"):
        await gpus.instances(GPU)
    gpus.timeout_s = 10.0
    began = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError, match="did not respond"):
        await gpus.instances(GPU)
    assert asyncio.get_running_loop().time() - began < 5, "the hanging call is not awaited again"
    driver.came_back.set()

    async def list_again() -> tuple[MigInstance, ...]:
        with contextlib.suppress(UnavailableError):
            return await gpus.instances(GPU)
        return ()

    listed = await until(list_again)
    assert len(listed) == 1, "called once the first call has returned"
