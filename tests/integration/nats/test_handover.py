"""Work between services of one process reaches its handler without a message."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import PodBound, PodQueued
from shared.nats import subjects
from shared.nats.bus import QUIET_S, Bus, Copies
from shared.nats.inbox import EVENTS_PER_MESSAGE, LocalHandlers
from tests.integration.nats.test_bus import Recorder, queued, running
from tests.integration.nats.test_work import Slow, connected, unconfirmed
from tests.support import build
from tests.support.servers.nats import NatsServer, nats_server
from tests.support.waiting import until


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as started:
        yield started


@contextlib.asynccontextmanager
async def sharing(server: NatsServer, name: str, handlers: LocalHandlers) -> AsyncIterator[Bus]:
    """Connect a service that shares its process with others."""
    async with Bus.connect_later(server.url, name=name, handlers=handlers) as bus:
        await bus.wait_connected()
        yield bus


@contextlib.asynccontextmanager
async def one_process(server: NatsServer, other: str) -> AsyncIterator[tuple[Bus, Bus, Bus]]:
    """Connect a watcher and a placer of one process, and a service of another."""
    handlers = LocalHandlers()
    async with (
        sharing(server, "handing", handlers) as watcher,
        sharing(server, "placer", handlers) as placer,
        connected(server, other) as apart,
    ):
        yield watcher, placer, apart


async def test_work_is_handed_over_without_a_message(server: NatsServer) -> None:
    async with one_process(server, "observer") as (watcher, placer, observer):
        recorder = Recorder()
        task = await running("placer", recorder, placer)
        work = await observer.client.subscribe("leasehold.work.>")
        await observer.client.flush()

        await watcher.publish([queued(1), queued(2)])

        await until(lambda: recorder.seen == ["p1", "p2"])
        await until(lambda: unconfirmed("handing") == 0)
        await watcher.client.flush()
        await observer.client.flush()  # it has received what was sent before
        assert work.pending_msgs == 0
        task.cancel()


async def test_another_process_handles_what_the_own_one_cannot(server: NatsServer) -> None:
    async with one_process(server, "whole") as (watcher, cut, whole):
        failing = Recorder(*[UnavailableError("redis is away") for _ in range(1000)])
        recorder = Recorder()
        tasks = [await running("placer", failing, cut), await running("placer", recorder, whole)]

        for number in range(5):
            await watcher.publish([queued(number)])

        await until(lambda: set(recorder.seen) == {f"p{n}" for n in range(5)}, limit_s=60)
        await until(lambda: unconfirmed("handing") == 0)
        for task in tasks:
            task.cancel()


async def test_a_conflict_is_retried_in_the_process(server: NatsServer) -> None:
    async with one_process(server, "idle") as (watcher, placer, _):
        recorder = Recorder(ConflictError("again"), ConflictError("and again"))
        task = await running("placer", recorder, placer)

        await watcher.publish([queued(1)])

        await until(lambda: recorder.seen == ["p1"])
        assert unconfirmed("handing") == 0
        task.cancel()


async def test_other_processes_share_what_waits_behind_a_full_batch(server: NatsServer) -> None:
    async with one_process(server, "idle") as (watcher, busy, idle):
        slow, recorder = Slow(), Recorder()
        tasks = [await running("placer", slow, busy), await running("placer", recorder, idle)]
        total = EVENTS_PER_MESSAGE + 100

        for number in range(total):
            await watcher.publish([queued(number)])

        await until(lambda: recorder.seen)
        slow.gate.set()
        await until(lambda: len({*slow.seen, *recorder.seen}) == total)
        await until(lambda: unconfirmed("handing") == 0)
        assert slow.seen
        for task in tasks:
            task.cancel()


async def test_another_process_handles_what_waits_when_the_own_one_stops(
    server: NatsServer,
) -> None:
    handlers, recorder = LocalHandlers(), Recorder()
    async with connected(server, "other") as other:
        async with sharing(server, "handing", handlers) as watcher:
            async with sharing(server, "placer", handlers) as placer:
                slow = Slow()
                task = await running("placer", slow, placer)
                await watcher.publish([queued(1)])
                await watcher.publish([queued(2)])
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            taking_over = await running("placer", recorder, other)

        await until(lambda: set(recorder.seen) == {"p1", "p2"})
        assert slow.seen == []
        taking_over.cancel()


async def test_observers_receive_copies_of_what_is_handed_over(server: NatsServer) -> None:
    async with one_process(server, "api") as (watcher, placer, api):
        task = await running("placer", Recorder(), placer)
        copies = await api.observe([PodQueued])
        await api.client.flush()

        await watcher.publish([queued(1)])

        async with asyncio.timeout(30):
            assert [each.events for each in await copies.batch()] == [[queued(1)]]
        task.cancel()


async def test_nothing_is_copied_while_nobody_observes(server: NatsServer) -> None:
    now = [100.0]
    subject = subjects.copy_subject(PodBound)
    async with connected(server, "binder") as binder, connected(server, "api") as api:
        copies = Copies(binder.client, ticks=lambda: now[0])
        await copies.start()
        assert copies.wants(subject)
        await copies.send(subject, b"lost")
        await until(lambda: not copies.wants(subject))

        observing = await api.client.subscribe(subject)
        await api.client.flush()
        assert not copies.wants(subject)
        now[0] += QUIET_S
        assert copies.wants(subject)
        await copies.send(subject, b"seen")

        assert (await observing.next_msg(timeout=30)).data == b"seen"
        await binder.client.flush()
        assert copies.wants(subject)


async def test_an_observer_sees_that_a_pod_is_bound(server: NatsServer) -> None:
    async with connected(server, "binder") as binder, connected(server, "api") as api:
        copies = await api.observe([PodBound])
        await api.client.flush()
        bound = PodBound(lease=build.lease())

        await binder.publish([bound])

        async with asyncio.timeout(30):
            assert [each.events for each in await copies.batch()] == [[bound]]
