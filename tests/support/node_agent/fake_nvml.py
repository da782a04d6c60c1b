"""An NVML with two sound GPUs, of which a test replaces functions."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus import nvml
from services.node_agent.gpus.nvml import processes

FUNCTION = re.compile(r"pynvml\.(nvml[A-Z]\w+)")
CALLED = sorted(
    {
        name
        for path in Path(nvml.__path__[0]).glob("*.py")
        for name in FUNCTION.findall(path.read_text())
        if callable(getattr(pynvml, name))
    }
)
GIB = 1 << 30


def failing(code: str) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))

    return fail


def handle_of(uuid: str) -> int:
    """Return a GPU's handle; threads that an earlier test has left may ask for other GPUs."""
    if uuid not in {"GPU-0", "GPU-1"}:
        failing("NOT_FOUND")()
    return int(uuid[-1])


ANSWERS: Mapping[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlSystemGetDriverVersion": lambda: "580.95.05",
    "nvmlDeviceGetHandleByIndex": lambda number: number,
    "nvmlDeviceGetHandleByUUID": handle_of,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetMinorNumber": lambda handle: handle,
    "nvmlDeviceGetName": lambda _: "NVIDIA A100-SXM4-40GB",
    "nvmlDeviceGetMemoryInfo": lambda *_: SimpleNamespace(total=40 * GIB, used=GIB),
    "nvmlDeviceGetMigMode": lambda _: (0, 0),
    "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=1, memory=1),
    "nvmlDeviceGetComputeRunningProcesses": lambda _: [
        SimpleNamespace(pid=7, usedGpuMemory=GIB, gpuInstanceId=None)
    ],
}


def install(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Replace every function that is called; what is optional is not supported."""
    for name in CALLED:
        monkeypatch.setattr(pynvml, name, ANSWERS.get(name, failing("NOT_SUPPORTED")))

    def samples(handle: int, since_us: int) -> Any:
        return pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)

    monkeypatch.setattr(processes, "utilization_samples", samples)
    return monkeypatch
