"""What asking agents before binding costs: `python -m tests.benchmarks.presence --help`.

Agents are a process of their own that answers for every node over a real nats-server; the binder's
side is this process. Batches of pods are held up to `AgentPresence`: all on different nodes, so
that nothing is shared ("thin"), or all on one ("thick"). Measured per batch: time until the answer,
and CPU time of this process per pod. Nothing is bound. Ceiling: 5 ms for a thin batch of 64.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence

from services.binder.agent_client import NodeAgentClient
from services.binder.bind.agent_presence import AgentPresence
from shared.model.clock import SystemClock
from shared.model.events.request_reply import BindReply, BindRequest
from shared.model.lease import Lease
from shared.model.names import NodeName
from shared.nats.bus import Bus
from tests.support.binder.world import lease
from tests.support.servers.nats import flush, nats_server

CEILING_MS = 5.0


class Reported:
    """A ledger that knows agents on all nodes."""

    async def reported_by_agent(self, _: NodeName) -> bool:
        return True


async def _serve(url: str, nodes: int, ready: Callable[[], None]) -> None:
    async def reply(_: BindRequest) -> BindReply:
        return BindReply()

    async with Bus.connect(url, name="agents") as bus:
        for n in range(nodes):
            await bus.reply(BindRequest, "agent", f"n{n}", reply)
        await flush(bus.client)
        ready()
        await asyncio.Event().wait()


def _agents(url: str, nodes: int, ready: Callable[[], None]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(url, nodes, ready))


async def measure(bus: Bus, batches: Sequence[Sequence[Lease]], label: str) -> float:
    """Return the median time of a batch, in ms; each begins with nothing trusted."""
    presence = AgentPresence(NodeAgentClient(bus), Reported().reported_by_agent, SystemClock())
    took, cpu = [], time.process_time()
    for batch in batches:
        began = time.perf_counter()
        assert await presence.deferrals(batch) == {}
        took.append((time.perf_counter() - began) * 1e3)
    cpu_us = (time.process_time() - cpu) * 1e6 / sum(map(len, batches))
    worst = statistics.quantiles(took, n=100)[98]
    print(
        f"{label}: median {statistics.median(took):.2f} ms, p99 {worst:.2f} ms a batch; "
        f"{cpu_us:.0f} us of CPU a pod"
    )
    return statistics.median(took)


async def run(nodes: int, times: int) -> float:
    async with nats_server() as server:
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        agents = context.Process(target=_agents, args=(server.url, nodes, ready.set), daemon=True)
        agents.start()
        try:
            while not ready.is_set():
                await asyncio.sleep(0.1)
            async with Bus.connect(server.url, name="binder") as bus:
                leases = [lease(f"p{n}", node=f"n{n}") for n in range(nodes)]
                await measure(bus, [[leases[n % nodes]] for n in range(times)], "1 pod, thin")
                thick = [[lease(f"p{n}", node="n0") for n in range(64)]] * times
                await measure(bus, thick, "64 pods, thick")
                thin = [[leases[(64 * n + i) % nodes] for i in range(64)] for n in range(times)]
                return await measure(bus, thin, "64 pods, thin")
        finally:
            agents.terminate()
            agents.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--times", type=int, default=300)
    options = parser.parse_args()
    median_ms = asyncio.run(run(options.nodes, options.times))
    raise SystemExit(median_ms > CEILING_MS)


if __name__ == "__main__":
    main()
