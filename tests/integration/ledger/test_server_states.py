"""Servers as our manifests start them, behind Sentinels, and in states that refuse calls.

The server of the wheel has no TLS, so that those flags are left out here.
"""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import yaml
from redis.exceptions import ResponseError

from services.auth.redis_users import DEFAULT_USER_RULE
from services.cli import credentials
from services.cli.credentials import CredentialFiles
from shared.credentials.logins import ClientCredentials
from shared.ledger.connection import LedgerConnection
from shared.ledger.connection_pool import connection_pool
from shared.ledger.function_library import library
from shared.ledger.leases import RedisLeases
from shared.ledger.redis_server import default_user_refusal, redis_facts
from shared.ledger.server_errors import translate
from shared.ledger.waiting_pods import GatedPods
from shared.model.errors import PermissionDeniedError, RequestError, UnavailableError
from shared.model.events.pod_events import PodGated
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, PodUid
from tests.support.placer.ledger import rebuild, reservation, reserve, share
from tests.support.servers.nats import free_port
from tests.support.servers.sentinels import Servers, sentinels
from tests.support.servers.valkey import ValkeyServer, valkey_binary
from tests.support.waiting import until


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """A Sentinel that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def begin(leases: RedisLeases) -> None:
    await rebuild(leases, {"a": 1})


async def epoch(leases: RedisLeases) -> str | None:
    """Read the generation as soon as a primary responds."""

    async def read() -> tuple[str | None, ...]:
        with suppress(UnavailableError):
            return (await leases.generation(),)
        return ()

    found: tuple[str | None] = await until(read)
    return found[0]


async def kept(servers: Servers) -> None:
    """Wait until the replica has all that was written."""
    first = servers.ports["first"]
    async with asyncio.timeout(30):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", first)
            writer.write(b"WAIT 1 1000\r\n")
            answer = await reader.readline()
            writer.close()
            if answer == b":1\r\n":
                return


async def test_the_primary_is_followed_past_a_sentinel_that_hangs() -> None:
    async with sentinels() as servers:
        with mute() as hung:
            url = servers.url().replace("sentinel://", f"sentinel://{hung},")
            async with RedisLeases.connect(url, detects_lost_writes=True) as leases:
                await begin(leases)
                [before] = await reserve(leases, reservation("p", share("a")))
                life = await leases.generation()
                await kept(servers)

                servers.signal("first", signal.SIGKILL)
                await servers.until("second", "replication", "role:master")

                assert await epoch(leases) == life
                assert await leases.load([before.pod]) == [before]
                [bound] = await leases.bind([before])
                assert isinstance(bound, Lease)


async def test_a_replica_that_was_behind_is_detected() -> None:
    async with (
        sentinels() as servers,
        RedisLeases.connect(servers.url(), detects_lost_writes=True) as leases,
    ):
        await begin(leases)
        await kept(servers)
        servers.signal("second", signal.SIGSTOP)
        await servers.part("first")
        [lost] = await reserve(leases, reservation("p", share("a")))

        servers.signal("first", signal.SIGKILL)
        servers.signal("second", signal.SIGCONT)
        await servers.until("second", "replication", "role:master")

        assert await epoch(leases) is None
        await begin(leases)
        [later] = await reserve(leases, reservation("p", share("a")))
        assert later.version > lost.version


async def test_connections_to_a_demoted_primary_are_closed() -> None:
    async with (
        sentinels() as servers,
        RedisLeases.connect(servers.url(), detects_lost_writes=True) as leases,
    ):
        await begin(leases)
        await kept(servers)

        reader, writer = await asyncio.open_connection("127.0.0.1", servers.ports["watch-0"])
        writer.write(b"SENTINEL FAILOVER ledger\r\n")
        assert await reader.readline() == b"+OK\r\n"
        writer.close()
        await servers.until("first", "replication", "role:slave")

        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(UnavailableError):
                    [held] = await reserve(leases, reservation("p", share("a")))
                    break
        assert await leases.load([held.pod]) == [held]


async def test_without_a_sentinel_the_ledger_is_unavailable_and_the_error_names_the_addresses() -> (
    None
):
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/ledger"
    async with RedisLeases.connect(url) as leases:
        with pytest.raises(UnavailableError, match="No master found for 'ledger'"):
            await leases.generation()


@pytest.mark.parametrize(
    "url", ["redis+sentinel://a,b", "redis+sentinel://a/", "redis+sentinel://u:p@a/ledger"]
)
async def test_an_address_without_a_primary_or_with_a_secret_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match=r"redis\+sentinel://HOST:26379") as refused:
        async with RedisLeases.connect(url):
            pass
    assert "u:p" not in str(refused.value)


ROOT = Path(__file__).parents[3]
TLS_FLAG = re.compile(r"--(port|tls-[\w-]+)")


def in_compose() -> list[str]:
    service: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return [str(word) for word in service["redis"]["command"]]


def in_kubernetes() -> list[str]:
    for found in yaml.safe_load_all((ROOT / "k8s/base/redis.yaml").read_text()):
        if found["kind"] == "StatefulSet":
            (container,) = found["spec"]["template"]["spec"]["containers"]
            return [str(word) for word in (*container["command"], *container["args"])]
    raise AssertionError("no StatefulSet")


def without_tls(arguments: Sequence[str]) -> list[str]:
    """Leave out the flags of TLS with what follows each, and the program."""
    pairs = list(zip(arguments[1::2], arguments[2::2], strict=True))
    assert sum(bool(TLS_FLAG.fullmatch(flag)) for flag, _ in pairs) >= 5
    return [word for pair in pairs if not TLS_FLAG.fullmatch(pair[0]) for word in pair]


def own_address() -> str:
    """Return an address of this machine that is not its loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return str(probe.getsockname()[0])


@asynccontextmanager
async def served(
    arguments: Sequence[str], written: CredentialFiles, folder: Path
) -> AsyncIterator[str]:
    """Start it, with the users of `written`; the address is one that others come by."""
    given = {
        **dict(zip(arguments[::2], arguments[1::2], strict=True)),
        "--aclfile": str(written.acl),
    }
    given |= {"--dir": str(folder), "--port": str(free_port())}
    command = [valkey_binary(), *(word for pair in given.items() for word in pair)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        host, port = own_address(), int(given["--port"])
        await until(lambda: listens(host, port))
        yield f"redis://{host}:{port}/0"
    finally:
        server.kill()
        server.wait()


async def listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.fixture
def written(tmp_path: Path) -> CredentialFiles:
    return credentials.write(tmp_path / "credentials", [], nats=False)


def shown(written: CredentialFiles, user: str) -> ClientCredentials:
    return ClientCredentials(login_file=written.redis(user))


@pytest.mark.parametrize(
    "arguments", [in_compose(), in_kubernetes()], ids=["compose", "kubernetes"]
)
async def test_only_a_service_with_its_secret_can_connect_from_another_machine(
    arguments: list[str], written: CredentialFiles, tmp_path: Path
) -> None:
    async with (
        served(without_tls(arguments), written, tmp_path) as url,
        RedisLeases.connect(url, credentials=shown(written, "binder")) as binder,
        RedisLeases.connect(url) as nobody,
    ):
        assert await binder.generation() is None  # it replies: the ledger is not built yet
        with pytest.raises(PermissionDeniedError, match="denies access"):
            await nobody.generation()


async def test_the_error_of_a_server_in_protected_mode_has_the_remedy(
    written: CredentialFiles, tmp_path: Path
) -> None:
    careless = "user default on nopass -@all +ping"
    written.acl.write_text(written.acl.read_text().replace(DEFAULT_USER_RULE, careless))

    async with (
        served(without_tls(in_compose()), written, tmp_path) as url,
        RedisLeases.connect(url, credentials=shown(written, "placer")) as placer,
    ):
        with pytest.raises(UnavailableError, match="--protected-mode no"):
            await placer.generation()


@pytest.mark.parametrize(
    ("default", "message"),
    [
        (DEFAULT_USER_RULE, ""),
        ("user default on >secret ~* &* -@all +ping", "'set' command"),
        ("user default off resetpass ~lh:* &* +@all", "'lh-quotas:doctor' key"),
        ("user default off resetpass ~* &* +@all -xadd", "'xadd' command"),
    ],
)
async def test_the_operator_sees_whether_the_append_only_file_can_be_replayed(
    default: str, message: str, written: CredentialFiles, tmp_path: Path
) -> None:
    written.acl.write_text(written.acl.read_text().replace(DEFAULT_USER_RULE, default))

    async with served(without_tls(in_compose()), written, tmp_path) as url:
        pool = connection_pool(url, shown(written, "operator"), timeout_s=5)
        client = redis.asyncio.Redis.from_pool(pool)
        found = await default_user_refusal(client)
        facts = await redis_facts(url, shown(written, "operator"))
        await client.aclose()

    assert bool(found) == bool(message)
    assert message in found
    assert facts.replay_refusal == "", "this Valkey reads it back whatever its default user may do"


ENDLESS = (
    "#!lua name=endless\nredis.register_function{function_name = 'endless', "
    "callback = function() while true do end end, flags = {'no-writes'}}"
)
GATED = PodGated(pod=PodUid("uid"), namespace=Namespace("ns"), name="pod", resource_version="1")


class Refusal:
    """A server, and how it comes to refuse calls and to accept them again."""

    def __init__(self) -> None:
        self.server = ValkeyServer(durable=False)
        self.calls: list[asyncio.Task[bytes]] = []

    @property
    def dump(self) -> Path:
        return self.server.folder / "dump.rdb"

    async def set(self, name: str, value: str) -> None:
        assert (await self.server.command("CONFIG", "SET", name, value)).startswith(b"+OK")

    async def misconf(self) -> None:
        """A snapshot fails, because a folder has its name."""
        await self.set("save", "3600 1000000")
        self.dump.mkdir()
        await self.server.command("BGSAVE")
        await until(self._refuses_writes)

    async def _refuses_writes(self) -> bool:
        return (await self.server.command("SET", "a", "b")).startswith(b"-MISCONF")

    async def end_misconf(self) -> None:
        self.dump.rmdir()
        await self.server.command("BGSAVE")
        await until(self.dump.exists)
        await until(self._accepts_writes)

    async def _accepts_writes(self) -> bool:
        return (await self.server.command("SET", "a", "b")).startswith(b"+OK")

    async def busy(self) -> None:
        """A function runs for longer than the server waits before it refuses others."""
        await self.set("busy-reply-threshold", "10")
        await self.server.command("FUNCTION", "LOAD", "REPLACE", ENDLESS)
        self.calls.append(asyncio.create_task(self.server.command("FCALL", "endless", "0")))
        await until(self._is_busy)

    async def _is_busy(self) -> bool:
        return (await self.server.command("GET", "a")).startswith(b"-BUSY")

    async def end_busy(self) -> None:
        assert (await self.server.command("FUNCTION", "KILL")).startswith(b"+OK")
        await self.calls.pop()

    async def oom(self) -> None:
        await self.set("maxmemory", "1")

    async def end_oom(self) -> None:
        await self.set("maxmemory", "0")

    async def readonly(self) -> None:
        await self.server.command("REPLICAOF", "127.0.0.1", "1")

    async def masterdown(self) -> None:
        await self.set("replica-serve-stale-data", "no")
        await self.readonly()

    async def end_readonly(self) -> None:
        await self.server.command("REPLICAOF", "NO", "ONE")

    async def noreplicas(self) -> None:
        await self.set("min-replicas-to-write", "1")

    async def end_noreplicas(self) -> None:
        await self.set("min-replicas-to-write", "0")

    async def loading(self) -> None:
        """The server starts with a file that takes long to read."""
        for number in range(2000):
            await self.server.command("SET", f"key-{number}", "x" * 100)
        await self.server.command("SAVE")
        self.server.kill()
        slow = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
        self.server.start(*slow)
        await until(self._is_loading)

    async def _is_loading(self) -> bool:
        with contextlib.suppress(OSError):
            return (await self.server.command("GET", "a")).startswith(b"-LOADING")
        return False

    async def end_loading(self) -> None:
        await self.set("key-load-delay", "0")
        await self.server.ready()


@pytest.fixture
async def refusal() -> AsyncIterator[Refusal]:
    made = Refusal()
    made.server.start()
    await made.server.ready()
    try:
        yield made
    finally:
        made.server.forget()
        for call in made.calls:
            await call


STATES: dict[str, tuple[Callable[[Refusal], Awaitable[None]], ...]] = {
    "MISCONF": (Refusal.misconf, Refusal.end_misconf),
    "BUSY": (Refusal.busy, Refusal.end_busy),
    "OOM": (Refusal.oom, Refusal.end_oom),
    "READONLY": (Refusal.readonly, Refusal.end_readonly),
    "MASTERDOWN": (Refusal.masterdown, Refusal.end_readonly),
    "NOREPLICAS": (Refusal.noreplicas, Refusal.end_noreplicas),
    "LOADING": (Refusal.loading, Refusal.end_loading),
}


@pytest.mark.parametrize("state", STATES)
async def test_a_server_that_refuses_writes_is_not_available_until_it_accepts_them(
    refusal: Refusal, state: str
) -> None:
    begin, end = STATES[state]
    async with LedgerConnection(refusal.server.url, prefix="t:") as ledger:

        async def write() -> None:
            await ledger.run("gated_pods", "save", [("ns", "pod", "text")], state="any")

        await write()
        await begin(refusal)

        with pytest.raises(UnavailableError, match=r"the call to the ledger at .* failed: "):
            await write()
        assert ledger.unready_reason is not None

        await end(refusal)
        await write()
        assert ledger.unready_reason is None


async def test_reads_that_are_served_do_not_hide_that_writes_are_refused(refusal: Refusal) -> None:
    async with LedgerConnection(refusal.server.url, prefix="t:") as ledger:
        await ledger.run("gated_pods", "save", [("ns", "pod", "text")], state="any")
        await refusal.readonly()
        with pytest.raises(UnavailableError):
            await ledger.run("gated_pods", "save", [("ns", "pod", "text")], state="any")

        await ledger.read_feed("0", count=1, block_s=0.01)
        await ledger.run("read_gated_pods", "list", "ns", state="any")

        assert ledger.unready_reason is not None
        await refusal.end_readonly()
        await until(lambda: _is_ready_after_read(ledger))


async def test_a_seldom_used_subject_is_ready_again_as_soon_as_others_are_served(
    refusal: Refusal,
) -> None:
    async with RedisLeases.connect(refusal.server.url, prefix="t:") as leases:
        seldom_used = leases.part(GatedPods)
        await rebuild(leases)
        await refusal.readonly()
        with pytest.raises(UnavailableError):
            await seldom_used.save([GATED])
        assert leases.unready_reason() is not None
        await refusal.end_readonly()

        async def serves() -> bool:
            await leases.capacity()
            return seldom_used.unready_reason() is None

        await until(serves)


async def _is_ready_after_read(ledger: LedgerConnection) -> bool:
    await ledger.read_feed("0", count=1, block_s=0.01)
    return ledger.unready_reason is None


@pytest.mark.parametrize("code", ["TRYAGAIN", "CLUSTERDOWN", "UNKILLABLE", "UNHEARDOF"])
async def test_a_code_that_the_library_does_not_know_is_a_state_of_the_server(
    refusal: Refusal, code: str
) -> None:
    error = await _function_error(refusal, f"return redis.error_reply('{code} for now')")

    assert isinstance(translate(error, where="x", hint="", library=library()), UnavailableError)


async def test_a_function_that_an_operator_kills_is_no_bug(refusal: Refusal) -> None:
    await refusal.busy()
    running = refusal.calls[0]
    await refusal.server.command("FUNCTION", "KILL")

    text = (await running).decode().removeprefix("-ERR ").strip()

    assert "user_function" in text
    error = translate(ResponseError(text), where="x", hint="", library=library())
    assert isinstance(error, UnavailableError)


@pytest.mark.parametrize("body", ["return nil + 1", "redis.call('SET', keys[1])"])
async def test_an_error_in_a_function_is_a_bug(refusal: Refusal, body: str) -> None:
    error = await _function_error(refusal, body)

    assert type(translate(error, where="x", hint="", library=library())) is ResponseError


async def _function_error(refusal: Refusal, body: str) -> ResponseError:
    text = f"#!lua name=wrong\nredis.register_function('wrong', function(keys) {body} end)"
    async with LedgerConnection(refusal.server.url, prefix="t:") as ledger:
        await ledger._redis.function_load(text, replace=True)
        with pytest.raises(ResponseError) as raised:
            await ledger._redis.fcall("wrong", 1, "t:key")
    return raised.value
