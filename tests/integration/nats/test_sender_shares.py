"""An agent that sends without end leaves room for the messages of others."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY

from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import Heartbeat
from shared.model.events.request_reply import LeasesReply, LeasesRequest
from shared.model.names import NodeName
from shared.nats import subjects, wire
from shared.nats.sender_shares import MOST_OF_SENDER
from shared.runtime.service import handles
from tests.integration.nats.world import connected, running
from tests.support.fuzz.nats_bytes import RawClient, message
from tests.support.servers.nats import NatsServer, flush
from tests.support.waiting import until

LOUD = NodeName("loud")
QUIET = NodeName("quiet")
FLOOD = 2_000
SOON_S = 10.0


def user(node: NodeName) -> str:
    return subjects.user_of("node-agent", node)


def flood(kind: type[Event], subject: str, event: Event) -> list[bytes]:
    inbox = f"{subjects.inbox_of(user(LOUD))}.{'a' * 22}"
    data = wire.encode([event])
    return [
        message(subject.encode(), data, f"{inbox}.{number}".encode()) for number in range(FLOOD)
    ]


def over_share(kind: type[Event]) -> float:
    name = "leasehold_nats_messages_over_share_total"
    return REGISTRY.get_sample_value(name, {"subject": kind.subject}) or 0.0


@dataclass
class SlowBinder:
    """Handles nothing until its gate is opened."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    nodes: list[str] = field(default_factory=list)

    @handles
    async def save_devices(self, events: Sequence[DeviceReported]) -> None:
        await self.gate.wait()
        self.nodes += [event.node for event in events]


async def test_work_of_an_agent_beyond_its_share_is_sent_again_and_that_of_others_is_next(
    server: NatsServer,
) -> None:
    binder = SlowBinder()
    before = over_share(DeviceReported)
    report = DeviceReported(node=LOUD, devices=(), served=())
    async with (
        connected(server, "binder") as bus,
        running(bus, binder, "binder"),
        connected(server, user(QUIET)) as quiet,
    ):
        sent = flood(DeviceReported, subjects.publish_subject(DeviceReported, LOUD), report)
        await asyncio.to_thread(RawClient(server.url).send, sent)
        await until(lambda: over_share(DeviceReported) - before == FLOOD - MOST_OF_SENDER)
        await quiet.publish([DeviceReported(node=QUIET, devices=(), served=())])
        await flush(quiet.client)
        await flush(bus.client)

        binder.gate.set()
        await until(lambda: QUIET in binder.nodes, limit_s=SOON_S)
        assert binder.nodes.count(LOUD) == MOST_OF_SENDER
        await asyncio.to_thread(RawClient(server.url).send, sent[-1:])
        await until(lambda: binder.nodes.count(LOUD) == MOST_OF_SENDER + 1, limit_s=SOON_S)


async def test_requests_of_an_agent_beyond_its_share_are_dropped_and_others_have_replies(
    server: NatsServer,
) -> None:
    gate = asyncio.Event()
    nodes = list[str]()
    before = over_share(LeasesRequest)

    async def reply(request: LeasesRequest) -> LeasesReply:
        await gate.wait()
        nodes.append(request.node)
        return LeasesReply()

    async with connected(server, "binder") as bus, connected(server, user(QUIET)) as quiet:
        await bus.reply(LeasesRequest, "binder", "", reply, concurrency=2)
        await flush(bus.client)
        subject = subjects.request_subject(LeasesRequest, LOUD)
        sent = flood(LeasesRequest, subject, LeasesRequest(node=LOUD))
        await asyncio.to_thread(RawClient(server.url).send, sent)
        await until(lambda: over_share(LeasesRequest) - before == FLOOD - MOST_OF_SENDER)
        requesting = asyncio.create_task(
            quiet.request(LeasesRequest(node=QUIET), LeasesReply, timeout_s=SOON_S)
        )
        await asyncio.sleep(0)
        gate.set()

        assert await requesting == LeasesReply()
        assert nodes.count(LOUD) <= MOST_OF_SENDER


async def test_heartbeats_of_one_sender_leave_those_of_others_in_the_buffer(
    server: NatsServer,
) -> None:
    before = over_share(Heartbeat)
    beat = Heartbeat(service="node-agent", instance="i", node=LOUD)
    async with connected(server, "api") as bus, connected(server, user(QUIET)) as quiet:
        inbox = await bus.observe([Heartbeat])
        await flush(bus.client)
        sent = flood(Heartbeat, subjects.publish_subject(Heartbeat, user(LOUD)), beat)
        await asyncio.to_thread(RawClient(server.url).send, sent)
        await until(lambda: over_share(Heartbeat) - before == FLOOD - MOST_OF_SENDER)
        await quiet.publish([Heartbeat(service="node-agent", instance="i", node=QUIET)])

        await until(lambda: len(inbox.waiting) == MOST_OF_SENDER + 1)
        async with asyncio.timeout(SOON_S):
            seen = [each.events[0].node for each in await inbox.batch()]
    assert seen == [LOUD] * MOST_OF_SENDER + [QUIET]
