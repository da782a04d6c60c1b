"""An agent hangs while its kubelet runs: its node gets no pods, and conditions name the reason."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.dialects.checklist import asking, condition_text
from tests.support.stack import Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

AGENT = "agent-node-0"


@contextmanager
def hanging(up: Stack, part: str) -> Iterator[None]:
    pid = up.pid(part)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_pods_avoid_the_node_of_an_agent_that_hangs_until_it_replies(up: Stack) -> None:
    with hanging(up, AGENT):
        await up.create(asking("stuck", vgpu(memory=1000)))
        await up.until("stuck", lambda pod: "node-0" in condition_text(pod))
        explained = await until(lambda: explain(up), lambda text: "does not respond" in text)
        assert "node-0" in explained
        names = [f"p{n}" for n in range(6)]
        for name in names:
            await up.create(gpu_pod(name, vgpu(memory=1000)))
        for name in names:
            placed = await up.until(name, running)
            assert placed["spec"]["nodeName"] != "node-0"
        refused = await up.until("stuck", lambda pod: "0/3 nodes" in condition_text(pod))
        assert "had a node agent that was not ready" in condition_text(refused)
        text, document, doctor = await asyncio.gather(
            up.leasehold("gpus"),
            up.leasehold("gpus", "-o", "json"),
            up.leasehold("doctor", "--only", "cluster"),
        )
        assert "gets no pods: the agent of node node-0 does not respond" in text.out
        cordoned = {node["node"]: node["cordoned"] for node in json.loads(document.out)["nodes"]}
        assert "does not respond" in cordoned["node-0"]
        assert cordoned["node-1"] == ""
        assert "no heartbeat of the node-agent of node-0" in doctor.out
        assert doctor.code == 1

    await up.until("stuck", running)
    await up.audit()


async def explain(up: Stack) -> str:
    return (await up.leasehold("explain", "stuck")).out
