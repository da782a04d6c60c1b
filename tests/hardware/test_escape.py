"""Ways around the limits: which hold is what docs/security.md and docs/hami-core.md say."""

import pytest

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.hami_core import can_unshare

LIMIT = 4096
mounted = pytest.mark.skipif(not can_unshare(), reason="without root, pods have no mounts")


def judge(seen: Add, shows: str, result: str, *, holds: bool = True) -> None:
    """Add what a try gave; `holds`: whether the limit does, as the pages say."""
    expected = "refused" if holds else "given"
    got = {"ok": "given", "out of memory": "refused"}.get(result, result)
    target = "held" if holds else "not held, as the pages say"
    seen(f"6 GiB of a pod of 4 GiB: {shows}", got, target, holds=got == expected)


@mounted
def test_without_its_variables(machine: Machine, pods: AddPod, seen: Add) -> None:
    if machine.library is None:
        pytest.skip("the simulated driver finds the limits by a variable")
    judge(seen, "environment unset", pods("unset", mib=LIMIT).load(own=False).do("alloc 6g"))


def test_with_variables_of_its_own(machine: Machine, pods: AddPod, seen: Add) -> None:
    pod = pods("own", mib=LIMIT)
    load = pod.load(CUDA_DEVICE_MEMORY_LIMIT_0="16g", CUDA_DEVICE_MEMORY_LIMIT="16g")
    judge(seen, "own limits in variables", load.do("alloc 6g"))


def test_in_another_process(machine: Machine, pods: AddPod, seen: Add) -> None:
    load = pods("spawn", mib=LIMIT).load()
    result = load.do("spawn alloc 6g").rpartition(": ")[2]
    judge(seen, "a process that it starts", result)


def test_in_a_fork(machine: Machine, pods: AddPod, seen: Add) -> None:
    load = pods("fork", mib=LIMIT).load()
    result = load.do("fork alloc 6g").partition(": ")[2]
    if result == "CUDA error 3":
        refusal = "the driver refuses CUDA in a fork"
        seen("6 GiB of a pod of 4 GiB: a fork", refusal, "held", holds=True)
    else:
        judge(seen, "a fork", result)


def test_by_the_path_of_the_driver(machine: Machine, pods: AddPod, seen: Add) -> None:
    load = pods("path", mib=LIMIT).load()
    judge(seen, "the driver's library by its path", load.do("path 6g"))


def test_past_the_loader(machine: Machine, pods: AddPod, seen: Add) -> None:
    if machine.library is None:
        pytest.skip("the simulated driver itself enforces the limits")
    load = pods("direct", mib=LIMIT).load()
    judge(seen, "the driver's function by its address", load.do("direct 6g"), holds=False)


@mounted
def test_a_library_of_its_own(machine: Machine, pods: AddPod, seen: Add) -> None:
    pod = pods("preload", mib=LIMIT)
    judge(seen, "LD_PRELOAD of its own", pod.load(LD_PRELOAD="").do("alloc 6g"))


@mounted
def test_a_file_of_overrides_in_the_image(machine: Machine, pods: AddPod, seen: Add) -> None:
    if machine.library is None:
        pytest.skip("only the library reads it")
    pod = pods("image", mib=LIMIT)
    pod.overrides = (
        "CUDA_DEVICE_MEMORY_LIMIT_0=16g\nCUDA_DEVICE_MEMORY_SHARED_CACHE=/tmp/own.cache\n"
    )
    load = pod.load()
    load.do("nvml")  # now the library sets the variables, for child processes too
    result = load.do("spawn alloc 6g").rpartition(": ")[2]
    judge(seen, "a file /overrideEnv in the image", result)
