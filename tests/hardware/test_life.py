"""Limits and memory over the life of pods: resized, killed, one after the other."""

import time
from pathlib import Path

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.gpu_driver import MIB

LIMIT = 4096


def test_a_limit_raised_and_lowered_while_a_process_runs(
    machine: Machine, pods: AddPod, seen: Add
) -> None:
    pod = pods("resized", mib=LIMIT)
    load = pod.load()
    assert load.fits("2g")
    before = load.fits("3g")

    pod.resize(8192)
    raised = load.fits("3g")
    shown = load.value("info", "total") // MIB
    pod.resize(6144)
    lowered = load.fits("2g")

    figure = ", ".join("given" if one else "refused" for one in (before, raised, lowered))
    shows = "3 GiB more at 4 GiB, at 8 GiB; 2 GiB more at 6 GiB"
    seen(shows, figure, "refused, given, refused")
    seen("MiB that CUDA shows after the raise", shown, 8192)
    assert load.do("burn 200ms").endswith("%"), "the process lives"


def test_a_killed_pod_leaves_its_memory_to_the_next_at_once(
    machine: Machine, pods: AddPod, seen: Add
) -> None:
    size = machine.gpu.usable_mib * 2 // 3
    first = pods("killed", mib=size)
    load = first.load()
    assert load.fits(f"{size - 2048}m")

    following = pods("next", mib=size)
    load.kill()
    began = time.monotonic()
    second = following.load()
    while not second.fits(f"{size - 2048}m"):
        assert time.monotonic() < began + 20, "the memory of a killed process is still in use"
        time.sleep(0.05)

    took = f"{time.monotonic() - began:.2f}"
    seen("s after kill -9 until the next pod has two thirds of the GPU", took)


def test_pods_in_a_row_on_one_share(machine: Machine, pods: AddPod, seen: Add) -> None:
    count = 5 if machine.quick else 20
    given = []
    spans = []
    for _ in range(count):
        began = time.monotonic()
        pod = pods("row", mib=LIMIT)
        load = pod.load()
        spans.append(time.monotonic() - began)
        given.append(load.value(f"fill alloc {LIMIT + 512}", "mib") + pod.counted().context // MIB)
        load.kill()

    holds = all(LIMIT - 1 <= one <= LIMIT for one in given)
    seen(f"MiB of {count} pods in a row", f"{min(given)} to {max(given)}", LIMIT, holds=holds)
    seen("s from a pod's start to its context, median", f"{sorted(spans)[count // 2]:.2f}")


def test_a_lost_region_while_a_process_runs(machine: Machine, pods: AddPod, seen: Add) -> None:
    pod = pods("lost", mib=LIMIT)
    load = pod.load()
    assert load.fits("1g")

    Path(pod.place).unlink()
    over = load.fits("4g")

    figure = "given" if over else "refused"
    seen("4 GiB more of a running process whose region was removed", figure, "refused")
