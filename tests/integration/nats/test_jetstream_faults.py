"""Work while JetStream stores nothing: it arrives all the same, and the reason is shown."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit

import nats.errors
import nats.js.errors
import pytest
from nats.js.api import StorageType
from prometheus_client import REGISTRY

from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import PodQueued, ResyncRequested, StreamRecovered
from shared.nats import subjects, wire, work_queue
from shared.nats.bus import Bus
from shared.nats.subjects import STREAM
from shared.runtime.service import handles
from tests.integration.nats.test_bus import Recorder, queued, running
from tests.support.servers.nats import NatsServer, nats_server
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


def limit_files(server: NatsServer, size: int = 0) -> None:
    """Let the server write no file beyond a size, as on a full disk."""
    assert server.process is not None
    prlimit(server.process.pid, RLIMIT_FSIZE, (size, RLIM_INFINITY))


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


async def storage(bus: Bus) -> StorageType | None:
    """Return where the stream is stored; None: there is none."""
    try:
        return StorageType((await bus.work.stream.stream_info(STREAM)).config.storage)
    except nats.js.errors.NotFoundError:
        return None


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "CONFIRM_S", 1.0)
    monkeypatch.setattr(work_queue, "WATCH_S", 0.3)


@pytest.mark.usefixtures("_short_waits")
async def test_a_stream_on_a_full_disk_is_in_memory_until_the_server_restarts() -> None:
    async with nats_server() as server, services(server) as it:
        limit_files(server)

        await it.sender.publish([queued(1)])

        await until(it.receiver.unready_reason)
        await until(lambda: it.receiver.unready_reason() is None, limit_s=10)
        assert await storage(it.receiver) is StorageType.MEMORY
        await until(lambda: it.sender.unready_reason() is None)
        await it.sender.publish([queued(2)])
        await until(lambda: {"p1", "p2"} <= set(it.recorder.seen))

        server.kill()
        await server.start()
        await until(lambda: it.receiver.connected)
        await until(lambda: storage(it.receiver), lambda found: found is StorageType.FILE)


@pytest.mark.usefixtures("_short_waits")
async def test_a_service_that_only_receives_notices_each_fault_within_seconds() -> None:
    async with nats_server() as server, services(server) as it:
        for number in range(2):
            limit_files(server)

            await it.sender.publish([queued(number)])

            await until(it.receiver.unready_reason, limit_s=10)
            limit_files(server, RLIM_INFINITY)
            await until(lambda: it.receiver.unready_reason() is None, limit_s=10)
            await until(lambda: it.sender.unready_reason() is None, limit_s=10)


async def test_a_probe_because_of_another_services_fault_causes_no_resync() -> None:
    async with nats_server() as server, services(server) as it:
        probes = await it.sender.client.subscribe(subjects.publish_subject(StreamRecovered))
        it.sender.work.fault = "as if JetStream stored nothing"

        await it.sender.publish([queued(1)])

        assert wire.decode((await probes.next_msg(timeout=10)).data, StreamRecovered) == []
