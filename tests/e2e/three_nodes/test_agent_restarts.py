"""An agent is killed while pods arrive: those on their way to the kubelet fail, and no more."""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

from services.node_agent.allocate.admission_window import MAX_IN_FLIGHT
from tests.support.dialects.checklist import asking
from tests.support.stack import Stack, vgpu
from tests.support.waiting import until

PODS = 50


async def test_few_pods_of_a_burst_fail_when_an_agent_is_killed(up: Stack) -> None:
    before = up.pid("agent-node-0")
    names = [f"p{n}" for n in range(PODS)]
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(up.create(asking(name, vgpu(memory=1000))))
        tasks.create_task(killed_at(up, before, bound=5))
    phases = await until(
        lambda: phases_of(up),
        lambda numbers: numbers["Running"] + numbers["Failed"] >= PODS,
        limit_s=120,  # the kubelet retries a refused start after 10 s, and perhaps more than once
    )
    await until(lambda: pid_of(up, "agent-node-0") not in {None, before})

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


def pid_of(up: Stack, part: str) -> int | None:
    pid: int | None = next(p for p in up.state()["components"] if p["name"] == part)["pid"]
    return pid
