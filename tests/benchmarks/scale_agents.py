"""The agents of all nodes in one process: they send on NATS what real ones would.

Each reports its devices and allocations every 10 s and on request, asks for its leases every 30 s,
sends a heartbeat every 5 s, and admits every pod. Each of its devices has one active lease.
"""

import asyncio
import contextlib
import time
from dataclasses import replace

from services.node_agent.service import LEASE_SYNC_S
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import Heartbeat, ResyncRequested
from shared.model.events.request_reply import BindReply, BindRequest, LeasesReply, LeasesRequest
from shared.model.leases.lease import LeaseState
from shared.model.names import NodeName
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.benchmarks.trivial_apiserver import DEVICES
from tests.support import build
from tests.support.servers.nats import flush

TRIGGER = build.TRIGGER
TICK_S = 0.01
"""Reports of several nodes are sent together only if they are due within it."""


def node_name(number):
    return NodeName(f"node-{number}")


def devices_of(number):
    about = {"model": "NVIDIA A100-SXM4-80GB", "memory_mib": 81_920}
    return build.devices(DEVICES, f"{number:05d}", **about)


def lease_of(number, device):
    """Return the active lease of a node's device."""
    asked = {"memory_mib": 40_000, "cores_percent": 60, "slot": 0, "fence": 1, "slots": 10}
    about = {"device_mib": device.memory_mib, "device_model": device.model}
    return build.lease(
        f"pod-{number}-{device.index}",
        node_name(number),
        build.share(device.uuid, device.index, "c", **asked, **about),
        namespace="bench",
        dialect="volcano-vgpu",
        resources={"cpu": 1000, "memory": 1 << 30, "pods": 1},
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        state=LeaseState.ACTIVE,
        version=1 + DEVICES * number + device.index,
        created_at=1_767_225_600.0,
    )


def report_of(number):
    allocations = tuple(
        build.allocation_of(
            lease_of(number, device),
            container="c",
            resource=TRIGGER,
            device_ids=(f"{device.uuid}::0",),
        )
        for device in devices_of(number)
    )
    about = {"node": node_name(number), "devices": devices_of(number), "served": (TRIGGER,)}
    return DeviceReported(**about, allocations=allocations)


async def publish(bus, event):
    while True:
        try:
            return await bus.publish([event])
        except UnavailableError:
            await asyncio.sleep(TICK_S)


async def repeat(nodes, interval_s, act):
    """Act for each node once per interval, evenly spread."""
    began = time.monotonic()
    done = 0
    while True:
        await asyncio.sleep(TICK_S)
        due = int((time.monotonic() - began) / interval_s * nodes)
        for number in range(done, due):
            await act(number % nodes)
        done = due


async def _serve(url, nodes, report_s, ready):
    reports = [report_of(number) for number in range(nodes)]
    beat_s = Heartbeat(service="", instance="").interval_s

    async def admit(_):
        return BindReply()

    async def report(number):
        await publish(buses[number], replace(reports[number], reported_at=time.time()))

    async def beat(number):
        about = {"instance": f"a{number}", "node": node_name(number)}
        await publish(buses[number], Heartbeat(service="node-agent", **about))

    async def ask_leases(number):
        with contextlib.suppress(UnavailableError):
            await buses[number].request(LeasesRequest(node=node_name(number)), LeasesReply)

    async def resync():
        """Report all nodes whenever it is requested."""
        inbox = await buses[0].observe([ResyncRequested])
        while True:
            await inbox.batch()
            for number in range(nodes):
                await report(number)

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        users = [subjects.user_of("node-agent", node_name(number)) for number in range(nodes)]
        # One connection each: replies go to the inbox of the agent that sent the request.
        buses = [await stack.enter_async_context(Bus.connect(url, name=user)) for user in users]
        for number, bus in enumerate(buses):
            await bus.reply(BindRequest, "agent", node_name(number), admit, concurrency=64)
        tasks.create_task(resync())
        tasks.create_task(repeat(nodes, report_s, report))
        tasks.create_task(repeat(nodes, LEASE_SYNC_S, ask_leases))
        tasks.create_task(repeat(nodes, beat_s, beat))
        await flush(buses[-1].client)
        ready()


def serve(url, nodes, report_s, ready):
    """Run the agents of so many nodes."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(url, nodes, report_s, ready))
