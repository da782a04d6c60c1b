"""The agent keeps no object of kubelets that restart, pods that end, and devices that change."""

import asyncio
import gc
from collections import Counter
from pathlib import Path

from services.node_agent.service import NodeAgent
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until

WARM_UP = 2
CYCLES = 6
"""Both even: a device is missing when objects are counted, before and after."""
SLOTS = 10
RATE = 100
"""Of the agent's clock."""


def counts() -> Counter[str]:
    """Count what lives of the agent and of gRPC, the tasks, and the open files.

    Timers that were cancelled do not count: an event loop drops them when they are due.
    """
    gc.collect()
    found = Counter(
        f"{type(one).__module__}.{type(one).__qualname__}"
        for one in gc.get_objects()
        if str(type(one).__module__).startswith(("services.", "grpc", "asyncio."))
        and not (isinstance(one, asyncio.TimerHandle) and one.cancelled())
    )
    found["tasks"] = len(asyncio.all_tasks())
    found["open files"] = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return found


async def cycle(cluster: OneNodeCluster, agent: NodeAgent, number: int) -> None:
    """A pod runs and ends, a device vanishes or returns, and the kubelet restarts."""
    name = f"pod-{number}"
    lease = cluster.bind(pod(name, limits={NUMBER: 1}), share(0, 1000, fence=number + 1))
    await cluster.node.phase(name, "Running")
    cluster.inject(**({"gpu1": "vanish"} if number % 2 else {}))
    registered = _registrations(agent)
    await cluster.node.kubelet.restart()
    await until(lambda: all(_registrations(agent)[one] > registered[one] for one in registered))
    await until(lambda: int(cluster.node.amount(NUMBER) or 0) >= SLOTS)
    await cluster.delete_pod(name)
    await cluster.release(lease)
    await until(lambda: not agent.checkpoint.allocations)
    cluster.events.clear()
    cluster.ledger.requests.clear()


def _registrations(agent: NodeAgent) -> dict[str, int]:
    return {name: end.registrations for name, end in agent.plugins.endpoints.items()}


async def test_no_object_of_the_agent_outlives_its_use() -> None:
    async with one_node_cluster(rate=RATE) as cluster, cluster.running() as agent:
        for number in range(WARM_UP):
            await cycle(cluster, agent, number)
        before = counts()
        for number in range(WARM_UP, WARM_UP + CYCLES):
            await cycle(cluster, agent, number)
        # gRPC keeps a server's methods for a moment after it has stopped.
        await until(lambda: _grown(before), lambda grown: not grown, limit_s=20)


def _grown(before: Counter[str]) -> dict[str, int]:
    """Return what there is once more, or more often, for each cycle."""
    return {name: n for name, n in (counts() - before).items() if n >= CYCLES - 1}
