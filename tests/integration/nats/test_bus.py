"""The bus on a real nats-server."""

import asyncio
import logging
import signal

import pytest
import uvloop
from prometheus_client import REGISTRY

from shared.model.errors import RequestError, UnavailableError
from shared.model.events.pod_events import PodQueued, ResyncRequested
from shared.model.events.request_reply import TerminationReply, TerminationRequest
from shared.model.names import NodeName, PodUid
from shared.nats.bus import Bus
from shared.nats.client import _Transport
from shared.nats.unconfirmed_work import ResendPolicy
from shared.runtime.runner import ATTEMPTS, Runner
from shared.runtime.service import answers, loops, roles_of
from shared.runtime.telemetry import Tracing
from tests.integration.nats.world import Recorder, connected, publish, queued, running
from tests.support.servers.nats import NatsServer
from tests.support.waiting import until


class Ending:
    route = "node-a"

    @answers
    async def ended(self, event: TerminationRequest) -> TerminationReply:
        return TerminationReply(terminated=bool(1 / len(event.pod)) and event.pod == "gone")


def termination(pod: str, node: str = "node-a") -> TerminationRequest:
    return TerminationRequest(node=NodeName(node), pod=PodUid(pod))


async def test_many_events_are_sent_in_few_messages(server: NatsServer) -> None:
    recorder = Recorder()
    async with connected(server) as bus:
        await bus.publish([queued(n) for n in range(600)])

        async with running(bus, recorder):
            await until(lambda: len(recorder.seen) == 600)

    assert recorder.batches <= 3


async def test_two_replicas_share_the_work(server: NatsServer) -> None:
    first, second = Recorder(), Recorder()
    async with (
        connected(server, "one") as one,
        connected(server, "two") as two,
        running(one, first),
        running(two, second),
    ):
        await publish(one, 200)

        await until(lambda: {*first.seen, *second.seen} == {f"p{n}" for n in range(200)})
    assert first.seen
    assert second.seen


async def test_each_event_is_a_log_line_with_its_pod_and_trace(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="shared.runtime.runner")
    recorder = Recorder()
    async with connected(server) as bus, running(bus, recorder):
        await bus.publish([queued(1, trace="00-a-b-01"), queued(2)])

        await until(lambda: recorder.seen == ["p1", "p2"])
        await until(lambda: any("is done" in text for text in caplog.messages))

    lines = [(r.__dict__.get("pod"), r.__dict__.get("trace")) for r in caplog.records]
    assert ("pod-1", "00-a-b-01") in lines
    assert ("pod-2", "") in lines


async def test_one_refused_message_does_not_fail_its_batch(server: NatsServer) -> None:
    async with connected(server) as bus:
        recorder = Recorder([RequestError("the batch"), RequestError("its first message")])
        inbox = await bus.subscribe([PodQueued], group="placer-place-pods")
        await publish(bus, 3)
        await until(lambda: len(inbox.waiting) == 3)
        runner = Runner("placer", recorder, bus, Tracing("placer", None))

        task = asyncio.create_task(runner._handle(roles_of(recorder)[0], inbox))

        await until(lambda: len(recorder.seen) == 2)
        task.cancel()


async def test_the_work_of_a_dead_replica_is_redelivered_to_another(server: NatsServer) -> None:
    async with connected(server, "survivor", ResendPolicy(silent_s=0.5)) as bus:
        async with connected(server, "victim") as dying:
            inbox = await dying.subscribe([PodQueued], group="placer-place-pods")
            await publish(bus, 1)
            await inbox.batch()  # taken, and never confirmed
            await dying.client.close()
        recorder = Recorder()

        async with running(bus, recorder):
            await until(lambda: recorder.seen == ["p0"])


async def test_a_process_ends_although_its_server_has_just_gone(server: NatsServer) -> None:
    async def leave() -> None:
        async with Bus.connect(server.url, name="test") as bus:
            server.kill()
            await until(lambda: not bus.connected)
            await bus.client.publish("unsent", b"")

    await asyncio.to_thread(uvloop.run, leave())


async def test_a_request_reaches_the_node_that_it_names(server: NatsServer) -> None:
    async with connected(server) as bus, running(bus, Ending(), "node-agent"):
        assert (await bus.request(termination("gone"), TerminationReply)).terminated

        with pytest.raises(UnavailableError, match=r"termination\.request\.v1"):
            await bus.request(termination("gone", "node-b"), TerminationReply, timeout_s=0.5)


async def test_an_error_in_a_reply_is_logged_and_the_next_request_is_served(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server) as bus, running(bus, Ending(), "node-agent"):
        with pytest.raises(UnavailableError):
            await bus.request(termination(""), TerminationReply, timeout_s=0.5)

        assert "ended failed with a bug" in caplog.text
        assert (await bus.request(termination("gone"), TerminationReply)).terminated


async def test_an_unreachable_nats_is_named_in_the_error() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 "):
        async with Bus.connect("nats://127.0.0.1:1", name="test", patience_s=0.3):
            pass


async def test_events_are_split_over_messages_and_one_that_cannot_be_sent_blocks_no_other(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    async with connected(server) as bus, running(bus, recorder):
        third = bus.client.max_payload // 3 // 60
        labels = {f"{n:050}": "value" for n in range(4 * third)}  # of about 60 bytes each
        a_third = dict(list(labels.items())[:third])
        events = [queued(n, labels=a_third) for n in range(4)]
        events[2] = queued(2, labels=labels)

        await bus.publish([*events, queued(4, requeue_number=2**64), queued(5)])

        await until(lambda: recorder.has_seen(0, 1, 3, 5))
    assert "increase max_payload" in caplog.text
    assert "cannot be encoded" in caplog.text


async def test_a_message_dropped_after_a_bug_is_followed_by_a_resync(server: NatsServer) -> None:
    recorder = Recorder([ZeroDivisionError() for _ in range(ATTEMPTS)])
    async with connected(server) as bus:
        requested = await bus.subscribe([ResyncRequested], group="unused")
        async with running(bus, recorder):
            await bus.publish([queued(1)])

            (request,) = (await asyncio.wait_for(requested.batch(), 20))[0].events
            assert request.reason == "placer has dropped events"
            await bus.publish([queued(2)])
            await until(lambda: recorder.seen == ["p2"])


class Stumbling:
    @loops
    async def stumble(self) -> None:
        raise ZeroDivisionError


async def test_a_bug_that_ends_a_loop_is_counted(server: NatsServer) -> None:
    labels = {"service": "stumbling", "handler": "stumble", "outcome": "bug"}
    async with connected(server) as bus, running(bus, Stumbling(), "stumbling"):
        await until(lambda: REGISTRY.get_sample_value("leasehold_events_handled_total", labels))


async def test_a_server_that_does_not_reply_is_noticed(server: NatsServer) -> None:
    assert server.process is not None
    async with connected(server) as bus:
        server.process.send_signal(signal.SIGSTOP)
        try:
            await until(bus.unready_reason, limit_s=14)
        finally:
            server.process.send_signal(signal.SIGCONT)
        await until(lambda: bus.unready_reason() is None)


async def test_other_tasks_have_turns_while_more_arrives_than_is_handled() -> None:
    transport = _Transport()
    turns = 0
    transport._io_reader = asyncio.StreamReader()
    transport._io_reader.feed_data(b"x" * 1_000)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    for _ in range(10):
        assert len(await transport.read(100)) == 100
    other.cancel()

    assert turns >= 10
