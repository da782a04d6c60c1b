"""Time on the simulated GPUs: turns of processes, events, captures, and what NVML shows of it."""

import subprocess
import sys
import time

import pynvml
import pytest

from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.waiting import until_blocking

ONE = gpu(1)
SECONDS = 5
"""In one of them no program is held up by a busy machine for so long that its queue is empty."""
CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
void, byref = ctypes.c_void_p, ctypes.byref
def call(name, *arguments):
    return getattr(cuda, name)(*arguments)
def made(name, *arguments):
    handle = void()
    assert call(name, byref(handle), *arguments) == 0, name
    return handle
assert call("cuInit", 0) == 0
assert call("cuCtxSetCurrent", made("cuDevicePrimaryCtxRetain", 0)) == 0
stream, first, last = made("cuStreamCreate", 0), made("cuEventCreate", 0), made("cuEventCreate", 0)
module = made("cuModuleLoadData", b"")
kernel = made("cuModuleGetFunction", module, b"us_1000")
def launch(times, kernel=kernel):
    for _ in range(times):
        assert call("cuLaunchKernel", kernel, *[1] * 6, 0, stream, None, None) == 0
def elapsed():
    ms = ctypes.c_float()
    error = call("cuEventElapsedTime_v2", byref(ms), first, last)
    return error or round(ms.value, 3)
"""


def run(driver: GpuDriver, script: str) -> list[str]:
    """Return the lines that a program with the driver's functions prints."""
    command = [sys.executable, "-c", CUDA + script]
    done = subprocess.run(
        command, env=driver.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_events_measure_the_work_between_them(driver: GpuDriver) -> None:
    driver.create(ONE)

    lines = run(
        driver,
        """
launch(300)  # the GPU reaches the events later, however late this process asks for them
call("cuEventRecord", first, stream), launch(30), call("cuEventRecord", last, stream)
print(call("cuEventQuery", last), elapsed())
call("cuStreamSynchronize", stream)
print(call("cuEventQuery", last), elapsed())
""",
    )

    assert lines == ["600 600", "0 30.0"]


def test_a_graph_takes_the_time_of_what_was_captured(driver: GpuDriver) -> None:
    driver.create(ONE)

    lines = run(
        driver,
        """
call("cuStreamBeginCapture_v2", stream, 0), launch(5)
graph = void()
print(call("cuStreamEndCapture", stream, byref(graph)))
program = made("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
launch(300)  # the GPU reaches the events later, however late this process asks for them
call("cuEventRecord", first, stream), call("cuGraphLaunch", program, stream)
call("cuEventRecord", last, stream), call("cuCtxSynchronize")
print(elapsed())
""",
    )

    assert lines == ["0", "5.0"]


def test_a_query_during_a_capture_spoils_it_unless_its_thread_is_relaxed(driver: GpuDriver) -> None:
    driver.create(ONE)

    lines = run(
        driver,
        """
def captured(mode):
    mode = ctypes.c_int(mode)
    call("cuStreamBeginCapture_v2", stream, 0)
    call("cuThreadExchangeStreamCaptureMode", byref(mode))
    query = call("cuEventQuery", first)
    call("cuThreadExchangeStreamCaptureMode", byref(mode))
    return query, call("cuStreamEndCapture", stream, byref(void()))
print(*captured(0), *captured(2))
""",
    )

    assert lines == ["900 901 0 0"]


def test_functions_of_an_unloaded_module_leave_their_handles_to_others(driver: GpuDriver) -> None:
    driver.create(ONE)

    lines = run(
        driver,
        """
call("cuModuleUnload", module)
other = made("cuModuleGetFunction", made("cuModuleLoadData", b""), b"us_7000")
launch(40, other)  # the GPU reaches the events later, however late this process asks for them
call("cuEventRecord", first, stream), launch(1, other), call("cuEventRecord", last, stream)
call("cuCtxSynchronize")
print(other.value == kernel.value, elapsed())
""",
    )

    assert lines == ["True 7.0"]


def test_the_table_of_functions_has_those_of_a_default_stream_per_thread(driver: GpuDriver) -> None:
    driver.create(ONE)

    lines = run(
        driver,
        """
def address(name, flags):
    found = void()
    assert call("cuGetProcAddress_v2", name, byref(found), 12000, ctypes.c_uint64(flags), None) == 0
    return found.value
for name in (b"cuLaunchKernelEx", b"cuGraphLaunch"):
    print(address(name, 2) == address(name + b"_ptsz", 0), address(name, 2) == address(name, 0))
""",
    )

    assert lines == ["True False", "True False"]


@pytest.mark.parametrize(("processes", "expected"), [(1, 100), (2, 46), (3, 31)])
def test_processes_that_compute_take_equal_turns_and_lose_what_switches_take(
    driver: GpuDriver, processes: int, expected: int
) -> None:
    driver.create(ONE)
    loads = [driver.load() for _ in range(processes)]
    for load in loads:
        load.send("flood 60s 1000")  # a second of kernels ahead: the programs may be held up
    until_blocking(lambda: all(ran.ran_us > 50_000 for ran in driver.ran(ONE).values()))
    wanted = pytest.approx([expected] * processes, abs=1)

    for _ in range(SECONDS):
        before = driver.ran(ONE)
        time.sleep(1)
        after = driver.ran(ONE)
        percents = [after[load.pid].percent_since(before[load.pid]) for load in loads]
        if percents == wanted:
            break

    assert percents == wanted


def test_nvml_shows_of_each_process_what_it_had_in_the_last_sample_period(nvml: GpuDriver) -> None:
    nvml.create(ONE)
    loads = [nvml.load(), nvml.load()]
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(ONE.uuid)

    def percents() -> list[int]:
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
        except pynvml.NVMLError_NotFound:
            return []
        return [sample.smUtil for sample in samples]

    for load in loads:
        load.send("flood 60s 1000")
    until_blocking(
        lambda: percents() in ([45, 45], [45, 46], [46, 45], [46, 46], [46, 47], [47, 46])
    )
    loads[0].kill()

    until_blocking(lambda: percents() in ([99], [100]))


def test_a_program_that_never_waits_is_ahead_by_what_a_queue_holds(driver: GpuDriver) -> None:
    driver.create(ONE)
    load = driver.load()

    load.do("flood 100ms 1000 kernel 1")
    moments = [load.do("latency 1ms 1 1 1") for _ in range(2)]

    waited = [int(line.partition("p99_us=")[2]) for line in moments]
    assert waited[0] > 500_000 > waited[1]
