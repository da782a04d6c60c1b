"""The agents of all nodes in one process: they say on NATS what real ones would.

Each reports its devices and allocations every 10 s and on request, asks for its leases every 30 s,
sends a heartbeat every 5 s, and admits every pod. Each of its devices has one active lease.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from services.node_agent.agent_timing import DEFAULT_TIMING
from shared.model.device import Device
from shared.model.errors import UnavailableError
from shared.model.events.event import Event
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import Heartbeat, ResyncRequested
from shared.model.events.request_reply import BindReply, BindRequest, LeasesReply, LeasesRequest
from shared.model.lease import Lease, LeaseState, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.nats.bus import Bus
from tests.benchmarks.trivial_apiserver import DEVICES
from tests.support.servers.nats import flush

TRIGGER = "volcano.sh/vgpu-number"
TICK_S = 0.01
"""Reports of several nodes are sent together only if they are due within it."""
CREATED_AT = 1_767_225_600.0


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


def lease_of(number: int, device: Device) -> Lease:
    """Return the active lease of a node's device."""
    pod = PodUid(f"pod-{number}-{device.index}")
    share = Share(
        container="c",
        device=device.uuid,
        index=device.index,
        device_mib=device.memory_mib,
        device_model=device.model,
        memory_mib=40_000,
        cores_percent=60,
        slot=0,
        fence=1,
        slots=10,
    )
    return Lease(
        pod=pod,
        namespace=Namespace("bench"),
        name=pod,
        node=node_name(number),
        shares=(share,),
        dialect="volcano-vgpu",
        resources={"cpu": 1000, "memory": 1 << 30, "pods": 1},
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        state=LeaseState.ACTIVE,
        version=1 + DEVICES * number + device.index,
        created_at=CREATED_AT,
    )


class Agents:
    """What all agents know."""

    def __init__(self, bus: Bus, nodes: int) -> None:
        self.bus = bus
        self.nodes = nodes
        self.reports = [_report(number) for number in range(nodes)]

    def report(self, number: int) -> DeviceReported:
        """Return the report of one node."""
        return replace(self.reports[number], reported_at=time.time())

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


def _report(number: int) -> DeviceReported:
    devices = devices_of(number)
    return DeviceReported(
        node=node_name(number),
        devices=devices,
        served=(TRIGGER,),
        allocations=tuple(_allocation(lease_of(number, device)) for device in devices),
    )


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


async def _serve(url: str, nodes: int, report_s: float, ready: Callable[[], None]) -> None:
    async with Bus.connect(url, name="agents") as bus, asyncio.TaskGroup() as tasks:
        agents = Agents(bus, nodes)
        await bus.reply(BindRequest, "agent", "", agents.admit, concurrency=64)
        tasks.create_task(agents.resync())
        tasks.create_task(agents.repeat(report_s, agents.send_report))
        tasks.create_task(agents.repeat(DEFAULT_TIMING.lease_sync_s, agents.ask_leases))
        tasks.create_task(agents.repeat(Heartbeat(service="", instance="").interval_s, agents.beat))
        await flush(bus.client)
        ready()


def serve(url: str, nodes: int, report_s: float, ready: Callable[[], None]) -> None:
    """Run the agents of so many nodes."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(url, nodes, report_s, ready))
