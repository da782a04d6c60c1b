"""Whether the library works on this driver at all: each function without it, with it, with a limit.

What fails only with the library is its fault; what fails only with a limit is the region's, which
the node agent writes; what fails without it is the driver's or this machine's.
"""

import pytest

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine, torch_python
from tests.support.gpu_driver import GpuLoad

COMMANDS = (
    *(f"{way} 64m" for way in ("alloc", "managed", "pitch", "async", "create", "pool", "graph")),
    *("info", "total", "nvml", "burn 200ms", "launches 200ms", "spawn alloc 64m"),
)
ONLY_REAL = ("pool", "graph")


def result_of(load: GpuLoad, command: str) -> str:
    """Return `ok`, or what went wrong."""
    try:
        said = load.do(command)
    except (TimeoutError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        load.kill()
    wrong = any(word in said for word in ("error", "out of memory", "there is no", "failed"))
    return said if wrong else "ok"


def surroundings(machine: Machine, pods: AddPod) -> dict[str, GpuLoad]:
    """Start the same program in three ways."""
    unlimited = {}
    if machine.library:
        cache = str(machine.root / "unlimited.cache")
        unlimited = {"LD_PRELOAD": str(machine.library), "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache}
        unlimited["CUDA_REDIRECT"] = str(machine.library)
    return {
        "without the library": machine.load(),
        "with it, no limits": machine.load(**unlimited),
        "with it and a region": pods("probe", mib=4096, cores=50).load(),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_function_works_the_same_with_the_library(
    machine: Machine, pods: AddPod, seen: Add, command: str
) -> None:
    if command.split(maxsplit=1)[0] in ONLY_REAL and not machine.real:
        pytest.skip("the simulated driver lacks it")
    results = {
        where: result_of(load, command) for where, load in surroundings(machine, pods).items()
    }

    same = len(set(results.values())) == 1
    figure = (
        next(iter(results.values()))
        if same
        else "; ".join(f"{where}: {what}" for where, what in results.items())
    )
    ok = set(results.values()) == {"ok"}
    seen(f"`gpu-load '{command}'` in all three ways", figure, "ok", holds=ok)


def test_pytorch_works_with_the_library(real: Machine, pods: AddPod, seen: Add) -> None:
    if not torch_python():
        pytest.skip("no Python on this machine has PyTorch: set TORCH_PYTHON")
    for command in ("info", "again", "graph"):
        bare, limited = real.torch(), pods("torch", mib=8192).torch()
        results = [result_of(load, command) for load in (bare, limited)]
        seen(
            f"PyTorch's `{command}`, without and with the library",
            ", ".join(results),
            "ok, ok",
            holds=results == ["ok", "ok"],
        )
