"""Agents are replaced or killed while pods arrive.

Of one that is told to stop no pod is refused for good; of one that is killed, those that were on
their way to the kubelet are, and no more.
"""

import asyncio
import os
import signal
from collections import Counter

from services.node_agent.allocate.admission_window import MAX_IN_FLIGHT
from tests.support.stack import Stack, gpu_pod, running, stack, vgpu

PODS = 50
RESTARTS = 2


async def test_agents_restart_during_a_burst_and_every_pod_runs() -> None:
    async with stack("--nodes", "1", "--gpus", "8xA100-80GB") as up:
        names = [f"p{n}" for n in range(PODS)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive(up, names))
            for _ in range(RESTARTS):
                await restarted(up, "agent-node-0")
        left = await waiting_for(up, names)

        assert not left
        await up.audit()


async def test_an_agent_that_is_killed_takes_few_pods_with_it() -> None:
    async with stack("--nodes", "1", "--gpus", "8xA100-80GB") as up:
        before = up.pid("agent-node-0")
        names = [f"p{n}" for n in range(PODS)]
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(up.create(gpu_pod(name, vgpu(memory=1000))))
            tasks.create_task(killed_at(up, before, bound=5))
        async with asyncio.timeout(60):
            while (phases := Counter(p["status"].get("phase") for p in await up.pods()))[
                "Running"
            ] + phases["Failed"] < PODS:
                await asyncio.sleep(0.1)

        assert pid_of(up, "agent-node-0") != before
        assert phases["Failed"] <= MAX_IN_FLIGHT + 1, (
            "those on their way, and one that was just answered"
        )
        await up.audit()


async def killed_at(up: Stack, pid: int, *, bound: int) -> None:
    """Kill the process when so many pods are bound."""
    while sum(bool(pod["spec"].get("nodeName")) for pod in await up.pods()) < bound:
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


async def arrive(up: Stack, names: list[str]) -> None:
    for name in names:
        await up.create(gpu_pod(name, vgpu(memory=1000)))
        await asyncio.sleep(0.1)


async def restarted(up: Stack, part: str) -> None:
    """Stop a part as Kubernetes does, and wait until another process is in its place."""
    before = up.pid(part)
    os.kill(before, signal.SIGTERM)
    async with asyncio.timeout(60):
        while pid_of(up, part) in {None, before}:
            await asyncio.sleep(0.05)


def pid_of(up: Stack, part: str) -> int | None:
    found: int | None = next(p for p in up.state()["components"] if p["name"] == part)["pid"]
    return found


async def waiting_for(up: Stack, names: list[str]) -> dict[str, str]:
    """Wait until all pods run; return what became of those that never will, or not in time."""
    left: dict[str, str] = {}
    for _ in range(600):
        pods = {pod["metadata"]["name"]: pod for pod in await up.pods()}
        left = {
            name: f"{pods[name]['status'].get('phase')}: {pods[name]['status'].get('message')}"
            for name in names
            if name not in pods or not running(pods[name])
        }
        if not left or any(text.startswith("Failed") for text in left.values()):
            return left
        await asyncio.sleep(0.1)
    return left
