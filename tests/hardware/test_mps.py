"""NVIDIA's MPS for comparison: a limit of memory and a part of the threads, without a library.

Its daemon runs for these tests only, in a folder of its own; no setting of the card changes.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.hardware.conftest import Add
from tests.hardware.machine import Machine
from tests.hardware.test_compute import KERNELS
from tests.support.gpu_driver import GpuLoad

LIMIT = 4096


@pytest.fixture
def mps(real: Machine) -> Iterator[dict[str, str]]:
    """Variables of MPS' clients."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    folders = {
        name: str(real.root / name)
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    }
    for folder in folders.values():
        Path(folder).mkdir()
    given = real.environment | folders
    subprocess.run([program, "-d"], env=given, check=True, timeout=20)
    yield folders
    subprocess.run([program], env=given, input=b"quit -t 5\n", timeout=30, check=False)
    time.sleep(1)


def client(machine: Machine, mps: dict[str, str], percent: int = 100, **more: str) -> GpuLoad:
    return machine.load(**mps, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(percent), **more)


def test_memory_with_mps(real: Machine, mps: dict[str, str], seen: Add) -> None:
    for way in ("alloc", "managed", "async", "create", "pool", "graph", "direct"):
        load = client(real, mps, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"0={LIMIT}M")
        try:
            given = load.do(f"fill {way} {LIMIT + 512}")
        finally:
            load.kill()
        seen(f"MPS: MiB given by `{way}`, limit {LIMIT}", given.removeprefix("mib="))


@pytest.mark.parametrize("kind", ["short", "tiny"])
def test_compute_with_mps(real: Machine, mps: dict[str, str], seen: Add, kind: str) -> None:
    for percents in ((25,), (50,), (50, 50)):
        loads = [client(real, mps, percent) for percent in percents]
        for load in loads:
            load.send(f"burn 3s {KERNELS[kind]} 640 {real.loops}")
        got = [load.result().partition("busy=")[2] for load in loads]
        for load in loads:
            load.kill()
        shows = f"MPS: percent with {' and '.join(map(str, percents))}, {kind} kernels"
        seen(shows, " and ".join(got))


def test_launches_with_mps(real: Machine, mps: dict[str, str], seen: Add) -> None:
    bare = real.load()
    load = client(real, mps)
    rates = [[one.value("launches 1s", "per_s") for one in (bare, load)] for _ in range(3)]
    without, held = (median(rate) for rate in zip(*rates, strict=True))
    figure = f"{without:,.0f}, {held:,.0f}: {(held / without - 1) * 100:+.1f} %"
    seen("launches per second, without and with MPS", figure)
    bare.kill()
    load.kill()
