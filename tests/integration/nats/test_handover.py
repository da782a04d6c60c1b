"""Work between services of one process reaches its handler without a message."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shared.model.errors import UnavailableError
from shared.model.events.pod_events import PodBound, PodQueued
from shared.nats import subjects
from shared.nats.bus import QUIET_S, Bus, CopySender
from shared.nats.inbox import LocalHandlers
from shared.nats.wire import EVENTS_PER_MESSAGE
from tests.integration.nats.world import (
    Recorder,
    connected,
    is_confirmed,
    publish,
    queued,
    running,
    slow,
)
from tests.support import build
from tests.support.servers.nats import NatsServer, flush
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def sharing(server: NatsServer, name: str, handlers: LocalHandlers) -> AsyncIterator[Bus]:
    """Connect a service that shares its process with others."""
    async with Bus.connect_later(server.url, name=name, handlers=handlers) as bus:
        await bus.wait_connected()
        yield bus


@contextlib.asynccontextmanager
async def one_process(server: NatsServer, placer: Recorder) -> AsyncIterator[tuple[Bus, Bus]]:
    """Connect a watcher that shares its process with a placer, and a service of another."""
    handlers = LocalHandlers()
    async with (
        sharing(server, "handing", handlers) as watcher,
        sharing(server, "placer", handlers) as beside,
        connected(server, "other") as apart,
        running(beside, placer),
    ):
        yield watcher, apart


async def test_work_is_handed_over_without_a_message(server: NatsServer) -> None:
    recorder = Recorder()
    async with one_process(server, recorder) as (watcher, observer):
        work = await observer.client.subscribe("leasehold.work.>")
        await flush(observer.client)

        await watcher.publish([queued(1), queued(2)])

        await until(lambda: recorder.seen == ["p1", "p2"])
        await until(lambda: is_confirmed("handing"))
        await flush(watcher.client)
        await flush(observer.client)  # it has received what was sent before
        assert work.pending_msgs == 0


async def test_another_process_handles_what_the_own_one_cannot(server: NatsServer) -> None:
    failing = Recorder([UnavailableError("redis is away") for _ in range(1000)])
    recorder = Recorder()
    async with one_process(server, failing) as (watcher, whole), running(whole, recorder):
        await publish(watcher, 5)

        await until(lambda: recorder.has_seen(*range(5)))
        await until(lambda: is_confirmed("handing"))


async def test_other_processes_share_what_waits_behind_a_full_batch(server: NatsServer) -> None:
    (busy, gate) = slow()
    recorder = Recorder()
    async with one_process(server, busy) as (watcher, idle), running(idle, recorder):
        total = EVENTS_PER_MESSAGE + 100

        await publish(watcher, total)

        await until(lambda: recorder.seen)
        gate.set()
        await until(lambda: len({*busy.seen, *recorder.seen}) == total)
        await until(lambda: is_confirmed("handing"))
        assert busy.seen


async def test_another_process_handles_what_waits_when_the_own_one_stops(
    server: NatsServer,
) -> None:
    handlers = LocalHandlers()
    recorder = Recorder()
    (stopping, _) = slow()
    async with connected(server, "other") as other, running(other, recorder):
        async with (
            sharing(server, "handing", handlers) as watcher,
            sharing(server, "placer", handlers) as placer,
            running(placer, stopping),
        ):
            await publish(watcher, 2)

        await until(lambda: recorder.has_seen(0, 1))
    assert stopping.seen == []


async def test_observers_receive_copies_of_what_is_handed_over(server: NatsServer) -> None:
    async with one_process(server, Recorder()) as (watcher, api):
        copies = await api.observe([PodQueued])
        await flush(api.client)

        await watcher.publish([queued(1)])

        async with asyncio.timeout(30):
            assert [each.events for each in await copies.batch()] == [[queued(1)]]


async def test_nothing_is_copied_while_nobody_observes(server: NatsServer) -> None:
    now = [100.0]
    subject = subjects.copy_subject(PodBound)
    async with connected(server, "binder") as binder, connected(server, "api") as api:
        copies = CopySender(binder.client, ticks=lambda: now[0])
        await copies.start()
        assert copies.wants(subject)
        await copies.send(subject, b"lost")
        await until(lambda: not copies.wants(subject))

        observing = await api.client.subscribe(subject)
        await flush(api.client)
        assert not copies.wants(subject)
        now[0] += QUIET_S
        assert copies.wants(subject)
        await copies.send(subject, b"seen")

        assert (await observing.next_msg(timeout=30)).data == b"seen"
        await flush(binder.client)
        assert copies.wants(subject)


async def test_an_observer_sees_that_a_pod_is_bound(server: NatsServer) -> None:
    async with connected(server, "binder") as binder, connected(server, "api") as api:
        copies = await api.observe([PodBound])
        await flush(api.client)
        bound = PodBound(lease=build.lease())

        await binder.publish([bound])

        async with asyncio.timeout(30):
            assert [each.events for each in await copies.batch()] == [[bound]]
