"""A limit of memory holds to the MiB, in every way to allocate that the library counts."""

import pytest

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.gpu_driver import MIB

LIMIT = 4096
MORE = LIMIT + 512
"""No test asks for more than this, even if nothing refuses it."""
SLACK = 64
"""What a driver may take beside what it was asked for: it rounds up."""


@pytest.mark.parametrize("way", ["alloc", "managed", "pitch", "async", "create"])
def test_the_last_mib_is_given_and_the_next_refused(
    machine: Machine, pods: AddPod, seen: Add, way: str
) -> None:
    pod = pods(way, mib=LIMIT)
    load = pod.load()

    given = load.value(f"fill {way} {MORE}", "mib")

    context = pod.counted().context // MIB
    step = 2 if way == "create" and machine.real else 1
    more = load.fits(f"{step}m", way)
    by_driver = machine.used_by(pod.pids) // MIB
    figure = f"{given} + {context} of its context; {step} more {'given' if more else 'refused'}"
    exact = LIMIT - step < given + context <= LIMIT
    holds = exact and not more and by_driver <= LIMIT + SLACK
    target = f"{LIMIT}, then refused; by NVML at most {LIMIT + SLACK}"
    seen(f"MiB given by `{way}`", f"{figure}; {by_driver} by NVML", target, holds=holds)


@pytest.mark.parametrize("way", ["pool", "graph"])
def test_what_the_library_does_not_count(real: Machine, pods: AddPod, seen: Add, way: str) -> None:
    load = pods(way, mib=LIMIT).load()

    given = load.value(f"fill {way} {MORE}", "mib")

    held = given < LIMIT
    words = "limited" if held else "not limited"
    target = "not limited, as docs/hami-core.md says"
    seen(f"MiB given by `{way}`", f"{given}: {words}", target, holds=None)


def test_two_processes_of_a_pod_share_its_limit(machine: Machine, pods: AddPod, seen: Add) -> None:
    pod = pods("two", mib=LIMIT)
    first, second = pod.load(), pod.load()
    assert first.fits("2g")

    given = 2048 + second.value(f"fill alloc {MORE}", "mib") + pod.counted().context // MIB

    seen("MiB of two processes of a pod", given, LIMIT, holds=LIMIT - 1 <= given <= LIMIT)


def test_two_pods_side_by_side_use_the_whole_gpu(machine: Machine, pods: AddPod, seen: Add) -> None:
    half = machine.gpu.usable_mib // 2
    both = [pods(name, mib=half) for name in ("left", "right")]

    got = []
    for pod in both:
        load = pod.load()
        given = load.value(f"fill alloc {half + 512}", "mib")
        got.append(given + pod.counted().context // MIB)

    for shows, mib in zip(
        ("half of the GPU, alone", "the other half, beside it"), got, strict=True
    ):
        seen(f"MiB of a pod with {shows}", mib, half, holds=half - 1 <= mib <= half)
    whole = machine.gpu.memory_mib
    kept = f"{whole - machine.gpu.usable_mib} of {whole}"
    seen("MiB that no pod gets, since the driver keeps them", kept)


def test_pytorch_stays_within_the_limit(torch_machine: Machine, pods: AddPod, seen: Add) -> None:
    pod = pods("torch", mib=LIMIT)
    torch = pod.torch()

    total = torch.value("info", "total") // MIB
    seen("MiB by torch.cuda.mem_get_info", total, LIMIT)
    given = torch.value(f"fill {MORE}", "mib")
    counted = pod.counted().total // MIB
    figure = f"{given} in tensors, {counted} counted"
    target = f"{LIMIT - SLACK} to {LIMIT}"
    holds = LIMIT - SLACK <= counted <= LIMIT
    seen("MiB of PyTorch until OutOfMemoryError", figure, target, holds=holds)
    by_driver = torch_machine.used_by(pod.pids) // MIB
    holds = by_driver <= LIMIT + 64
    seen("MiB of that process by NVML", by_driver, f"at most {LIMIT}, and 64", holds=holds)
    again = torch.do("again")
    seen("PyTorch after tensors were freed", again, "ok")
    graph = torch.do("graph")
    seen("a CUDA graph, captured and replayed by PyTorch", graph, "ok")
