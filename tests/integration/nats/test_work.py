"""Work is kept by its sender until a replica has handled it, whatever fails meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import pytest
from prometheus_client import REGISTRY

from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import PodQueued, PodTerminated
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.confirmations import ConfirmationTiming
from shared.nats.inbox import DeliveredMessage, Inbox
from shared.nats.unconfirmed_work import ResendPolicy
from shared.runtime.service import handles
from tests.integration.nats.test_bus import Recorder, queued, running
from tests.support.servers.nats import NatsServer, nats_server
from tests.support.waiting import until

SOON = ResendPolicy(
    receipt_s=0.4, silent_s=0.8, return_s=0.05, probe_s=0.05, tick_s=0.02, unready_s=0.3
)
OFTEN = ConfirmationTiming(report_s=0.02, held_s=0.2)
GROUP = "placer-place-pods"


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as started:
        yield started


@contextlib.asynccontextmanager
async def connected(server: NatsServer, name: str) -> AsyncIterator[Bus]:
    async with Bus.connect(server.url, name=name, policy=SOON, confirmation_timing=OFTEN) as bus:
        yield bus


def metric(name: str, service: str) -> float:
    labels = {"service": service, "subject": PodQueued.subject}
    return REGISTRY.get_sample_value(name, labels) or 0.0


def unconfirmed(service: str) -> float:
    return metric("leasehold_unconfirmed_events", service)


@dataclass
class Slow:
    """Handles pods once `gate` is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[str] = field(default_factory=list)

    @handles
    async def place_pods(self, events: Sequence[PodQueued]) -> list[PodTerminated]:
        await self.gate.wait()
        self.seen += [event.name for event in events]
        return []


async def test_work_that_no_replica_receives_is_kept_and_the_sender_is_not_ready(
    server: NatsServer,
) -> None:
    async with connected(server, "kept") as sender:
        for number in range(3):
            await sender.publish([queued(number)])

        why = await until(sender.unready_reason)
        assert why.startswith("no replica receives pod.queued.v1, 3 messages wait for")
        assert unconfirmed("kept") == 3
        recorder = Recorder()
        async with connected(server, "placer") as receiver:
            task = await running("placer", recorder, receiver)
            await until(lambda: sorted(recorder.seen) == ["p0", "p1", "p2"])
            await until(lambda: sender.unready_reason() is None)
            await until(lambda: unconfirmed("kept") == 0)
            task.cancel()


async def test_observers_do_not_count_as_receivers(server: NatsServer) -> None:
    async with connected(server, "observed") as sender, connected(server, "api") as other:
        copies = await other.observe([PodQueued])
        await sender.publish([queued(1)])

        assert (await copies.batch())[0].events == [queued(1)]
        assert "no replica receives" in await until(sender.unready_reason)


async def test_work_that_takes_long_is_handled_once(server: NatsServer) -> None:
    async with connected(server, "patient") as sender, connected(server, "placer") as receiver:
        slow = Slow()
        task = await running("placer", slow, receiver)

        await sender.publish([queued(1)])
        await asyncio.sleep(2 * SOON.silent_s)
        slow.gate.set()

        await until(lambda: unconfirmed("patient") == 0)
        assert slow.seen == ["p1"]
        task.cancel()


async def test_the_work_of_a_replica_that_hangs_goes_to_another(server: NatsServer) -> None:
    async with (
        connected(server, "sender") as sender,
        connected(server, "hangs") as hanging,
        connected(server, "works") as working,
    ):
        await hanging.client.subscribe(subjects.subscribe_subject(PodQueued), queue=GROUP)
        recorder = Recorder()
        task = await running("placer", recorder, working)

        for number in range(20):
            await sender.publish([queued(number)])

        await until(lambda: set(recorder.seen) == {f"p{n}" for n in range(20)})
        await until(lambda: unconfirmed("sender") == 0)
        task.cancel()


async def test_a_replica_that_stops_returns_its_work_at_once(server: NatsServer) -> None:
    async with connected(server, "sender") as sender:
        async with connected(server, "stops") as stopping:
            slow = Slow()
            task = await running("placer", slow, stopping)
            await sender.publish([queued(1)])
            await until(lambda: stopping._confirmations._senders)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        recorder = Recorder()
        async with connected(server, "starts") as starting:
            task = await running("placer", recorder, starting)

            await until(lambda: recorder.seen == ["p1"], limit_s=SOON.silent_s)
            task.cancel()


async def test_work_that_a_replica_cannot_handle_is_sent_to_any_replica(
    server: NatsServer,
) -> None:
    async with (
        connected(server, "sender") as sender,
        connected(server, "cut") as cut,
        connected(server, "whole") as whole,
    ):
        failing = Recorder(*[UnavailableError("redis is away") for _ in range(1000)])
        recorder = Recorder()
        tasks = [await running("placer", failing, cut), await running("placer", recorder, whole)]

        for number in range(10):
            await sender.publish([queued(number)])

        await until(lambda: set(recorder.seen) == {f"p{n}" for n in range(10)})
        for task in tasks:
            task.cancel()


async def test_a_conflict_is_retried_by_the_same_replica(server: NatsServer) -> None:
    async with connected(server, "sender") as sender, connected(server, "placer") as receiver:
        recorder = Recorder(ConflictError("again"), ConflictError("and again"))
        task = await running("placer", recorder, receiver)
        before = metric("leasehold_resent_messages_total", "sender")

        await sender.publish([queued(1)])

        await until(lambda: recorder.seen == ["p1"])
        assert metric("leasehold_resent_messages_total", "sender") == before
        task.cancel()


async def test_work_survives_a_restart_of_nats(server: NatsServer) -> None:
    async with connected(server, "sender") as sender, connected(server, "placer") as receiver:
        slow = Slow()
        task = await running("placer", slow, receiver)
        await sender.publish([queued(1)])
        await until(lambda: receiver._confirmations._senders)

        server.kill()
        await until(lambda: not sender.connected)
        await sender.publish([queued(2)])
        slow.gate.set()
        await until(lambda: slow.seen)
        await server.start()

        await until(lambda: {"p1", "p2"} <= set(slow.seen))
        await until(lambda: unconfirmed("sender") == 0)
        task.cancel()


async def test_many_messages_share_a_confirmation(server: NatsServer) -> None:
    async with connected(server, "sender") as sender, connected(server, "placer") as receiver:
        recorder = Recorder()
        task = await running("placer", recorder, receiver)
        reports = await sender.client.subscribe(f"{sender._work._prefix}.confirmed")

        for number in range(100):
            await sender.publish([queued(number)])

        await until(lambda: unconfirmed("sender") == 0)
        assert reports.pending_msgs < 30
        task.cancel()


async def test_what_no_replica_receives_is_bounded_and_its_loss_is_reported(
    server: NatsServer,
) -> None:
    policy = replace(SOON, max_messages=5)
    async with Bus.connect(server.url, name="bounded", policy=policy) as sender:
        await sender.publish([queued(0)])
        await until(sender.unready_reason)

        for number in range(1, 9):
            await sender.publish([queued(number)])

        assert unconfirmed("bounded") == 5
        assert not sender.has_lost_work.is_set()
        recorder = Recorder()
        async with connected(server, "placer") as receiver:
            task = await running("placer", recorder, receiver)
            await until(lambda: set(recorder.seen) == {f"p{n}" for n in range(4, 9)})
            await asyncio.wait_for(sender.has_lost_work.wait(), 10)
            task.cancel()


async def test_a_sender_waits_for_receivers_that_are_slower(server: NatsServer) -> None:
    policy = ResendPolicy(max_messages=2, room_s=0.3, receipt_s=30.0, silent_s=30.0)
    async with (
        Bus.connect(server.url, name="fast", policy=policy) as sender,
        connected(server, "placer") as receiver,
    ):
        slow = Slow()
        task = await running("placer", slow, receiver)
        await receiver.client.flush()
        await sender.publish([queued(1)])
        await sender.publish([queued(2)])
        with pytest.raises(
            UnavailableError, match=r"2 messages of pod\.queued\.v1 are not handled"
        ):
            await sender.publish([queued(3)])

        publishing = asyncio.create_task(sender.publish([queued(3)]))
        slow.gate.set()

        await publishing
        await until(lambda: slow.seen == ["p1", "p2", "p3"])
        task.cancel()


async def test_events_that_are_gathered_share_a_batch() -> None:
    inbox = Inbox()
    inbox.put(DeliveredMessage([queued(1)]))
    gathering = asyncio.create_task(inbox.gather(0.2))
    await asyncio.sleep(0)
    inbox.put(DeliveredMessage([queued(2)]))
    await gathering

    assert [each.events for each in await inbox.batch()] == [[queued(1)], [queued(2)]]


class CountingEvent(asyncio.Event):
    """Counts how often somebody waits for it."""

    waits = 0

    def was_waited_for(self, times: int) -> bool:
        return self.waits == times

    async def wait(self) -> Literal[True]:
        self.waits += 1
        return await super().wait()


async def test_a_message_wakes_one_of_many_readers() -> None:
    arrived = CountingEvent()
    inbox = Inbox(arrived=arrived)
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(inbox.batch()) for _ in range(16)]
        for number in range(16):
            await until(partial(arrived.was_waited_for, number + 1))
            inbox.put(DeliveredMessage([queued(number)]))

    assert all(len(reader.result()) == 1 for reader in readers)
    assert arrived.waits == len(readers)


async def test_a_reader_that_is_cancelled_lets_the_next_one_read() -> None:
    inbox = Inbox()
    first, second = asyncio.create_task(inbox.batch()), asyncio.create_task(inbox.batch())
    await asyncio.sleep(0)
    first.cancel()
    inbox.put(DeliveredMessage([queued(1)]))

    async with asyncio.timeout(30):
        assert [each.events for each in await second] == [[queued(1)]]


async def test_a_full_batch_is_not_delayed() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.put(DeliveredMessage([queued(number)]))

    async with asyncio.timeout(30):
        await inbox.gather(3_600.0, 3)
