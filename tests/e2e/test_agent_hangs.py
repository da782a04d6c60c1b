"""An agent that hangs while its kubelet goes on: its node is left alone, and everybody is told."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.stack import Stack, gpu_pod, running, stack, vgpu

AGENT = "agent-node-0"


@contextmanager
def hanging(up: Stack, part: str) -> Iterator[None]:
    pid = up.pid(part)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def condition(pod: dict[str, Any]) -> str:
    """Return what the condition PodScheduled says against the pod."""
    found = pod["status"].get("conditions", [])
    return "".join(c.get("message", "") for c in found if c["type"] == "PodScheduled")


async def test_pods_leave_the_node_of_an_agent_that_hangs_and_come_back_when_it_answers() -> None:
    async with stack("--nodes", "2", "--gpus", "2xT4") as up:
        only = {"nodeSelector": {"kubernetes.io/hostname": "node-0"}}
        with hanging(up, AGENT):
            await up.create(gpu_pod("stuck", vgpu(memory=1000), **only))
            told = await up.until("stuck", lambda pod: "does not respond" in condition(pod))
            assert "node-0" in condition(told)
            async with asyncio.timeout(20):
                while "does not respond" not in (explained := await explain(up)):
                    await asyncio.sleep(0.1)
            assert "node-0" in explained
            names = [f"p{n}" for n in range(6)]
            for name in names:
                await up.create(gpu_pod(name, vgpu(memory=1000)))
            for name in names:
                found = await up.until(name, running)
                assert found["spec"]["nodeName"] == "node-1"
            refused = await up.until("stuck", lambda pod: "0/2 nodes" in condition(pod))
            assert "had a node agent that was not ready" in condition(refused)

        await up.until("stuck", running, limit_s=20)
        await up.audit()


async def explain(up: Stack) -> str:
    return (await up.leasehold("explain", "stuck")).out
