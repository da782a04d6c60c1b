"""Agents are replaced or killed while pods arrive.

Of one that is stopped no pod is refused for good; of one that is killed, those that were on
their way to the kubelet are, and no more.
"""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

from services.node_agent.allocate.admission_window import MAX_IN_FLIGHT
from tests.support.dialects.checklist import asking
from tests.support.stack import Stack, running, vgpu
from tests.support.waiting import until

PODS = 50
RESTARTS = 2
UNBOUND = 5


async def test_every_pod_of_a_burst_runs_while_agents_restart(up: Stack) -> None:
    names = [f"p{n}" for n in range(PODS)]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(arrive(up, names))
        for number in range(RESTARTS):
            await until_bound(up, number * PODS // RESTARTS)
            await restarted(up, "agent-node-0")
    left = await waiting_for(up, names)

    assert not left
    await up.audit()


async def test_few_pods_of_a_burst_fail_when_an_agent_is_killed(up: Stack) -> None:
    before = up.pid("agent-node-0")
    names = [f"p{n}" for n in range(PODS)]
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(up.create(asking(name, vgpu(memory=1000))))
        tasks.create_task(killed_at(up, before, bound=5))
    phases = await until(
        lambda: phases_of(up), lambda found: found["Running"] + found["Failed"] >= PODS
    )

    assert pid_of(up, "agent-node-0") != before
    assert phases["Failed"] <= MAX_IN_FLIGHT + 1, (
        "pods in flight, and one whose Allocate call has just returned"
    )
    await up.audit()


async def killed_at(up: Stack, pid: int, *, bound: int) -> None:
    """Kill the process when so many pods are bound."""
    await until_bound(up, bound)
    os.kill(pid, signal.SIGKILL)


async def until_bound(up: Stack, least: int) -> None:
    await until(up.pods, lambda pods: count_bound(pods) >= least)


def count_bound(pods: list[dict[str, Any]]) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in pods)


async def phases_of(up: Stack) -> Counter[str]:
    return Counter(pod["status"].get("phase", "") for pod in await up.pods())


async def arrive(up: Stack, names: list[str]) -> None:
    """Create pods, each one when few of those before it are not bound."""
    for name in names:
        await until(up.pods, lambda pods: len(pods) - count_bound(pods) < UNBOUND)
        await up.create(asking(name, vgpu(memory=1000)))


async def restarted(up: Stack, part: str) -> None:
    """Stop a part as Kubernetes does, and wait until another process is in its place."""
    before = up.pid(part)
    os.kill(before, signal.SIGTERM)
    await until(lambda: pid_of(up, part) not in {None, before}, limit_s=60)


def pid_of(up: Stack, part: str) -> int | None:
    found: int | None = next(p for p in up.state()["components"] if p["name"] == part)["pid"]
    return found


async def waiting_for(up: Stack, names: list[str]) -> dict[str, str]:
    """Wait until all pods run or one has failed; return the status of those that do not run."""

    async def left() -> dict[str, str]:
        pods = {pod["metadata"]["name"]: pod for pod in await up.pods()}
        return {
            name: f"{pods[name]['status'].get('phase')}: {pods[name]['status'].get('message')}"
            for name in names
            if name not in pods or not running(pods[name])
        }

    failed: dict[str, str] = await until(
        left, lambda pods: not pods or any(text.startswith("Failed") for text in pods.values())
    )
    return failed
