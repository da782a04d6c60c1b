"""Work while JetStream stores nothing: it arrives all the same, and the reason is shown."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nats.errors
import pytest
from prometheus_client import REGISTRY

from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import PodQueued, ResyncRequested, StreamRecovered
from shared.nats.bus import Bus
from shared.runtime.service import handles
from tests.integration.nats.test_bus import Recorder, queued, running
from tests.support.servers.nats import NatsServer
from tests.support.waiting import until

NOBODY = 65534
LARGE = 500_000
"""Characters of an event: a file of JetStream is full after some of these."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How JetStream stops storing, and how it is repaired."""

    limits: str
    begin: Callable[[NatsServer], None]
    end: Callable[[NatsServer], Awaitable[None]]


def remove_store(server: NatsServer) -> None:
    shutil.rmtree(server.store / "jetstream")


def set_mode(server: NatsServer, mode: int) -> None:
    for folder in (server.store, *filter(Path.is_dir, server.store.rglob("*"))):
        folder.chmod(mode)


def forbid_writing(server: NatsServer) -> None:
    set_mode(server, 0o555)


async def permit_writing(server: NatsServer) -> None:
    """Restart the server, too: it disables JetStream when it may not write."""
    set_mode(server, 0o755)
    server.kill()
    await server.start()


def nothing(_: NatsServer) -> None: ...


async def replaced(_: NatsServer) -> None:
    """The receiver replaces the stream."""


FAULTS = {
    "removed": Fault("", remove_store, replaced),
    "full": Fault("max_file_store: 4MB", nothing, replaced),
    "read-only": Fault("", forbid_writing, permit_writing),
}


class Watching:
    """Handles the events that follow a fault of JetStream."""

    def __init__(self) -> None:
        self.events: list[ResyncRequested | StreamRecovered] = []

    @handles
    async def request_resync(
        self, events: Sequence[ResyncRequested | StreamRecovered]
    ) -> list[PodQueued]:
        self.events += events
        return []

    def saw(self, kind: type[ResyncRequested | StreamRecovered]) -> bool:
        return any(isinstance(event, kind) for event in self.events)


@dataclass(frozen=True, slots=True)
class Services:
    """A sender, and the two services that receive its work, each with a connection."""

    sender: Bus
    receiver: Bus
    recorder: Recorder
    watching: Watching


@contextlib.asynccontextmanager
async def services(server: NatsServer) -> AsyncIterator[Services]:
    async with (
        Bus.connect(server.url, name="sender", creates_stream=False) as sender,
        Bus.connect(server.url, name="receiver", replaces_stream=True) as receiver,
    ):
        made = Services(sender, receiver, Recorder(), Watching())
        tasks = [
            await running("placer", made.recorder, receiver),
            await running("watcher", made.watching, receiver),
        ]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()


async def ready_again(sender: Bus) -> bool:
    """Whether JetStream stores what a connection sends that may not create the stream."""
    await sender.publish([queued(5)])
    return sender.unready_reason() is None


async def fill(sender: Bus) -> None:
    """Store what nothing consumes until JetStream stores no more."""
    with contextlib.suppress(nats.errors.Error, TimeoutError):
        for _ in range(100):
            await sender.work.stream.publish("leasehold.work.unused", b"x" * LARGE, timeout=0.5)
        pytest.fail("JetStream still stores")


@pytest.mark.parametrize("name", FAULTS)
async def test_work_arrives_while_jetstream_stores_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = FAULTS[name]
    server = NatsServer(limits=fault.limits, user=None if os.geteuid() else NOBODY)
    await server.start()
    sent_directly = {"service": "sender"}
    before = REGISTRY.get_sample_value("leasehold_direct_messages_total", sent_directly) or 0
    try:
        async with services(server) as it:
            await it.sender.publish([queued(0)])
            await until(lambda: it.recorder.seen == ["p0"])

            fault.begin(server)
            await fill(it.sender)
            for number in range(1, 4):
                await it.sender.publish([queued(number)])

            await until(lambda: it.recorder.seen == ["p0", "p1", "p2", "p3"], limit_s=5)
            assert "JetStream is not available on NATS" in str(it.sender.unready_reason())
            assert (
                REGISTRY.get_sample_value("leasehold_direct_messages_total", sent_directly)
                == before + 3
            )
            await until(it.receiver.unready_reason)  # it has tried, too
            await until(lambda: it.watching.saw(ResyncRequested))

            await fault.end(server)
            await until(lambda: it.receiver.unready_reason() is None)
            await until(lambda: ready_again(it.sender))
            await until(lambda: it.watching.saw(StreamRecovered))
            await it.sender.publish([queued(4)])
            await until(lambda: "p4" in it.recorder.seen)
        warnings = [text for text in caplog.messages if "JetStream is not available" in text]
        assert len(warnings) == 2  # one per connection
    finally:
        server.forget()
        server.store.rmdir()


async def test_direct_work_is_delivered_again_until_it_is_handled() -> None:
    server = NatsServer()
    await server.start()
    try:
        async with services(server) as it:
            it.recorder.errors += [ConflictError("again"), UnavailableError("later")]
            it.sender.work.fault = "as if JetStream stored nothing"

            await it.sender.publish([queued(1), queued(2)])

            await until(lambda: it.recorder.seen == ["p1", "p2"])
    finally:
        server.forget()
        server.store.rmdir()
