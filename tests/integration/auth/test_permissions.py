"""Which operations a real nats-server and a real valkey-server with users permit and deny."""

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import nats
import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, ResponseError

from services.auth.nats_users import NatsUser, all_users
from services.auth.redis_users import USERS as LEDGER_USERS
from services.auth.redis_users import RedisUser
from services.cli import credentials
from services.cli.credentials import CredentialFiles
from services.cli.snapshot.usage_reader import request_usage
from services.topology import edges
from shared.credentials.logins import ClientCredentials, load_login
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import LeaseChanged, PodQueued
from shared.model.events.request_reply import (
    LeasesReply,
    LeasesRequest,
    TerminationReply,
    TerminationRequest,
    UsageReply,
    UsageRequest,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.usage import ShareMeasurement
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.support.servers.nats import free_port, nats_binary
from tests.support.servers.valkey import valkey_binary
from tests.support.waiting import until

NODES = [NodeName("node-a"), NodeName("node.b")]
USERS = {user.name: user for user in all_users(NODES)}
PUBLISHED = sorted(
    {subjects.publish_subject(edge.event, "") for edge in edges() if not edge.is_request}
)


@pytest.fixture(scope="module")
def written() -> Iterator[CredentialFiles]:
    with tempfile.TemporaryDirectory(prefix="lh-credentials-") as folder:
        yield credentials.write(Path(folder) / "credentials", NODES)


@pytest.fixture(scope="module")
def nats_url(written: CredentialFiles) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="lh-nats-") as store:
        command = [nats_binary(), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", store]
        command += ["--config", str(written.nats_configuration)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield f"nats://127.0.0.1:{port}"
        server.kill()
        server.wait()


@asynccontextmanager
async def bus_of(url: str, written: CredentialFiles, user: str) -> AsyncIterator[Bus]:
    is_service = not user.startswith(("node-agent", "operator"))
    async with Bus.connect(
        url,
        name=user,
        credentials=ClientCredentials(login_file=written.nats(user)),
        creates_stream=is_service,
    ) as bus:
        yield bus


class Raw:
    """A connection of a user, and what the server refused it."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.client: Any = None

    async def note(self, error: Exception) -> None:
        self.refused.append(str(error).lower())

    async def is_refused(self, subject: str, *, publish: bool, queue: str = "") -> bool:
        self.refused.clear()
        if publish:
            await self.client.publish(subject, b"x")
        else:
            subscription = await self.client.subscribe(subject, queue=queue)
        for _ in range(2):  # a first ping may overtake what was published before it
            await self.client.flush(timeout=10)
        if not publish:
            await subscription.unsubscribe()
        return any("permissions violation" in text for text in self.refused)


@asynccontextmanager
async def raw(url: str, written: CredentialFiles, user: str) -> AsyncIterator[Raw]:
    login, made = load_login(written.nats(user)), Raw()
    made.client = await nats.connect(
        url,
        user=login.user,
        password=login.secret,
        error_cb=made.note,
        inbox_prefix=subjects.inbox_of(user),
    )
    yield made
    await made.client.close()


def is_open(subject: str, allowed: tuple[str, ...]) -> bool:
    """Whether a user may publish there by its own list, wildcards included."""
    return any(_covers(pattern.split("."), subject.split(".")) for pattern in allowed)


def _covers(pattern: list[str], subject: list[str]) -> bool:
    for index, part in enumerate(pattern):
        if part == ">":
            return len(subject) > index
        if index >= len(subject) or part not in {"*", subject[index]}:
            return False
    return len(pattern) == len(subject)


@pytest.mark.parametrize("user", USERS.values(), ids=lambda user: user.name)
async def test_each_user_publishes_and_subscribes_as_permitted_and_nothing_else(
    nats_url: str, written: CredentialFiles, user: NatsUser
) -> None:
    everything = [
        *(
            name
            for own_subject in PUBLISHED
            for name in (own_subject, f"{own_subject}.node-z", f"{own_subject}.node-a")
        ),
        *(
            f"leasehold.request.{kind.subject}.node-z"
            for kind in (LeasesRequest, TerminationRequest)
        ),
        *(f"$JS.API.STREAM.{what}.LEASEHOLD" for what in ("DELETE", "PURGE", "UPDATE")),
        *("$JS.API.STREAM.CREATE.OTHER", "$JS.API.CONSUMER.DELETE.LEASEHOLD.placer-place-pods"),
        *("_INBOX.placer.stolen", "_INBOX.node-agent.node-z.stolen", "$SYS.REQ.SERVER.PING"),
    ]
    foreign = [
        *(each for other in USERS.values() if other.name != user.name for each in other.subscribe),
        *("leasehold.>", "_INBOX.>", ">", "leasehold.work.>"),
    ]

    async with raw(nats_url, written, user.name) as connection:
        found = {name: await connection.is_refused(name, publish=True) for name in everything}
        received = {
            each: await connection.is_refused(subject, publish=False, queue=queue)
            for each in {*foreign, *user.subscribe}
            for subject, _, queue in (each.partition(" "),)
        }

    assert found == {name: not is_open(name, user.publish) for name in everything}
    plain = tuple(each for each in user.subscribe if " " not in each)
    assert received == {
        each: each not in user.subscribe and not is_open(each.partition(" ")[0], plain)
        for each in received
    }
    assert any(found.values())
    assert any(received.values())


async def test_a_login_without_a_user_or_with_a_wrong_secret_is_refused_with_the_reason(
    nats_url: str, written: CredentialFiles, tmp_path: Path
) -> None:
    wrong = tmp_path / "placer"
    wrong.write_text("placer:guessed")

    with pytest.raises(UnavailableError, match="set --nats-credentials FILE"):
        async with Bus.connect(nats_url, name="test", patience_s=3):
            pass
    with pytest.raises(UnavailableError, match="rejects the user in") as refused:
        async with Bus.connect(
            nats_url, name="test", credentials=ClientCredentials(login_file=wrong), patience_s=3
        ):
            pass
    assert "guessed" not in str(refused.value)


async def test_work_requests_and_replies_pass_between_users(
    nats_url: str, written: CredentialFiles
) -> None:
    async with (
        bus_of(nats_url, written, "binder") as binder,
        bus_of(nats_url, written, "node-agent.node.b") as agent,
    ):
        inbox = await binder.subscribe([DeviceReported], durable="binder-save-devices")
        await binder.reply(LeasesRequest, "binder", "", _no_leases)
        await agent.reply(TerminationRequest, "node-agent", "node.b", _ended)

        await agent.publish([DeviceReported(node=NodeName("node.b"), devices=(), served=())])
        async with asyncio.timeout(20):
            (delivered,) = await inbox.batch()
        await delivered.ack()
        reply = await agent.request(
            LeasesRequest(node=NodeName("node.b")), LeasesReply, timeout_s=10
        )
        ended = await binder.request(
            TerminationRequest(node=NodeName("node.b"), pod=PodUid("p")),
            TerminationReply,
            timeout_s=10,
        )

    assert delivered.events[0].node == "node.b"
    assert reply.leases == ()
    assert ended.terminated


async def test_the_operator_gets_usage_and_the_nodes_without_a_reply(
    nats_url: str, written: CredentialFiles
) -> None:
    async with (
        bus_of(nats_url, written, "operator") as operator,
        bus_of(nats_url, written, "node-agent.node.b") as agent,
    ):
        await agent.reply(UsageRequest, "node-agent", "node.b", _measured)
        await agent.client.flush()

        usage = await request_usage(operator, [NodeName("node.b"), NodeName("node-a")])

    assert [one.memory_mib for one in usage.shares.values()] == [1_200]
    assert usage.unmeasured_nodes == ("node-a",)


async def test_an_agents_event_about_another_node_is_ignored(
    nats_url: str, written: CredentialFiles
) -> None:
    async with (
        bus_of(nats_url, written, "binder") as binder,
        bus_of(nats_url, written, "node-agent.node-a") as agent,
    ):
        inbox = await binder.subscribe([DeviceReported], durable="binder-save-devices")
        forged = DeviceReported(node=NodeName("node.b"), devices=(), served=())
        own = DeviceReported(node=NodeName("node-a"), devices=(), served=())
        own_subject = subjects.publish_subject(DeviceReported, "node-a")

        await agent.work.stream.publish(own_subject, _encoded(forged), stream=subjects.STREAM)
        await agent.work.stream.publish(own_subject, _encoded(own), stream=subjects.STREAM)

        async with asyncio.timeout(20):
            (delivered,) = await inbox.batch()
        await delivered.ack()
        assert delivered.events == [own]


async def test_publishing_without_permission_raises_for_work_and_is_dropped_for_broadcasts(
    nats_url: str, written: CredentialFiles
) -> None:
    async with raw(nats_url, written, "placer") as placer:
        assert await placer.is_refused(
            subjects.publish_subject(LeaseChanged, "node-a"), publish=True
        )
        assert await placer.is_refused(subjects.publish_subject(PodQueued), publish=True)


def _encoded(event: DeviceReported) -> bytes:
    from shared.nats import wire  # noqa: PLC0415 - one test speaks by hand

    return wire.encode([event])


async def _no_leases(_: LeasesRequest) -> LeasesReply:
    return LeasesReply()


async def _measured(_: UsageRequest) -> UsageReply:
    share = ShareMeasurement(
        pod=PodUid("p"),
        namespace=Namespace("team"),
        name="first",
        container="main",
        device=DeviceUuid("GPU-0"),
        memory_mib=1_200,
    )
    return UsageReply(measured_at=1.0, shares=(share,))


async def _ended(_: TerminationRequest) -> TerminationReply:
    return TerminationReply(terminated=True)


# Redis or Valkey


@pytest.fixture(scope="module")
def redis_url(written: CredentialFiles) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="lh-valkey-") as folder:
        socket = Path(folder) / "s"
        command = [valkey_binary(), "--port", "0", "--unixsocket", str(socket), "--save", ""]
        command += ["--dir", folder, "--aclfile", str(written.acl)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield f"unix://{socket}"
        server.kill()
        server.wait()


@asynccontextmanager
async def logged_in(url: str, written: CredentialFiles, user: str) -> AsyncIterator[Any]:
    login = load_login(written.redis(user))
    async with redis.asyncio.Redis.from_url(
        url, username=login.user, password=login.secret
    ) as client:
        await until(lambda: _answers(client))
        yield client


async def _answers(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except redis.exceptions.ConnectionError:
        return False


FORBIDDEN = (
    ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "SET", "maxmemory", "1"), ("KEYS", "*"), ("MONITOR",),
    ("SHUTDOWN",), ("ACL", "LIST"), ("SCRIPT", "FLUSH"), ("SAVE",),
    ("REPLICAOF", "other", "1"), ("CLIENT", "LIST"), ("GET", "elsewhere"), ("SET", "lh", "x"),
    ("HSET", "elsewhere", "a", "b"), ("PUBLISH", "c", "x"), ("FUNCTION", "LIST"),
)  # fmt: skip
READERS = {"dashboard": ("lh:", "lh-budget:"), "operator": ("lh:",), "timekeeper": ("lh:",)}


@pytest.mark.parametrize("user", ["placer", "binder", "timekeeper", "dashboard", "operator"])
async def test_no_service_has_the_permissions_of_an_administrator(
    redis_url: str, written: CredentialFiles, user: str
) -> None:
    async with logged_in(redis_url, written, user) as client:
        for arguments in FORBIDDEN:
            with pytest.raises(NoPermissionError):
                await client.execute_command(*arguments)
        with pytest.raises(ResponseError, match="ACL failure"):
            await client.eval("return redis.call('GET', 'elsewhere')", 0)


@pytest.mark.parametrize(("user", "prefix"), [(u, p) for u, ps in READERS.items() for p in ps])
async def test_a_read_only_user_cannot_write_through_a_script(
    redis_url: str, written: CredentialFiles, user: str, prefix: str
) -> None:
    async with logged_in(redis_url, written, user) as client:
        await client.hgetall(f"{prefix}ledger")
        with pytest.raises(NoPermissionError):
            await client.hset(f"{prefix}ledger", "generation", "forged")
        with pytest.raises(ResponseError, match="ACL failure"):
            await client.eval(f"return redis.call('HSET', '{prefix}ledger', 'ready', '0')", 0)


async def test_a_placer_cannot_read_budgets_and_a_timekeeper_cannot_end_leases(
    redis_url: str, written: CredentialFiles
) -> None:
    async with logged_in(redis_url, written, "placer") as placer:
        with pytest.raises(NoPermissionError):
            await placer.hgetall("lh-budget:meta")
    async with logged_in(redis_url, written, "timekeeper") as timekeeper:
        with pytest.raises(NoPermissionError):
            await timekeeper.hdel("lh:leases", "pod")


async def test_clients_without_a_user_have_no_permission_and_the_probe_user_may_ping(
    redis_url: str, written: CredentialFiles
) -> None:
    probing = redis.asyncio.Redis.from_url(redis_url, username="probe", password="-")  # noqa: S106
    async with logged_in(redis_url, written, "admin"), probing as probe:
        for command_line in ("PING", "GET lh:meta", "AUTH default x", "AUTH x"):
            assert (await reply_to(redis_url, command_line)).startswith((b"-NOAUTH", b"-WRONGPASS"))
        assert await probe.ping()
        for arguments in FORBIDDEN:
            with pytest.raises(NoPermissionError):
                await probe.execute_command(*arguments)
    async with RedisLeases.connect(redis_url) as ledger:
        with pytest.raises(UnavailableError, match="--redis-credentials"):
            await ledger.generation()


async def reply_to(url: str, arguments: str) -> bytes:
    """Send one command line without a login; return the reply."""
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    writer.write(f"{arguments}\r\n".encode())
    answer = await reader.readline()
    writer.close()
    return answer


async def test_the_server_replays_the_transactions_of_every_user(
    redis_url: str, written: CredentialFiles
) -> None:
    """Redis, and Valkey before 9.1, replay transactions with the rights of `default`."""
    async with logged_in(redis_url, written, "admin") as admin:
        for key in KEYS:
            assert await allowed(admin, "default", "HSET", key, "field", "value")


def keys_at(written: CredentialFiles, user: str) -> ClientCredentials:
    return ClientCredentials(login_file=written.redis(user))


async def test_each_client_does_its_work_as_its_own_user(
    redis_url: str, written: CredentialFiles
) -> None:
    async with (
        logged_in(redis_url, written, "admin"),
        RedisLeases.connect(redis_url, credentials=keys_at(written, "binder")) as binder,
        RedisLeases.connect(redis_url, credentials=keys_at(written, "dashboard")) as dashboard,
        Budgets.connect(redis_url, credentials=keys_at(written, "timekeeper")) as accounts,
    ):
        token = await binder.begin_rebuild(now=1.0)
        assert token is not None
        await binder.finish_rebuild(token)

        assert [page async for page in dashboard.totals.pages()] == []
        assert await dashboard.waiting_pods.load() == []
        assert await accounts.revisions() == {}
        assert await accounts.acquire_lock("count", every_ms=60_000)


async def test_scripts_use_no_command_that_the_server_marks_as_dangerous(
    redis_url: str, written: CredentialFiles
) -> None:
    from shared.ledger.script_sources import script_commands  # noqa: PLC0415 - one test

    async with logged_in(redis_url, written, "admin") as admin:
        dangerous = {str(word) for word in await admin.acl_cat("dangerous")}

    assert script_commands().isdisjoint(dangerous)


KEYS = ("lh:leases", "lh-quotas", "lh-preemption:open", "lh-budget:meta", "lh", "elsewhere")


@pytest.mark.parametrize("user", LEDGER_USERS, ids=lambda user: user.name)
async def test_each_user_reads_and_writes_the_keys_it_declares_and_no_other(
    redis_url: str, written: CredentialFiles, user: RedisUser
) -> None:
    async with logged_in(redis_url, written, "admin") as admin:
        for key in KEYS:
            writes = any(fnmatch(key, pattern) for pattern in user.writes)
            reads = writes or any(fnmatch(key, pattern) for pattern in user.reads)
            assert await allowed(admin, user.name, "HGET", key, "field") is reads, key
            assert await allowed(admin, user.name, "HSET", key, "field", "value") is writes, key
            assert await allowed(admin, user.name, "DEL", key) is writes, key


@pytest.mark.parametrize("user", LEDGER_USERS, ids=lambda user: user.name)
async def test_each_user_may_call_what_the_clients_and_scripts_call_and_no_other_command(
    redis_url: str, written: CredentialFiles, user: RedisUser
) -> None:
    line = next(x for x in written.acl.read_text().splitlines() if x.split()[1] == user.name)
    granted = {word[1:].partition("|")[0] for word in line.split() if word.startswith("+")}
    async with logged_in(redis_url, written, "admin") as admin:
        commands = await admin.execute_command("COMMAND")
        may = {
            name
            for name, reply in commands.items()
            if await allowed(admin, user.name, *_called(name, reply["arity"]))
        }

    assert may <= granted | {"auth", "hello", "quit", "reset"}  # what everybody may


def _called(name: str, arity: int) -> list[str]:
    """Words for a command; keys are of the ledger, so that only the command itself decides."""
    return [name.upper(), *["lh:leases"] * (abs(arity) - 1)]


async def allowed(admin: Any, user: str, *arguments: str) -> bool:
    """Ask the server whether a user could call this; no call is made."""
    try:
        return await admin.execute_command("ACL", "DRYRUN", user, *arguments) in {b"OK", "OK"}
    except ResponseError:
        return False
