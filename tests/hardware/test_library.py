"""Whether the library works on this driver at all: each function without it, with it, with a limit.

What fails only with the library is its fault; what fails only with a limit is the region's, which
the node agent writes; what fails without it is the driver's or this machine's.
"""

from collections.abc import Callable, Sequence

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.gpu_driver import GpuLoad

COMMANDS = (
    *(f"{way} 64m" for way in ("alloc", "managed", "pitch", "async", "create", "pool", "graph")),
    *("info", "total", "nvml", "burn 200ms", "launches 200ms", "spawn alloc 64m"),
)
ONLY_REAL = ("pool", "graph")


def results_of(start: Callable[[], GpuLoad], commands: Sequence[str]) -> list[str]:
    """Return `ok` for each command, or what went wrong; a program that fails is started again."""
    found = []
    load = None
    for command in commands:
        try:
            load = load or start()
            said = load.do(command)
        except (TimeoutError, ValueError, OSError) as error:
            said = f"failed: {type(error).__name__}: {error}"[:200]
        wrong = any(word in said for word in ("error", "out of memory", "there is no", "failed"))
        found.append(said if wrong else "ok")
        if wrong and load:
            load.kill()
            load = None
    if load:
        load.kill()
    return found


def test_functions_work_the_same_with_the_library(
    machine: Machine, pods: AddPod, seen: Add
) -> None:
    commands = [one for one in COMMANDS if machine.real or one.split()[0] not in ONLY_REAL]
    unlimited = {}
    if machine.library:
        cache = str(machine.root / "unlimited.cache")
        unlimited = {"LD_PRELOAD": str(machine.library), "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache}
        unlimited["CUDA_REDIRECT"] = str(machine.library)
    pod = pods("probe", mib=4096, cores=50)
    ways = {
        "without the library": machine.load,
        "with it, no limits": lambda: machine.load(**unlimited),
        "with it and a region": pod.load,
    }

    results = {way: results_of(start, commands) for way, start in ways.items()}

    failed = 0
    for command, *each in zip(commands, *results.values(), strict=True):
        if set(each) == {"ok"}:
            continue
        failed += 1
        figure = "; ".join(f"{way}: {what}" for way, what in zip(ways, each, strict=True))
        seen(f"`gpu-load '{command}'`", figure, "ok in all three ways", holds=False)
    shows = "functions that work without the library, with it, and with limits"
    seen(shows, f"{len(commands) - failed} of {len(commands)}", "all", holds=not failed)


def test_pytorch_works_with_the_library(torch_machine: Machine, pods: AddPod, seen: Add) -> None:
    commands = ("info", "again", "graph")
    starts = (torch_machine.torch, pods("torch", mib=8192).torch)
    results = [results_of(start, commands) for start in starts]
    for command, *each in zip(commands, *results, strict=True):
        shows = f"PyTorch's `{command}`, without and with the library"
        seen(shows, ", ".join(each), "ok, ok")
