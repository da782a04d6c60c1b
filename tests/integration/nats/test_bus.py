"""The bus on a real nats-server."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import uvloop
from prometheus_client import REGISTRY

from shared.model.errors import RequestError, UnavailableError
from shared.model.events.pod_events import NodeChanged, PodQueued, PodTerminated, ResyncRequested
from shared.model.events.request_reply import TerminationReply, TerminationRequest
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.request import GpuRequest, PodRequest
from shared.nats.bus import Bus
from shared.nats.unconfirmed_work import ResendPolicy
from shared.runtime.runner import ATTEMPTS, Runner
from shared.runtime.service import answers, handles, loops, roles_of
from shared.runtime.telemetry import Tracing
from tests.support.servers.nats import NatsServer, nats_server
from tests.support.waiting import until


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as running:
        yield running


def queued(number: int, *, version: str = "1") -> PodQueued:
    request = PodRequest(dialect="volcano-vgpu", containers=(GpuRequest(container="a", gpus=1),))
    return PodQueued(
        pod=PodUid(f"pod-{number}"),
        namespace=Namespace("default"),
        name=f"p{number}",
        resource_version=version,
        request=request,
    )


def labelled(number: int, labels: int) -> PodQueued:
    """A pod whose labels take about 60 bytes each."""
    return replace(queued(number), labels={f"{n:050}": "value" for n in range(labels)})


class Recorder:
    """Handles pods, and raises the given error."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.seen: list[str] = []
        self.batches: list[int] = []

    @handles
    async def place_pods(self, events: Sequence[PodQueued]) -> list[PodTerminated]:
        if self.errors:
            raise self.errors.pop(0)
        self.batches.append(len(events))
        self.seen += [event.name for event in events]
        return []


class Ending:
    route = "node-a"

    @answers
    async def ended(self, event: TerminationRequest) -> TerminationReply:
        return TerminationReply(terminated=event.pod == "gone")


async def running(name: str, service: object, bus: Bus) -> asyncio.Task[None]:
    started = asyncio.Event()
    task = asyncio.create_task(Runner(name, service, bus, Tracing(name, None)).run(started))
    await asyncio.wait_for(started.wait(), 10)
    await bus.client.flush()  # the server has the subscriptions
    return task


async def test_many_events_are_sent_in_few_messages(server: NatsServer) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        await bus.publish([queued(n) for n in range(600)])
        recorder = Recorder()

        task = await running("placer", recorder, bus)

        await until(lambda: len(recorder.seen) == 600)
        assert len(recorder.batches) <= 3
        task.cancel()


async def test_two_replicas_share_the_work(server: NatsServer) -> None:
    async with (
        Bus.connect(server.url, name="one") as one,
        Bus.connect(server.url, name="two") as two,
    ):
        first, second = Recorder(), Recorder()
        tasks = [await running("placer", first, one), await running("placer", second, two)]

        for number in range(200):
            await one.publish([queued(number)])

        await until(lambda: len(first.seen) + len(second.seen) == 200)
        assert sorted(first.seen + second.seen) == sorted(f"p{n}" for n in range(200))
        assert first.seen
        assert second.seen
        for task in tasks:
            task.cancel()


async def test_each_event_is_a_log_line_with_its_pod_and_trace(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="shared.runtime.runner")
    async with Bus.connect(server.url, name="test") as bus:
        recorder = Recorder()
        task = await running("placer", recorder, bus)

        await bus.publish([replace(queued(1), trace="00-a-b-01"), queued(2)])

        await until(lambda: recorder.seen == ["p1", "p2"])
        await until(lambda: any("is done" in text for text in caplog.messages))
        lines = [(r.__dict__.get("pod"), r.__dict__.get("trace")) for r in caplog.records]
        assert ("pod-1", "00-a-b-01") in lines
        assert ("pod-2", "") in lines
        task.cancel()


async def test_one_refused_message_does_not_fail_its_batch(server: NatsServer) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        recorder = Recorder(RequestError("the batch"), RequestError("its first message"))
        inbox = await bus.subscribe([PodQueued], group="placer-place-pods")
        for number in range(3):
            await bus.publish([queued(number)])
        await until(lambda: len(inbox.waiting) == 3)
        runner = Runner("placer", recorder, bus, Tracing("placer", None))

        task = asyncio.create_task(runner._handle(roles_of(recorder)[0], inbox))

        await until(lambda: len(recorder.seen) == 2)
        task.cancel()


async def test_the_work_of_a_dead_replica_is_redelivered_to_another(server: NatsServer) -> None:
    policy = ResendPolicy(silent_s=0.5)
    async with Bus.connect(server.url, name="survivor", policy=policy) as bus:
        async with Bus.connect(server.url, name="victim") as dying:
            inbox = await dying.subscribe([PodQueued], group="placer-place-pods")
            await bus.publish([queued(1)])
            await inbox.batch()  # taken, and never confirmed
            await dying.client.close()
        recorder = Recorder()

        task = await running("placer", recorder, bus)

        await until(lambda: recorder.seen == ["p1"])
        task.cancel()


async def test_a_process_ends_although_its_server_has_just_gone(server: NatsServer) -> None:
    async def leave() -> None:
        async with Bus.connect(server.url, name="test") as bus:
            server.kill()
            await until(lambda: not bus.connected)
            await bus.client.publish("unsent", b"")

    await asyncio.to_thread(uvloop.run, leave())


async def test_a_request_reaches_the_node_that_it_names(server: NatsServer) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        task = await running("node-agent", Ending(), bus)
        here = TerminationRequest(node=NodeName("node-a"), pod=PodUid("gone"))
        elsewhere = TerminationRequest(node=NodeName("node-b"), pod=PodUid("gone"))

        reply = await bus.request(here, TerminationReply)

        assert reply.terminated
        with pytest.raises(UnavailableError, match=r"termination\.request\.v1"):
            await bus.request(elsewhere, TerminationReply, timeout_s=0.5)
        task.cancel()


async def test_an_error_in_a_reply_is_logged_and_the_next_request_is_served(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(Ending):
        @answers
        async def ended(self, event: TerminationRequest) -> TerminationReply:
            return TerminationReply(terminated=bool(1 / len(event.pod)))

    async with Bus.connect(server.url, name="test") as bus:
        task = await running("node-agent", Buggy(), bus)

        with pytest.raises(UnavailableError):
            await bus.request(
                TerminationRequest(node=NodeName("node-a"), pod=PodUid("")),
                TerminationReply,
                timeout_s=0.5,
            )

        assert "ended failed with a bug" in caplog.text
        assert (
            await bus.request(
                TerminationRequest(node=NodeName("node-a"), pod=PodUid("p")), TerminationReply
            )
        ).terminated
        task.cancel()


async def test_nested_maps_and_sets_are_decoded_as_they_were_encoded(server: NatsServer) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        facts = NodeFacts(name=NodeName("a.b"), allocatable={"cpu": 4000}, labels={"x": "y"})
        inbox = await bus.subscribe([NodeChanged], group="binder-nodes")

        await bus.publish([NodeChanged(node=facts)])

        (delivered,) = await inbox.batch()
        assert delivered.events == [NodeChanged(node=facts)]


async def test_an_unreachable_nats_is_named_in_the_error() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 "):
        async with Bus.connect("nats://127.0.0.1:1", name="test", patience_s=0.3):
            pass


async def test_events_are_split_over_messages_and_an_event_too_large_blocks_no_other(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        third = bus.client.max_payload // 3 // 60
        events = [labelled(n, third) for n in range(4)]
        events[2] = labelled(2, 4 * third)
        recorder = Recorder()
        task = await running("placer", recorder, bus)

        await bus.publish(events)

        await until(lambda: len(recorder.seen) == 3)
        assert sorted(recorder.seen) == ["p0", "p1", "p3"]
        assert "increase max_payload" in caplog.text
        task.cancel()


async def test_an_event_that_cannot_be_encoded_blocks_no_other(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        recorder = Recorder()
        task = await running("placer", recorder, bus)

        await bus.publish([queued(1), replace(queued(2), requeue_number=2**64), queued(3)])

        await until(lambda: len(recorder.seen) == 2)
        assert "cannot be encoded" in caplog.text
        task.cancel()


async def test_a_message_dropped_after_a_bug_is_followed_by_a_resync(server: NatsServer) -> None:
    async with Bus.connect(server.url, name="test") as bus:
        requested = await bus.subscribe([ResyncRequested], group="unused")
        recorder = Recorder(*[ZeroDivisionError() for _ in range(ATTEMPTS)])
        task = await running("placer", recorder, bus)

        await bus.publish([queued(1)])

        (request,) = (await asyncio.wait_for(requested.batch(), 20))[0].events
        assert request.reason == "placer has dropped events"
        await bus.publish([queued(2)])
        await until(lambda: recorder.seen == ["p2"])
        task.cancel()


class Stumbling:
    @loops
    async def stumble(self) -> None:
        raise ZeroDivisionError


async def test_a_bug_that_ends_a_loop_is_counted(server: NatsServer) -> None:
    labels = {"service": "stumbling", "handler": "stumble", "outcome": "bug"}
    async with Bus.connect(server.url, name="test") as bus:
        task = await running("stumbling", Stumbling(), bus)

        await until(lambda: REGISTRY.get_sample_value("leasehold_events_handled_total", labels))
        task.cancel()


async def test_a_server_that_does_not_reply_is_noticed(server: NatsServer) -> None:
    assert server.process is not None
    async with Bus.connect(server.url, name="test") as bus:
        server.process.send_signal(signal.SIGSTOP)
        try:
            await until(bus.unready_reason, limit_s=14)
        finally:
            server.process.send_signal(signal.SIGCONT)
        await until(lambda: bus.unready_reason() is None)
