"""Work is kept by its sender until a replica has handled it, whatever fails meanwhile."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest

from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import PodQueued
from shared.nats import subjects
from shared.nats.inbox import DeliveredMessage, Inbox
from shared.nats.unconfirmed_work import ResendPolicy
from tests.integration.nats.world import (
    SOON,
    Recorder,
    connected,
    is_confirmed,
    metric,
    publish,
    queued,
    replica,
    slow,
)
from tests.support.servers.nats import NatsServer, flush
from tests.support.waiting import until

GROUP = "placer-place-pods"


async def test_work_that_no_replica_receives_is_kept_and_the_sender_is_not_ready(
    server: NatsServer,
) -> None:
    recorder = Recorder()
    async with connected(server, "kept") as sender:
        await publish(sender, 3)

        why = await until(sender.unready_reason)
        assert why.startswith("no replica receives pod.queued.v1, 3 messages wait for")
        assert metric("leasehold_unconfirmed_events", "kept") == 3
        async with replica(server, recorder):
            await until(lambda: recorder.has_seen(0, 1, 2))
            await until(lambda: sender.unready_reason() is None)
            await until(lambda: is_confirmed("kept"))


async def test_observers_do_not_count_as_receivers(server: NatsServer) -> None:
    async with connected(server, "observed") as sender, connected(server, "api") as other:
        copies = await other.observe([PodQueued])
        await flush(other.client)
        await sender.publish([queued(1)])

        assert (await copies.batch())[0].events == [queued(1)]
        assert "no replica receives" in await until(sender.unready_reason)


async def test_work_that_takes_long_is_handled_once(server: NatsServer) -> None:
    recorder, gate = slow()
    async with connected(server, "patient") as sender, replica(server, recorder):
        await sender.publish([queued(1)])
        await asyncio.sleep(2 * SOON.silent_s)
        gate.set()

        await until(lambda: is_confirmed("patient"))
    assert recorder.seen == ["p1"]


async def test_the_work_of_a_replica_that_hangs_goes_to_another(server: NatsServer) -> None:
    recorder = Recorder()
    async with (
        connected(server, "sender") as sender,
        connected(server, "hangs") as hanging,
        replica(server, recorder),
    ):
        await hanging.client.subscribe(subjects.subscribe_subject(PodQueued), queue=GROUP)
        await flush(hanging.client)

        await publish(sender, 20)

        await until(lambda: recorder.has_seen(*range(20)))
        await until(lambda: is_confirmed("sender"))


async def test_a_replica_that_stops_returns_its_work_at_once(server: NatsServer) -> None:
    (stopping, _) = slow()
    recorder = Recorder()
    policy = replace(SOON, receipt_s=3_600.0, silent_s=3_600.0)
    async with connected(server, "sender", policy) as sender:
        async with replica(server, stopping) as bus:
            await publish(sender, 1)
            await until(lambda: bus._confirmations._senders)

        async with replica(server, recorder):
            await until(lambda: recorder.seen == ["p0"])


async def test_work_that_a_replica_cannot_handle_is_sent_to_any_replica(
    server: NatsServer,
) -> None:
    failing = Recorder([UnavailableError("redis is away") for _ in range(1000)])
    recorder = Recorder()
    async with (
        connected(server, "sender") as sender,
        replica(server, failing, "cut"),
        replica(server, recorder, "whole"),
    ):
        await publish(sender, 10)

        await until(lambda: recorder.has_seen(*range(10)))


async def test_a_conflict_is_retried_by_the_same_replica(server: NatsServer) -> None:
    recorder = Recorder([ConflictError("again"), ConflictError("and again")])
    async with connected(server, "sender") as sender, replica(server, recorder):
        before = metric("leasehold_resent_messages_total", "sender")

        await sender.publish([queued(1)])

        await until(lambda: recorder.seen == ["p1"])
        assert metric("leasehold_resent_messages_total", "sender") == before


async def test_work_survives_a_restart_of_nats(server: NatsServer) -> None:
    recorder, gate = slow()
    async with connected(server, "sender") as sender, replica(server, recorder) as receiver:
        await sender.publish([queued(1)])
        await until(lambda: receiver._confirmations._senders)

        server.kill()
        await until(lambda: not sender.connected)
        await sender.publish([queued(2)])
        gate.set()
        await until(lambda: recorder.seen)
        await server.start()

        await until(lambda: recorder.has_seen(1, 2))
        await until(lambda: is_confirmed("sender"))


async def test_many_messages_share_a_confirmation(server: NatsServer) -> None:
    async with connected(server, "sender") as sender, replica(server, Recorder()):
        reports = await sender.client.subscribe(f"{sender._work._prefix}.confirmed")

        await publish(sender, 100)

        await until(lambda: is_confirmed("sender"))
        assert reports.pending_msgs < 30


async def test_what_no_replica_receives_is_bounded_and_its_loss_is_reported(
    server: NatsServer,
) -> None:
    recorder = Recorder()
    async with connected(server, "bounded", replace(SOON, max_messages=5)) as sender:
        await sender.publish([queued(8)])
        await until(sender.unready_reason)

        await publish(sender, 8)

        assert metric("leasehold_unconfirmed_events", "bounded") == 5
        assert not sender.has_lost_work.is_set()
        async with replica(server, recorder):
            await until(lambda: recorder.has_seen(*range(3, 8)))
            await asyncio.wait_for(sender.has_lost_work.wait(), 10)


async def test_a_sender_waits_for_receivers_that_are_slower(server: NatsServer) -> None:
    policy = ResendPolicy(max_messages=2, room_s=1.5, receipt_s=30.0, silent_s=30.0)
    recorder, gate = slow()
    async with connected(server, "fast", policy) as sender, replica(server, recorder):
        await publish(sender, 2)
        with pytest.raises(
            UnavailableError, match=r"2 messages of pod\.queued\.v1 are not handled"
        ):
            await sender.publish([queued(2)])

        publishing = asyncio.create_task(sender.publish([queued(2)]))
        gate.set()

        await publishing
        await until(lambda: recorder.seen == ["p0", "p1", "p2"])


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
