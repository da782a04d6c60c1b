"""Replies and reports about work go to the inbox of their sender, or nowhere."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported, DevicesRegistered
from shared.model.events.pod_events import PodQueued
from shared.model.events.request_reply import BindReply, BindRequest, LeasesReply, LeasesRequest
from shared.model.names import NodeName
from shared.nats import subjects, wire
from shared.nats.bus import Bus
from tests.integration.nats.world import connected, queued
from tests.support.fuzz.nats_bytes import message
from tests.support.servers.nats import NatsServer, flush, plain_client
from tests.support.waiting import until

NODE = NodeName("node.a")
ID = "1234567890ABCDEFGHIJKL"
OF_AGENT = f"_INBOX.node-agent.node_a.{ID}.7"
OF_SERVICE = f"_INBOX.watcher.{ID}.7"
NOBODYS = (
    "",
    "_INBOX.",
    "_INBOX.7",
    f"_INBOX.{ID}.7",
    "leasehold.work.pod.queued.v1",
    "$SYS.REQ.SERVER.PING",
    "_INBOX.>",
    "_INBOX.*.*.7",
    f"_INBOX.node-agent.node-b.{ID}.7",
    f"_INBOX.node-agent.*.{ID}.7",
    f"_INBOX.node-agent.{ID}.7",
    f"_INBOX.node-agent.node_a.{ID}.more.7",
    f"_INBOX.node-agent.node_a.{ID}..7",
    "_INBOX.node-agent.node_a..7",
    f"_INBOX.node-agent.node_ab.{ID}.7",
    f"_INBOX.node-agent.node.a.{ID}.7",
    f"_INBOX.binder.node_a.{ID}.7",
    f"x_INBOX.binder.{ID}.7",
    f"{OF_AGENT}\x0b",
    "_INBOX.node-agent.node_a." + "x" * 2_000 + ".7",
)
WORK = (
    DeviceReported(node=NODE, devices=(), served=()),
    DevicesRegistered(node=NODE, devices=(), served=()),
    queued(1),
)


@pytest.mark.parametrize("kind", [DeviceReported, LeasesRequest, PodQueued, BindRequest])
def test_an_inbox_is_its_senders_by_form_and_name(kind: type[Event]) -> None:
    subject = subjects.publish_subject(kind, NODE if subjects.is_routed(kind) else "")
    own, others = (OF_AGENT, OF_SERVICE) if kind.is_of_agent else (OF_SERVICE, OF_AGENT)

    assert subjects.is_inbox_of_sender(kind, subject, own)
    for reply in (*NOBODYS, others):
        assert not subjects.is_inbox_of_sender(kind, subject, reply), reply


@dataclass
class World:
    """A binder that confirms and replies, and somebody else who observes every subject."""

    binder: Bus
    other: Bus
    seen: list[str]
    calls: list[Event]


@asynccontextmanager
async def world_of(server: NatsServer) -> AsyncIterator[World]:
    calls: list[Event] = []

    async def leases(request: LeasesRequest) -> LeasesReply:
        calls.append(request)
        return LeasesReply()

    async def bind(request: BindRequest) -> BindReply:
        calls.append(request)
        return BindReply()

    async with connected(server, "binder") as binder, connected(server, "other") as other:
        seen: list[str] = []

        async def note(message: object) -> None:
            seen.append(message.subject)  # type: ignore[attr-defined]

        await binder.reply(LeasesRequest, "binder", "", leases)
        await binder.reply(BindRequest, "node-agent", NODE, bind)
        for kind in map(type, WORK):
            await binder.subscribe([kind], group="binder")
        await flush(binder.client)
        for observed in ("_INBOX.>", "leasehold.>", "x_INBOX.>"):
            await other.client.subscribe(observed, cb=note)
        await flush(other.client)
        yield World(binder, other, seen, calls)


REQUESTS = (LeasesRequest(node=NODE), BindRequest(node=NODE, leases=()))


@pytest.mark.parametrize("event", [*WORK, *REQUESTS], ids=lambda event: type(event).__name__)
async def test_nothing_is_sent_to_a_subject_that_is_no_inbox_of_the_sender(
    server: NatsServer, event: Event
) -> None:
    kind = type(event)
    is_work = kind in set(map(type, WORK))
    own, others = (OF_AGENT, OF_SERVICE) if kind.is_of_agent else (OF_SERVICE, OF_AGENT)
    subject_of = subjects.publish_subject if is_work else subjects.request_subject
    subject = subject_of(kind, event.route)
    data = wire.encode([event])
    async with world_of(server) as world:
        for reply in (*NOBODYS, others):
            sent = message(subject.encode(), data, reply.encode())
            await world.other.client._send_command(sent)
        await world.other.client.publish(subject, data, reply=own)

        expected = f"{own.removesuffix('.7')}.confirmed" if is_work else own
        await until(lambda: expected in world.seen)
        await flush(world.binder.client)
        await flush(world.other.client)
        assert [name for name in world.seen if name != subject] == [expected]
        assert world.calls == ([] if is_work else [event])


async def test_a_reply_has_no_headers_of_the_request(server: NatsServer) -> None:
    """With headers as large as a message may be, a reply that returns them would be larger."""
    async with world_of(server) as world, plain_client(server.url, "any", "") as (client, _):
        inbox = await client.subscribe(OF_AGENT)
        await client.publish(
            subjects.request_subject(LeasesRequest, NODE),
            wire.encode([LeasesRequest(node=NODE)]),
            reply=OF_AGENT,
            headers={"padding": "x" * (world.binder.client.max_payload - 1_000)},
        )

        reply = await inbox.next_msg(timeout=20)
        assert reply.headers is None
        assert world.binder.client.stats["reconnects"] == 0
