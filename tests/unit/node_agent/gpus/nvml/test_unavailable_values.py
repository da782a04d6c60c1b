"""Each function of NVML that is called may fail for one GPU: what can be served is served."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.node_agent.diagnosis import node_checks
from services.node_agent.enforcers.table import Enforcers, enforcer_table
from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of, mode_warnings
from services.node_agent.gpus.nvml import gpus as nvml_gpus
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.settings import AgentSettings
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.model.devices.device import DeviceUse, device_refusal, required_memory_mib
from shared.model.devices.enforcers import HAMI_CORE_ALONE, NOTHING_OFFERED, Offer
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.events.plausible import implausible
from shared.model.findings import Outcome
from shared.model.names import DeviceUuid, NodeName
from shared.model.requests.request import GpuRequest, SharingPolicy
from shared.nats import wire
from tests.support.node_agent.fake_nvml import ANSWERS, CALLED, GIB, failing, install

pytestmark = pytest.mark.usefixtures("no_xid_threads")

OF_THE_DRIVER = {"nvmlInit", "nvmlDeviceGetCount"}
"""Without them there is no GPU at all."""
IDENTITY = {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"}
"""Without them a GPU cannot be served."""
OF_ONE_GPU = {
    *ANSWERS, "nvmlDeviceGetPciInfo", "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors",
} - {
    "nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetComputeRunningProcesses",
}  # fmt: skip
"""What reads one GPU, or a pair of them."""
CODES = ("NOT_SUPPORTED", "NO_PERMISSION", "UNKNOWN")
MEMINFO = "MemTotal:       127600748 kB\nMemFree:        118566368 kB\n"


NOT_UTF_8 = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
"""What the library itself raises."""
ODD: Mapping[str, Sequence[object]] = {
    "nvmlDeviceGetUUID": ["", "x" * 500, b"\xff\xfe0", NOT_UTF_8, "GPU-../\n0"],
    "nvmlDeviceGetMinorNumber": [-5, 2**32 - 1],
    "nvmlDeviceGetName": ["", "x" * 5000, b"\xff\xfe", NOT_UTF_8, "T4\0\n"],
    "nvmlDeviceGetMemoryInfo": [
        SimpleNamespace(total=size, used=size, reserved=size) for size in (0, -GIB, 2**64 - 1)
    ],
    "nvmlDeviceGetPciInfo": [SimpleNamespace(busId=b"\xff" * 30), NOT_UTF_8],
    "nvmlDeviceGetNumaNodeId": [-4, 2**32 - 1],
    "nvmlDeviceGetMigMode": [(7, 9)],
    "nvmlSystemGetDriverVersion": ["x" * 4000, b"\xff", NOT_UTF_8],
}


def odd(value: object) -> object:
    """Return or raise what a driver answers."""
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    monkeypatch.setattr(nvml_gpus, "MEMINFO", meminfo)
    return install(monkeypatch)


def break_first_gpu(driver: pytest.MonkeyPatch, name: str, code: str) -> None:
    """Let a function fail for the first GPU; one without a GPU fails always."""
    answer = getattr(pynvml, name)

    def call(*arguments: Any) -> Any:
        if not arguments or arguments[0] in (0, "GPU-0"):
            failing(code)()
        return answer(*arguments)

    driver.setattr(pynvml, name, call)


async def found_with(driver: pytest.MonkeyPatch, name: str, code: str) -> dict[str, Gpu]:
    break_first_gpu(driver, name, code)
    return {gpu.uuid: gpu for gpu in await NvmlGpus().discover()}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", sorted(set(CALLED) - OF_THE_DRIVER))
async def test_other_gpus_are_served_whatever_fails_of_one(
    driver: pytest.MonkeyPatch, name: str, code: str
) -> None:
    found = await found_with(driver, name, code)

    other = found["GPU-1"]
    assert (other.fault, other.memory_mib, other.measured) == (None, 40 * 1024, True)
    samples = {sample.device: sample for sample in await NvmlProcesses().sample()}
    assert samples[DeviceUuid("GPU-1")].used_bytes == GIB


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ODD.items() for value in values]
)
async def test_other_gpus_are_reported_whatever_values_one_has(
    driver: pytest.MonkeyPatch, name: str, value: object
) -> None:
    answer = getattr(pynvml, name)
    driver.setattr(
        pynvml, name, lambda *given: answer(*given) if given and given[0] else odd(value)
    )

    devices = devices_of(await NvmlGpus().discover(), SharingConfig())

    report = DeviceReported(node=NodeName("node"), devices=devices, served=())
    [received] = wire.decode(wire.encode([report]), DeviceReported)
    assert not implausible(received)
    assert "GPU-1" in {device.uuid for device in devices if device.healthy}
    advertisement_of(DIALECTS.values(), devices, "auto")
    assert "GPU-1" in {sample.device for sample in await NvmlProcesses().sample()}


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
@pytest.mark.parametrize("name", sorted(set(CALLED) - OF_THE_DRIVER - IDENTITY))
async def test_a_gpu_is_served_without_what_its_driver_does_not_report(
    driver: pytest.MonkeyPatch, name: str, code: str
) -> None:
    found = await found_with(driver, name, code)

    assert found["GPU-0"].fault is None
    assert devices_of(found.values(), SharingConfig())[0].healthy


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", sorted(OF_THE_DRIVER))
async def test_a_driver_that_lists_no_gpu_is_reported_with_its_error(
    driver: pytest.MonkeyPatch, name: str, code: str
) -> None:
    driver.setattr(pynvml, name, failing(code))

    with pytest.raises(UnavailableError, match="Install the NVIDIA driver"):
        await NvmlGpus().discover()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("name", sorted(OF_ONE_GPU))
async def test_a_hanging_call_of_one_gpu_does_not_delay_the_others(
    driver: pytest.MonkeyPatch, name: str, released: threading.Event
) -> None:
    answer = getattr(pynvml, name)

    def call(*arguments: Any) -> Any:
        if arguments[0] in {0, "GPU-0"}:
            released.wait(60)
        return answer(*arguments)

    driver.setattr(pynvml, name, call)
    gpus = NvmlGpus(timeout_s=0.5)
    probes = [await gpus.discover() for _ in range(3)]

    for found in probes:
        assert [gpu.fault for gpu in found if gpu.uuid == "GPU-1"] == [None]


async def test_a_hanging_driver_times_out(
    driver: pytest.MonkeyPatch, released: threading.Event
) -> None:
    driver.setattr(pynvml, "nvmlInit", lambda: released.wait(60))

    with pytest.raises(UnavailableError, match=r"did not respond within 0\.05 s"):
        await NvmlGpus(timeout_s=0.05).discover()


@pytest.mark.parametrize("code", CODES)
async def test_the_calls_of_mig_mode_fail_for_their_gpu_alone(
    driver: pytest.MonkeyPatch, code: str
) -> None:
    driver.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: (1 - handle, 1 - handle))
    for name in CALLED:
        if name not in ANSWERS:
            driver.setattr(pynvml, name, failing(code))

    found = {str(gpu.uuid): gpu for gpu in await NvmlGpus().discover()}

    assert found["GPU-1"].fault is None


def enforcers(folder: Path) -> Enforcers:
    library = NodeLibrary(folder / "library", None)
    return enforcer_table(ContainerFiles(PurePosixPath(folder), library))


@pytest.mark.parametrize(
    ("unified_mib", "offer", "refusal", "warning"),
    [
        (None, NOTHING_OFFERED, "GpuNotIsolated", "set --unified-memory-mib"),
        (65536, HAMI_CORE_ALONE, None, "shares of 65536 MiB are given"),
    ],
    ids=["the host's, whole or without a limit", "as much as an administrator says"],
)
async def test_unified_memory_is_served(
    driver: pytest.MonkeyPatch,
    *,
    tmp_path: Path,
    unified_mib: int | None,
    offer: Offer,
    refusal: str | None,
    warning: str,
) -> None:
    gpus = list((await found_with(driver, "nvmlDeviceGetMemoryInfo", "NOT_SUPPORTED")).values())
    sharing = AgentSettings(unified_memory_mib=unified_mib).sharing
    device = enforcers(tmp_path).offered(devices_of(gpus, sharing), gpus, sharing)[0]
    part = GpuRequest(container="main", gpus=1, memory_units=1000)
    whole = GpuRequest(container="main", gpus=1, sharing=SharingPolicy.EXCLUSIVE, whole=True)

    assert (device.memory_mib, device.offer) == (unified_mib or 127600748 // 1024, offer)
    refused = device_refusal(part, device, DeviceUse(), memory_mib=1000)
    assert (refused and refused.code) == refusal
    assert refused is None or "the driver does not report its memory" in refused.text
    everything = required_memory_mib(whole, device)
    assert device_refusal(whole, device, DeviceUse(), memory_mib=everything) is None
    assert device_refusal(part, device, DeviceUse(), memory_mib=device.memory_mib + 1) is not None
    (warned,) = mode_warnings(gpus, sharing)
    assert warning in warned
    assert node_checks.driver(gpus, {}).outcome is Outcome.WARN


async def test_the_usage_of_unified_memory_is_that_of_its_processes(
    driver: pytest.MonkeyPatch,
) -> None:
    driver.setattr(pynvml, "nvmlDeviceGetMemoryInfo", failing("NOT_SUPPORTED"))

    samples = await NvmlProcesses().sample()

    assert [sample.used_bytes for sample in samples] == [GIB, GIB]
