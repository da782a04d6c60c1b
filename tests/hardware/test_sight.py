"""What the node agent sees while a pod computes, and what looking costs."""

import resource
import time

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.gpu_driver import MIB

PERIOD_S = 5.0
"""Of the agent's samples."""
LIMIT_S = 20.0
"""Within it a pod that computes is seen to."""


def test_utilization_and_memory_while_a_pod_computes(
    machine: Machine, pods: AddPod, seen: Add
) -> None:
    pod = pods("busy", mib=4096)
    load = pod.load()
    assert load.fits("1g")
    least = 80 if machine.real else 20  # the simulated driver depends on how busy this machine is
    load.send(f"burn {LIMIT_S + PERIOD_S:g}s 1000 640 {machine.loops}")
    began = time.monotonic()
    percent = 0
    of_pod = 0
    while min(percent, of_pod) < least and time.monotonic() < began + LIMIT_S:
        time.sleep(PERIOD_S if machine.real else 1.0)
        sample = machine.sample()
        busy = [p.busy_percent or 0 for p in sample.processes if p.pid in pod.pids]
        of_pod = max(busy, default=0)
        percent = sample.busy_percent or 0

    shows = "percent while one pod computes: of the GPU, of its process"
    holds = min(percent, of_pod) >= least
    seen(shows, f"{percent}, {of_pod}", f"at least {least}", holds=holds)
    if machine.real:
        names = "utilization.gpu,memory.used,power.draw,temperature.gpu"
        query = (f"--query-gpu={names}", "--format=csv,noheader,nounits")
        shown = machine.run("nvidia-smi", "-i", machine.gpu.uuid, *query).strip().split(", ")
        seen("percent, MiB, W and °C by nvidia-smi", ", ".join(shown))
        used = sample.used_bytes // MIB
        theirs = int(shown[1])
        holds = abs(used - theirs) <= 64
        seen("MiB used: ours, nvidia-smi", f"{used}, {theirs}", "within 64", holds=holds)


def test_what_looking_costs(machine: Machine, pods: AddPod, seen: Add) -> None:
    loads = [pods(f"cost{n}", mib=1024).load() for n in range(3)]
    machine.sample()
    count = 50

    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(count):
        machine.sample()
    after = resource.getrusage(resource.RUSAGE_SELF)

    took = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / count * 1000
    figure = f"{took:.2f}: {took / PERIOD_S:.2f} per second"
    holds = took / PERIOD_S <= 2 if machine.real else None
    shows = f"ms of CPU for a sample, {len(loads)} processes"
    seen(shows, figure, "at most 2 per second", holds=holds)
