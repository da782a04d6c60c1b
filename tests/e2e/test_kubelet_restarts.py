"""An agent and its kubelet restart: no pod stops, and pending pods start."""

import re
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.dialects.checklist import (
    GPUS,
    SPARE,
    agent,
    allocated_setup,
    asking,
    condition_text,
    delete_all_pods,
    node_allocatable,
    restart_kubelet,
    runs,
    state_of,
)
from tests.support.stack import Stack, running, stack, vgpu

VGPU = "volcano.sh/vgpu-number"
UNSERVED = re.compile(
    "1 node.s. had a node agent that is restarting"
    "|1 node.s. had a node agent that was not ready"  # it was placed before the node was seen
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    own = (f"agent-{SPARE}",)
    async with stack("--nodes", "2", "--gpus", GPUS, without=own) as started:
        yield started


async def test_item_40_restarts_of_agent_and_kubelet_stop_no_pod_and_pending_pods_start(
    up: Stack,
) -> None:
    async with agent(up) as process:
        await node_allocatable(up, SPARE, {VGPU: 80})
        kept = await runs(up, asking("kept", vgpu(memory=1000), node=SPARE))
        before = state_of(up, kept)
        answer = await allocated_setup(up, kept)
        process.kill()
        await process.wait()
    await node_allocatable(up, SPARE, {VGPU: 0})

    await up.create(asking("late", vgpu(memory=2000), node=SPARE))
    await up.until("late", lambda pod: UNSERVED.search(condition_text(pod)))
    await restart_kubelet(up, SPARE)
    async with agent(up):
        late = await up.until("late", running)
        await restart_kubelet(up, SPARE)
        await node_allocatable(up, SPARE, {VGPU: 80})
        after = await runs(up, asking("after", vgpu(memory=3000), node=SPARE))

        assert (await up.pod("kept"))["status"]["phase"] == "Running"
        assert state_of(up, kept) == before
        assert await allocated_setup(up, kept) == answer
        assert (await allocated_setup(up, late)).envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"
        assert (await allocated_setup(up, after)).envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
        await up.audit()
        await delete_all_pods(up)
