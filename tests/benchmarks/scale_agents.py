"""The agents of all nodes in one process: they say on NATS what real ones would.

Each reports its devices and allocations every 10 s and on request, asks for its leases every 30 s,
sends a heartbeat every 5 s, and admits every pod.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from services.node_agent.agent_timing import DEFAULT_TIMING
from shared.ledger.leases import RedisLeases
from shared.model.device import Device
from shared.model.errors import UnavailableError
from shared.model.events.event import Event
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import Heartbeat, ResyncRequested
from shared.model.events.request_reply import BindReply, BindRequest, LeasesReply, LeasesRequest
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, NodeName
from shared.nats.bus import Bus
from tests.benchmarks.trivial_apiserver import DEVICES
from tests.support.servers.nats import flush

TRIGGER = "volcano.sh/vgpu-number"
TICK_S = 0.1


def node_name(number: int) -> NodeName:
    return NodeName(f"node-{number}")


def devices_of(number: int) -> tuple[Device, ...]:
    """Return the devices of a node."""
    return tuple(
        Device(
            uuid=DeviceUuid(f"GPU-{number:05d}-{index}"),
            index=index,
            model="NVIDIA A100-SXM4-80GB",
            memory_mib=81_920,
            slots=10,
        )
        for index in range(DEVICES)
    )


class Agents:
    """What all agents know."""

    def __init__(self, bus: Bus, nodes: int) -> None:
        self.bus = bus
        self.nodes = nodes
        self.allocations: list[dict[str, Allocation]] = [{} for _ in range(nodes)]

    def report(self, number: int) -> DeviceReported:
        """Return the report of one node."""
        return DeviceReported(
            node=node_name(number),
            devices=devices_of(number),
            served=(TRIGGER,),
            allocations=tuple(self.allocations[number].values()),
            reported_at=time.time(),
        )

    async def admit(self, _: BindRequest) -> BindReply:
        """Admit pods."""
        return BindReply()

    async def resync(self) -> None:
        """Report all nodes whenever someone asks for it."""
        inbox = await self.bus.observe([ResyncRequested])
        while True:
            await inbox.batch()
            for number in range(self.nodes):
                await self._publish([self.report(number)])

    async def repeat(self, interval_s: float, act: Callable[[int], Awaitable[None]]) -> None:
        """Act for each node once per interval, evenly spread."""
        began = time.monotonic()
        done = 0
        while True:
            await asyncio.sleep(TICK_S)
            due = int((time.monotonic() - began) / interval_s * self.nodes)
            for number in range(done, due):
                await act(number % self.nodes)
            done = due

    async def send_report(self, number: int) -> None:
        """Report as agents do without a change."""
        await self._publish([self.report(number)])

    async def beat(self, number: int) -> None:
        """Send a heartbeat."""
        beat = Heartbeat(service="node-agent", instance=f"a{number}", node=node_name(number))
        await self._publish([beat])

    async def ask_leases(self, number: int) -> None:
        """Ask for a node's leases."""
        with contextlib.suppress(UnavailableError):
            await self.bus.request(LeasesRequest(node=node_name(number)), LeasesReply)

    async def _publish(self, events: Sequence[Event]) -> None:
        while True:
            try:
                await self.bus.publish(events)
            except UnavailableError:
                await asyncio.sleep(TICK_S)
            else:
                return


def _allocation(lease: Lease) -> Allocation:
    return Allocation(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        container="c",
        resource=TRIGGER,
        device_ids=tuple(f"{share.device}-{share.slot}" for share in lease.shares),
        lease=lease,
    )


async def _serve(url: str, redis_url: str, nodes: int, ready: Callable[[], None]) -> None:
    async with Bus.connect(url, name="agents") as bus, asyncio.TaskGroup() as tasks:
        agents = Agents(bus, nodes)
        await bus.reply(BindRequest, "agent", "", agents.admit, concurrency=64)
        async with RedisLeases.connect(redis_url) as ledger:
            async for leases in ledger.load_all():
                for lease in leases:
                    known = agents.allocations[int(lease.node.partition("-")[2])]
                    known[lease.pod] = _allocation(lease)
        tasks.create_task(agents.resync())
        tasks.create_task(agents.repeat(DEFAULT_TIMING.report_s, agents.send_report))
        tasks.create_task(agents.repeat(DEFAULT_TIMING.lease_sync_s, agents.ask_leases))
        tasks.create_task(agents.repeat(Heartbeat(service="", instance="").interval_s, agents.beat))
        await flush(bus.client)
        ready()


def serve(url: str, redis_url: str, nodes: int, ready: Callable[[], None]) -> None:
    """Run the agents of so many nodes; their allocations are the ledger's leases."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(url, redis_url, nodes, ready))
