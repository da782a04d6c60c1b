"""`leasehold up --gpus local`: the node agent of production on the GPU of this machine."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import write_limits
from tests.hardware.conftest import Add
from tests.hardware.machine import Machine
from tests.support.gpu_driver import GIB, MIB
from tests.support.stack import Stack, gpu_pod, stack
from tests.support.waiting import until

LIMIT = 4000
BUSY_S = 100
TOGETHER_S = 24
WATCHED_S = 10.0


def pod(machine: Machine, name: str, *commands: str, cores: int = 0) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": LIMIT, "nvidia.com/gpucores": cores}
    made = gpu_pod(name, limits, restartPolicy="Never")
    made["spec"]["containers"][0]["command"] = [str(machine.folder / "gpu-load"), *commands]
    return made


async def measured(up: Stack, name: str) -> dict[str, Any]:
    """Return what `leasehold top` shows of a pod's share."""
    shares = json.loads((await up.leasehold("top", "--json")).out)["shares"]
    return next((one["measured"] or {} for one in shares if one["name"] == name), {})


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used, by its clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


async def region_of(up: Stack, name: str) -> Path:
    """Return the path of a pod's region."""
    uid = (await up.pod(name))["metadata"]["uid"]
    return next(path for folder in up.root.rglob(f"{uid}_*") for path in folder.glob("*.cache"))


async def try_two_at_once(up: Stack, machine: Machine, seen: Add) -> None:
    """Start two pods whose processes appear in the driver's list at the same moment."""
    names = ("one", "other")
    limit = 30
    burn = f"burn {TOGETHER_S}s 1000 640 {machine.loops}"
    for name in names:
        await up.create(pod(machine, name, "alloc 1g", burn, cores=limit))
    for name in names:
        await up.until(name, lambda found: found["status"].get("phase") == "Running")

    async def processes() -> list[tuple[int, int, int]]:
        """Return PIDs, MiB counted and MiB by NVML."""
        sample = await asyncio.to_thread(machine.sample)
        used = {one.pid: (one.memory_bytes or 0) // MIB for one in sample.processes}
        regions = [read_region(await region_of(up, name)) for name in names]
        slots = [slot for one in regions if isinstance(one, Region) for slot in one.slots]
        return [
            (slot.host_pid, slot.total[0] // MIB, used[slot.host_pid])
            for slot in slots
            if slot.host_pid in used
        ]

    def complete(rows: list[tuple[int, int, int]]) -> bool:
        differ = [abs(counted - used) for _, counted, used in rows]
        return len({pid for pid, *_ in rows}) == 2 and max(differ) <= 64

    began = time.monotonic()
    with contextlib.suppress(AssertionError):
        await until(processes, complete, limit_s=12)
    took = time.monotonic() - began
    found = await processes()
    figure = ", ".join(f"{mib} counted, {used} by NVML" for _, mib, used in found)
    shows = f"MiB of two pods that start at once, each by its own PID, after {took:.0f} s"
    seen(shows, figure, "equal", holds=complete(found))
    await asyncio.sleep(6)  # the average of the agent's window
    got = [(await measured(up, name))["cores_percent"] for name in names]
    seen(f"percent of the GPU that they get, limit {limit}", " and ".join(map(str, got)))
    for name in names:
        await up.until(name, lambda found: found["status"].get("phase") == "Succeeded")


async def try_pods(up: Stack, machine: Machine, seen: Add) -> None:
    agent = next(c["name"] for c in up.state()["components"] if "agent" in c["name"])
    await up.create(pod(machine, "busy", "alloc 1g", f"burn {BUSY_S}s 1000 640 {machine.loops}"))
    await until(lambda: measured(up, "busy"), lambda m: (m.get("cores_percent") or 0) > 20)
    await asyncio.sleep(6)  # the average of the agent's window
    shown = await measured(up, "busy")
    by_driver = [p for p in (await asyncio.to_thread(machine.sample)).processes if p.memory_bytes]
    used = (by_driver[0].memory_bytes or 0) // MIB
    percent = by_driver[0].busy_percent or 0
    figure = f"{shown['memory_mib']} MiB, {shown['cores_percent']} %"
    holds = abs(shown["memory_mib"] - used) <= 64 and abs(shown["cores_percent"] - percent) <= 25
    seen("a busy pod in `leasehold top`", figure, f"by NVML {used} MiB, {percent} %", holds=holds)

    before = cpu_s(up.pid(agent))
    began = time.monotonic()
    await asyncio.sleep(WATCHED_S)
    cost = (cpu_s(up.pid(agent)) - before) / (time.monotonic() - began) * 1000
    seen("ms of CPU per second of the agent", f"{cost:.1f}", "at most 2", holds=cost <= 2)

    await up.create(pod(machine, "over", "alloc 6g"))
    await up.until("over", lambda found: found["status"].get("phase") == "Failed")
    text = (await up.kube.read("/api/v1/namespaces/default/pods/over/log")).decode().strip()
    said = text.splitlines()[-1]
    seen("6 GiB of a pod of 4000 MiB", said, "alloc 6g: out of memory", holds="out of mem" in said)

    place = await region_of(up, "busy")
    write_limits(place, RegionSeed(memory_bytes=(64 * GIB,), cores_percent=(0,)))
    began = time.monotonic()

    async def limit() -> int:
        region = read_region(place)
        return region.memory_limits[0] // MIB if isinstance(region, Region) else 0

    await until(limit, lambda mib: mib == LIMIT)
    took = time.monotonic() - began
    shows = "s until a limit is back that a pod has raised"
    seen(shows, f"{took:.1f}", "at most 10", holds=took <= 10)

    old = up.pid(agent)
    up.kill(agent)
    began = time.monotonic()

    async def again() -> bool:
        pids = [c["pid"] for c in up.state()["components"] if c["name"] == agent]
        restarted = not {None, old}.intersection(pids)
        return restarted and bool((await measured(up, "busy")).get("cores_percent"))

    await until(again, bool, limit_s=60)
    running = (await up.pod("busy"))["status"]["phase"]
    figure = f"{running}, measured again after {time.monotonic() - began:.1f} s"
    seen("a busy pod after kill -9 of the agent", figure, "Running", holds=running == "Running")
    await up.audit()


def test_pods_of_a_cluster_on_this_machine(machine: Machine, seen: Add) -> None:
    if machine.library is None or machine.quick:
        pytest.skip("tests/e2e/test_local_gpus.py shows it without a real GPU")

    async def run() -> None:
        began = time.monotonic()
        flags = ("--gpus", "local", "--library-source", str(machine.library), "--combined")
        async with stack(*flags, env=machine.environment) as up:
            seen("s until `leasehold up --gpus local` is ready", f"{time.monotonic() - began:.0f}")
            await try_two_at_once(up, machine, seen)
            await try_pods(up, machine, seen)

    asyncio.run(run())
