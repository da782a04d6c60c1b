"""What one agent can take from a nats-server, however it is configured: other clients go on."""

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from services.auth.nats_users import CONNECTION_LIMITS, all_users
from services.cli.credentials import CredentialFiles
from shared.credentials.logins import ClientCredentials, load_login
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import LeasesReply, LeasesRequest
from shared.model.names import NodeName
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.connection_shares import connection_shares
from shared.nats.sender_rates import MOST_BYTES
from tests.support.auth.logins import NODES
from tests.support.auth.world import auth_world
from tests.support.node_agent.agent import lease_of, share
from tests.support.servers.nats import NatsServer, flush
from tests.support.servers.raw_nats import Login, RawClient, open_raw, peak_mib, raw_clients
from tests.support.waiting import until

THIEF, INNOCENT = NODES
REPORTS = subjects.publish_subject(DeviceReported, THIEF)
LEASES = subjects.request_subject(LeasesRequest, THIEF)
INBOX = subjects.inbox_of(f"node-agent.{THIEF}")
MANIFEST = Path(__file__).parents[3] / "k8s/base/nats.yaml"


def memory_limit_mib() -> int:
    """Return the limit of the manifest."""
    kinds = {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}
    (container,) = kinds["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    text: str = container["resources"]["limits"]["memory"]
    return int(text.removesuffix("Gi")) * 1024


@dataclass(kw_only=True)
class SharedServer:
    """A server with a binder, an agent whose login is stolen, and another agent."""

    process: subprocess.Popen[bytes] | None
    thief: Login
    receiver: Login
    """The binder's."""
    binder: Bus
    agent: Bus

    async def is_unharmed(self) -> None:
        """Assert that the other agent is served, and the server is below its limit."""
        request = LeasesRequest(node=INNOCENT)
        reply = await self.agent.request(request, LeasesReply, timeout_s=30)

        assert reply.leases == LEASES_OF_A_NODE
        assert self.binder.connected
        assert self.process is not None
        assert peak_mib(self.process.pid) < memory_limit_mib()


LEASES_OF_A_NODE = tuple(lease_of(f"{number:036}", share(), name="n" * 253) for number in range(9))
MANY_LEASES = tuple(
    lease_of(f"{number:036}", share(), name="n" * 253, anti_affinity_groups=("g" * 1_000,) * 9)
    for number in range(300)
)
"""A reply of 3 MiB."""


async def list_leases(request: LeasesRequest) -> LeasesReply:
    return LeasesReply(leases=MANY_LEASES if request.node == THIEF else LEASES_OF_A_NODE)


@contextlib.asynccontextmanager
async def serving(
    url: str, credentials: Callable[[str], ClientCredentials]
) -> AsyncIterator[tuple[Bus, Bus]]:
    async with (
        Bus.connect(url, name="binder", credentials=credentials("binder")) as binder,
        Bus.connect(url, name="agent", credentials=credentials(f"node-agent.{INNOCENT}")) as agent,
        connection_shares(
            lambda: Bus.connect(url, name="shares", credentials=credentials("binder")),
            flooded=binder,
        ),
    ):
        await binder.reply(LeasesRequest, "binder", "", list_leases, concurrency=8)
        await flush(binder.client)
        yield binder, agent


@contextlib.asynccontextmanager
async def of_files(written: CredentialFiles) -> AsyncIterator[SharedServer]:
    """As `leasehold credentials` configures own servers, compose, and `leasehold up`."""
    server = NatsServer(more=written.nats_configuration.read_text())
    await server.start()
    logins = [load_login(written.nats(user)) for user in (f"node-agent.{THIEF}", "binder")]
    thief, receiver = (
        Login(port=server.port, user=login.user, secret=login.secret) for login in logins
    )

    def credentials(user: str) -> ClientCredentials:
        return ClientCredentials(login_file=written.nats(user))

    try:
        async with serving(server.url, credentials) as (binder, agent):
            yield SharedServer(
                process=server.process, thief=thief, receiver=receiver, binder=binder, agent=agent
            )
    finally:
        server.close()


@contextlib.asynccontextmanager
async def of_callout(folder: Path) -> AsyncIterator[SharedServer]:
    """As the auth service configures it in a cluster."""
    async with auth_world(folder) as world:
        tokens = {
            "binder": world.cluster.issue_token("binder"),
            **{f"node-agent.{n}": world.cluster.issue_token("node-agent", node=n) for n in NODES},
        }
        tls = world.trusting.context()
        thief, receiver = (
            Login(port=world.port, user=user, secret=tokens[user], tls=tls)
            for user in (f"node-agent.{THIEF}", "binder")
        )

        def credentials(user: str) -> ClientCredentials:
            return world.credentials(tokens[user], user)

        async with serving(world.url, credentials) as (binder, agent):
            yield SharedServer(
                process=world.process, thief=thief, receiver=receiver, binder=binder, agent=agent
            )


@pytest.fixture(params=["files", "callout"])
async def server(
    request: pytest.FixtureRequest, written: CredentialFiles, tmp_path: Path
) -> AsyncIterator[SharedServer]:
    opened = of_files(written) if request.param == "files" else of_callout(tmp_path)
    async with opened as shared:
        yield shared


def subscriptions(subject: str, count: int) -> bytes:
    return b"".join(f"SUB {subject} {number}\r\n".encode() for number in range(count))


async def test_an_agent_has_few_subscriptions_of_few_tokens(server: SharedServer) -> None:
    deep = ".".join(["x"] * 200)
    async with raw_clients(server.thief, 2) as (first, second):
        await first.send(subscriptions(f"{INBOX}.{deep}", 4_000))
        refused = await first.replies()
        wide = (f"SUB {INBOX}.{'x' * 3_900}.{number} {number}\r\n" for number in range(20_000))
        await second.send("".join(wide).encode())
        exceeded = await second.replies()

    assert b"Permissions Violation for Subscription" in refused
    assert b"maximum subscriptions exceeded" in exceeded
    await server.is_unharmed()


async def test_an_agent_has_few_connections_however_often_it_connects(
    server: SharedServer,
) -> None:
    async with raw_clients(server.thief, 300) as clients:
        await until(lambda: open_of(clients), lambda count: count <= subjects.MOST_OF_A_NODE)
        await server.is_unharmed()
        latest = await open_raw(server.thief)
        await until(lambda: open_of(clients), lambda count: count < subjects.MOST_OF_A_NODE)
        assert b"PONG" in await latest.replies()
        latest.close()


def open_of(clients: list[RawClient]) -> int:
    return sum(not client.is_closed for client in clients)


async def test_an_agent_that_does_not_read_its_replies_loses_its_connections(
    server: SharedServer,
) -> None:
    async with raw_clients(server.thief, subjects.MOST_OF_A_NODE) as clients:
        for client in clients:
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(f"SUB {INBOX}.a.* 1\r\n".encode())
        data = encoded(LeasesRequest(node=THIEF))
        for number in range(40):
            head = f"PUB {LEASES} {INBOX}.a.{number} {len(data)}\r\n".encode()
            await clients[0].send(head + data + b"\r\n")
        await server.is_unharmed()

        assert server.process is not None
        unread_mib = len(clients) * int(CONNECTION_LIMITS["max_pending"]) // 2**20
        assert peak_mib(server.process.pid) < 2.2 * unread_mib


FLOOD = """
import json, socket, ssl, sys
port, user, secret, subject, size, tls = sys.argv[1:]
message = f"PUB {subject} {size}\\r\\n".encode() + b"x" * int(size) + b"\\r\\n"
messages = message * max(1, 65536 // len(message))
options = json.dumps({"user": user, "pass": secret, "verbose": False})
while True:
    try:
        sender = socket.create_connection(("127.0.0.1", int(port)))
        sender.recv(4096)
        if tls:
            sender = ssl._create_unverified_context().wrap_socket(sender)
        sender.sendall(f"CONNECT {options}\\r\\n".encode())
        while True:
            sender.sendall(messages)
    except OSError:
        pass
"""
"""A program that sends as much as it can, and connects again when its connection is closed."""


async def test_an_agent_that_floods_loses_its_connections(server: SharedServer) -> None:
    await server.binder.subscribe([DeviceReported], group="binder-save-devices")
    async with raw_clients(server.thief, 2) as (flooding, idle):
        message = f"PUB {REPORTS} {2**20}\r\n".encode() + bytes(2**20) + b"\r\n"
        for _ in range(2 * MOST_BYTES // 2**20):
            await flooding.send(message)
        await until(idle.replies, lambda replies: b"PONG" not in replies)
        await until(flooding.replies, lambda replies: b"PONG" not in replies)

    await server.is_unharmed()


@pytest.mark.parametrize("size", [3, 2**20])
async def test_an_agent_that_floods_and_connects_again_is_refused_and_delays_no_other(
    tmp_path: Path, size: int
) -> None:
    async with of_callout(tmp_path) as server:
        await server.binder.subscribe([DeviceReported], group="binder-save-devices")
        login = server.thief
        arguments = (str(login.port), login.user, login.secret, REPORTS, str(size))
        flood = subprocess.Popen([sys.executable, "-c", FLOOD, *arguments, "tls"])
        try:
            await until(lambda: is_refused(login))
            await until(lambda: is_answered(server))  # what is on its way is dropped
            for _ in range(20):
                assert await is_answered(server)
            assert flood.poll() is None
            assert await is_refused(login)
        finally:
            flood.kill()
            flood.wait()


async def is_answered(server: SharedServer) -> bool:
    """Whether the other agent has a reply within the time that an agent waits."""
    try:
        await server.agent.request(LeasesRequest(node=INNOCENT), LeasesReply)
    except UnavailableError:
        return False
    return True


async def is_refused(login: Login) -> bool:
    """Whether the server refuses a login, and not only closes its connection later."""
    try:
        client = await open_raw(login)
    except ConnectionError as error:
        return "Authorization Violation" in str(error)
    client.close()
    return False


def test_each_user_needs_far_less_than_a_connection_may_have() -> None:
    for user in all_users([NodeName("a")]):
        depths = [subject.partition(" ")[0].count(".") + 1 for subject in user.subscribe]
        assert 2 * len(user.subscribe) < int(CONNECTION_LIMITS["max_subscriptions"])
        assert max(depths) < int(CONNECTION_LIMITS["max_sub_tokens"])
        assert not any(subject.endswith(">") for subject in (*user.subscribe, *user.publish))


def encoded(event: LeasesRequest) -> bytes:
    from shared.nats import wire  # noqa: PLC0415 - one test speaks by hand

    return wire.encode([event])
