"""Bad messages are counted, and leave few and short lines in the log of their receiver."""

import logging

import pytest
from prometheus_client import REGISTRY

from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import LeasesReply, LeasesRequest
from shared.model.names import NodeName
from shared.nats import subjects, wire
from tests.integration.nats.world import connected
from tests.support.fuzz.messages import encoded
from tests.support.fuzz.nats_bytes import RawClient, message
from tests.support.servers.nats import NatsServer, flush
from tests.support.waiting import until

NODE = NodeName("node-a")
AGENT = subjects.user_of("node-agent", NODE)
MESSAGES = 430
EVENTS = 8
LONG = "\u202e\n\x1b[2J" + "x" * 2_000


def refused(kind: type[DeviceReported | LeasesRequest]) -> float:
    labels = {"subject": kind.subject}
    return REGISTRY.get_sample_value("leasehold_events_refused_total", labels) or 0.0


async def test_many_bad_messages_make_a_short_log(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    report = {"node": NODE, "devices": [], "served": [LONG[:400]]}
    forged = {"node": LONG[:200], "devices": [], "served": []}
    bad = encoded(*[report, forged] * (EVENTS // 2))
    subject = subjects.publish_subject(DeviceReported, NODE)
    before = refused(DeviceReported)
    reasons = list[str]()
    async with connected(server, "binder") as binder, connected(server, AGENT) as agent:
        binder.on_refused = lambda _, reason: reasons.append(reason)
        inbox = await binder.subscribe([DeviceReported], group="binder")
        await flush(binder.client)
        for number in range(MESSAGES):
            reply = f"{agent.client.new_inbox()}.{number}"
            await agent.client.publish(subject, bad, reply=reply)
            await agent.client.publish(subject, b"", reply=f"{subject}.{number}")
        await agent.publish([DeviceReported(node=NODE, devices=(), served=())])

        assert [each.events for each in await inbox.batch()] == [
            [DeviceReported(node=NODE, devices=(), served=())]
        ]

    assert refused(DeviceReported) - before == MESSAGES * (EVENTS + 1)
    assert len(reasons) == 2 * MESSAGES
    assert max(map(len, reasons)) < 1_200
    lines = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert 1 <= len(lines) < 10
    assert max(map(len, lines)) < 1_100
    assert all(line.isprintable() for line in lines)


async def test_many_bad_requests_and_unreadable_subjects_make_a_short_log(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def reply(_: LeasesRequest) -> LeasesReply:
        return LeasesReply()

    name = "leasehold_nats_unreadable_messages_total"
    before = refused(LeasesRequest)
    unreadable = REGISTRY.get_sample_value(name) or 0.0
    subject = subjects.request_subject(LeasesRequest, NODE)
    async with connected(server, "binder") as binder, connected(server, AGENT) as agent:
        await binder.reply(LeasesRequest, "binder", "", reply)
        await flush(binder.client)
        odd = [
            message(subject.encode(), data, reply)
            for data in (b"", wire.encode([LeasesRequest(node=NODE)]))
            for reply in (b"\xff" * 1_000, b"_INBOX.x", b"")
        ]
        await until(lambda: binder.connected)
        RawClient(server.url).send(odd * 100)

        assert await agent.request(LeasesRequest(node=NODE), LeasesReply)

    assert (REGISTRY.get_sample_value(name) or 0.0) - unreadable == 200
    assert refused(LeasesRequest) - before == 400
    lines = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert 1 <= len(lines) < 10
    assert max(map(len, lines)) < 1_100
