"""No byte of a message ends the reading of a receiver: the next good one is handled at once.

A plain socket sends them to a real nats-server, as somebody with the credential of a node's agent
can. What no server passes on comes from a socket that pretends to be one.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import Heartbeat, LeaseChanged
from shared.model.events.request_reply import BindReply, BindRequest, LeasesReply, LeasesRequest
from shared.model.names import NodeName
from shared.nats import subjects, wire
from shared.nats.bus import Bus
from shared.runtime.runner import Runner
from shared.runtime.service import answers, handles
from shared.runtime.telemetry import Tracing
from tests.support import build
from tests.support.api.running import RunningApi, running_api
from tests.support.fuzz.in_thread import running_in_thread
from tests.support.fuzz.nats_bytes import RawClient, message, odd_messages
from tests.support.servers.nats import flush, nats_server
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

NODE = NodeName("node-a")
AGENT = subjects.user_of("node-agent", NODE)
GOOD_S = 4.0
"""A receiver whose reading has ended is deaf for 9 seconds, until its pings have no response."""
any_machine = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@dataclass
class Binder:
    """Receives what agents send."""

    reported: list[float] = field(default_factory=list)

    @handles
    async def save_devices(self, events: Sequence[DeviceReported]) -> None:
        self.reported += [event.reported_at for event in events]

    @answers
    async def list_leases(self, event: LeasesRequest) -> LeasesReply:
        return LeasesReply()


@dataclass
class Agent:
    """Receives what services send to the agent of one node."""

    route = NODE
    changed: list[str] = field(default_factory=list)

    @answers
    async def admit(self, event: BindRequest) -> BindReply:
        return BindReply(reason="received")

    @handles
    async def note_leases(self, events: Sequence[LeaseChanged]) -> None:
        self.changed += [event.lease.pod for event in events]


def subject(kind: type[Event]) -> bytes:
    is_request = kind in {LeasesRequest, BindRequest}
    subject_of = subjects.request_subject if is_request else subjects.publish_subject
    return subject_of(kind, AGENT if kind is Heartbeat else NODE).encode()


SAMPLES: Sequence[Event] = (
    DeviceReported(node=NODE, devices=(), served=()),
    LeasesRequest(node=NODE),
    Heartbeat(service="node-agent", instance="i", node=NODE),
    BindRequest(node=NODE, leases=()),
    LeaseChanged(lease=build.lease("uid-1", NODE)),
)


@dataclass
class World:
    """Every kind of receiver, each on a connection of its own."""

    url: str
    api: RunningApi
    binder_bus: Bus
    agent_bus: Bus
    binder: Binder
    agent: Agent
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the thread of the receivers."""
        asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60)

    def inboxes(self) -> list[bytes]:
        """Subjects at which the clients receive replies and reports."""
        clients = (self.binder_bus.client, self.agent_bus.client, self.api.bus.client)
        return [
            subscription.subject.replace("*", "1").encode()
            for client in clients
            for subscription in client._subs.values()
            if subscription.subject.startswith("_INBOX.")
        ]

    async def handle_good_messages(self) -> None:
        """Let every receiver handle a good message, on the connection that it had before."""
        number = next(self.numbers)
        async with asyncio.timeout(GOOD_S):
            await self.agent_bus.publish(
                [
                    DeviceReported(node=NODE, devices=(), served=(), reported_at=number),
                    Heartbeat(service="node-agent", instance=f"i-{number}", node=NODE),
                ]
            )
            await self.binder_bus.publish([LeaseChanged(lease=build.lease(f"uid-{number}", NODE))])
            assert await self.agent_bus.request(LeasesRequest(node=NODE), LeasesReply)
            reply = await self.binder_bus.request(BindRequest(node=NODE, leases=()), BindReply)
            assert reply.reason == "received"
            await until(lambda: number in self.binder.reported)
            await until(lambda: f"uid-{number}" in self.agent.changed)
            known = self.api.service.components._known
            await until(lambda: f"i-{number}" in [one.heartbeat.instance for one in known()])
        for bus in (self.binder_bus, self.agent_bus, self.api.bus):
            assert bus.client.stats["reconnects"] == 0
            assert bus.client.fault == ""


@asynccontextmanager
async def running(bus: Bus, service: object, name: str) -> AsyncIterator[None]:
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(Runner(name, service, bus, Tracing(name, None)).run(started))
        await started.wait()
        await flush(bus.client)
        yield
        task.cancel()


@asynccontextmanager
async def receivers() -> AsyncIterator[World]:
    binder = Binder()
    agent = Agent()
    with valkey_server() as valkey:
        await valkey.ready()
        async with (
            nats_server() as nats,
            running_api(servers=(nats.url, valkey.url)) as api,
            Bus.connect(nats.url, name="binder") as binder_bus,
            Bus.connect(nats.url, name=AGENT) as agent_bus,
            running(binder_bus, binder, "binder"),
            running(agent_bus, agent, "node-agent"),
        ):
            await flush(api.bus.client)
            world = World(nats.url, api, binder_bus, agent_bus, binder, agent)
            await world.handle_good_messages()
            yield world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running_in_thread(receivers()) as found:
        yield found


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_any_message_to_a_receiver_leaves_it_reading(world: World, sample: Event) -> None:
    inbox = f"{subjects.inbox_of(AGENT)}.{'a' * 22}.1".encode()
    odd = odd_messages(subject(type(sample)), wire.encode([sample]), inbox)

    RawClient(world.url).send(odd)

    world.run(world.handle_good_messages())


def test_any_message_to_the_inbox_of_a_client_leaves_it_reading(world: World) -> None:
    inboxes = world.inboxes()
    assert len(inboxes) >= 6

    for inbox in inboxes:
        RawClient(world.url).send(odd_messages(inbox, wire.encode([LeasesReply()]), b"_INBOX.x"))

    world.run(world.handle_good_messages())


NAMES = st.binary(min_size=1, max_size=40).filter(lambda name: not set(name) & set(b" \t\r\n"))
HEADERS = st.none() | st.binary(max_size=60) | st.binary(max_size=40).map(b"NATS/1.0".__add__)


@any_machine
@given(reply=NAMES, headers=HEADERS, data=st.binary(max_size=40), sample=st.sampled_from(SAMPLES))
def test_random_bytes_in_any_part_leave_every_receiver_reading(
    world: World, reply: bytes, headers: bytes | None, data: bytes, sample: Event
) -> None:
    to = subject(type(sample))
    good = wire.encode([sample])

    RawClient(world.url).send(
        [message(to, data, reply, headers), message(to, good, reply, headers), message(to, good)]
    )

    world.run(world.handle_good_messages())


BROKEN_STREAMS = (
    b"\xff\xff\xff\r\n",
    b"MSG\r\n",
    b"MSG leasehold 1\r\n",
    b"MSG a 1 x 2 3 4\r\n",
    b"MSG a one 3\r\nabc\r\n",
    b"MSG a 1 -3\r\nabc\r\n",
    b"MSG a 1 99999999999999999999999\r\nabc\r\n",
    b"MSG a 1 3\r\nabcdef\r\n",
    b"HMSG a 1 5 3\r\nabc\r\n",
    b"HMSG a 1 3\r\nabc\r\n",
    b"INFO {\xff\r\n",
    b"INFO []\r\n",
    b"-ERR\r\n",
    b"-ERR '\xff\xfe'\r\n",
    b"-ERR 'Parser Error'\r\n",
    b"x" * (1024 * 1024 + 1),
)
"""What no NATS server sends, as one: the client must connect again."""
HARMLESS_STREAMS = (
    b"MSG a 4711 3\r\nabc\r\n",
    b"HMSG a 4711 0 0\r\n\r\n",
    b"-ERR 'Permissions Violation for Publish to \"\xff\xfe\"'\r\n",
    b"+OK\r\nPONG\r\nPONG\r\nPING\r\n",
)


class PretendedServer:
    """A socket that accepts clients of NATS, and sends them what a test wants."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self.sids: dict[str, bytes] = {}
        """The number of the newest subscription to each subject."""
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator["PretendedServer"]:
        pretended = cls()
        server = await asyncio.start_server(pretended._serve, "127.0.0.1", 0)
        pretended.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield pretended
        finally:
            server.close()
            for writer in pretended.connections:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","headers":true}\r\n')
        sids: dict[str, bytes] = {}
        while line := await reader.readline():
            operation, *words = line.split()
            if operation == b"PING":
                writer.write(b"PONG\r\n")
                if self.connections[-1:] != [writer]:
                    self.connections.append(writer)
                    self.sids = sids
            elif operation == b"SUB":
                sids[words[0].decode()] = words[-1]

    async def deliver(self, event: Event, name: str, *, pieces: int = 1) -> None:
        """Send a good message of an event, in so many pieces at least."""
        data = wire.encode([event])
        sid = await until(lambda: self.sids.get(name))
        sent = b"MSG %s %s %d\r\n%s\r\n" % (subject(type(event)), sid, len(data), data)
        size = max(1, len(sent) // pieces)
        for first in range(0, len(sent), size):
            self.connections[-1].write(sent[first : first + size])
            await asyncio.sleep(0)


@asynccontextmanager
async def agent_of(server: PretendedServer) -> AsyncIterator[tuple[Bus, Agent]]:
    agent = Agent()
    async with Bus.connect(server.url, name=AGENT) as bus:
        inbox = await bus.subscribe([LeaseChanged], group="node-agent", route=NODE)

        async def note() -> None:
            while True:
                for delivered in await inbox.batch():
                    await agent.note_leases(delivered.events)

        noting = asyncio.create_task(note())
        yield bus, agent
        noting.cancel()


CHANGED = subject(LeaseChanged).decode()


async def receives(server: PretendedServer, agent: Agent, pod: str, *, pieces: int = 1) -> None:
    await server.deliver(LeaseChanged(lease=build.lease(pod, NODE)), CHANGED, pieces=pieces)
    await until(lambda: pod in agent.changed, limit_s=GOOD_S)


async def test_a_client_reads_on_after_what_is_not_for_it() -> None:
    async with PretendedServer.listening() as server, agent_of(server) as (bus, agent):
        for number, stream in enumerate(HARMLESS_STREAMS):
            server.connections[-1].write(stream)

            await receives(server, agent, f"uid-{number}", pieces=number * 40 + 1)

        assert bus.client.stats["reconnects"] == 0


@pytest.mark.parametrize("stream", BROKEN_STREAMS, ids=lambda stream: repr(stream[:24]))
async def test_a_client_connects_again_after_what_no_server_sends(
    stream: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with PretendedServer.listening() as server, agent_of(server) as (bus, agent):
        await receives(server, agent, "uid-1")

        server.connections[-1].write(stream)

        await until(lambda: bus.client.stats["reconnects"] == 1, limit_s=GOOD_S)
        await receives(server, agent, "uid-2")
        assert bus.client.fault == ""
    assert caplog.text == ""
