"""GPUs through NVML, with a fake driver and without one."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus.nvml.gpus import NvmlGpus
from shared.model.errors import UnavailableError

pytestmark = pytest.mark.usefixtures("no_xid_threads")


class Driver:
    """Two GPUs with minor numbers 1 and 0; those in `lost` return errors."""

    def __init__(self, *, lost: tuple[int, ...] = ()) -> None:
        self.lost = lost

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": self.handle,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode(),
            "nvmlDeviceGetMinorNumber": lambda handle: 1 - handle,
            "nvmlDeviceGetName": lambda _: "Tesla T4",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=15360 * 1024 * 1024 + 5),
            "nvmlDeviceGetNumaNodeId": self.unsupported,
            "nvmlDeviceGetHandleByUUID": lambda uuid: self.handle(int(uuid[-1])),
            "nvmlDeviceGetMigMode": self.unsupported,
            "nvmlDeviceGetRemappedRows": self.unsupported,
            "nvmlDeviceGetUtilizationRates": lambda _: None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    def handle(self, number: int) -> int:
        if number in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return number

    def unsupported(self, _: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


async def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(lost=(0,)).install(monkeypatch)

    assert [gpu.uuid for gpu in await NvmlGpus().discover()] == ["GPU-1"]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def hanging(
    name: str, answer: Callable[..., Any], at: str, released: threading.Event
) -> Callable[..., Any]:
    """Return the function, which hangs for GPU 1 if it is the one at `at`."""

    def call(*arguments: Any) -> Any:
        handles = arguments if name == "TopologyCommonAncestor" else arguments[:1]
        if name == at and {1, "GPU-1"} & set(handles):
            released.wait(60)
        return answer(*arguments)

    return call


OF_A_GPU = (
    "HandleByIndex", "HandleByUUID", "UUID", "MinorNumber", "Name", "MemoryInfo", "MigMode",
    "RemappedRows", "UtilizationRates", "TotalEccErrors", "PciInfo", "NumaNodeId", "NvLinkState",
    "TopologyCommonAncestor",
)  # fmt: skip


NEEDED = {"HandleByIndex", "UUID", "Name", "MemoryInfo"}


def install_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a driver with every function that reads a GPU."""
    driver = Driver()
    driver.install(monkeypatch)
    more: dict[str, Any] = {
        "TopologyCommonAncestor": lambda *_: pynvml.NVML_TOPOLOGY_NODE,
        "TotalEccErrors": lambda *_: 0,
        "NvLinkState": lambda *_: driver.unsupported(0),
        "PciInfo": lambda handle: SimpleNamespace(busId=f"0000:0{handle}:00.0"),
    }
    for name, answer in more.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer)


@pytest.mark.parametrize("function", sorted(set(OF_A_GPU) - NEEDED - {"MigMode"}))
@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
async def test_an_unsupported_value_is_not_a_fault(
    function: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any) -> None:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))

    install_all(monkeypatch)
    monkeypatch.setattr(pynvml, f"nvmlDeviceGet{function}", unavailable)

    found = await NvmlGpus().discover()

    assert [(gpu.uuid, gpu.fault) for gpu in found] == [("GPU-0", None), ("GPU-1", None)]


@pytest.mark.parametrize("function", OF_A_GPU)
async def test_a_hanging_call_of_one_gpu_does_not_delay_the_others(
    function: str, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    install_all(monkeypatch)
    for name in OF_A_GPU:
        full = f"nvmlDeviceGet{name}"
        monkeypatch.setattr(pynvml, full, hanging(name, getattr(pynvml, full), function, released))
    gpus = NvmlGpus(timeout_s=0.5)

    probes = [await gpus.discover() for _ in range(3)]

    for found in probes:
        assert next(gpu for gpu in found if gpu.uuid == "GPU-0").fault is None


async def test_a_hanging_driver_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: __import__("time").sleep(0.3))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)

    with pytest.raises(UnavailableError, match=r"did not respond within 0\.05 s"):
        await NvmlGpus(timeout_s=0.05).discover()
