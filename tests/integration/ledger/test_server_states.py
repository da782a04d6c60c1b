"""Each state in which a real server refuses calls: not available, and no bug of ours."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from shared.ledger.connection import LedgerConnection
from shared.ledger.leases import RedisLeases
from shared.ledger.server_errors import translate
from shared.ledger.waiting_pods import GatedPods
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import PodGated
from shared.model.names import Namespace, PodUid
from tests.support.placer.ledger import NOW
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until

ENDLESS = "while true do end"
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
        """A script runs for longer than the server waits before it refuses others."""
        await self.set("busy-reply-threshold", "10")
        self.calls.append(asyncio.create_task(self.server.command("EVAL", ENDLESS, "0")))
        await until(self._is_busy)

    async def _is_busy(self) -> bool:
        return (await self.server.command("GET", "a")).startswith(b"-BUSY")

    async def end_busy(self) -> None:
        assert (await self.server.command("SCRIPT", "KILL")).startswith(b"+OK")
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

        await ledger.read_feed(0, count=1, block_s=0.01)
        await ledger.run("gated_pods", "list", "ns", state="any")

        assert ledger.unready_reason is not None
        await refusal.end_readonly()
        await until(lambda: _is_ready_after_read(ledger), limit_s=10)


async def test_a_seldom_used_subject_is_ready_again_as_soon_as_others_are_served(
    refusal: Refusal,
) -> None:
    async with RedisLeases.connect(refusal.server.url, prefix="t:") as leases:
        seldom_used = leases.part(GatedPods)
        token = await leases.begin_rebuild(now=NOW)
        assert token is not None
        assert await leases.finish_rebuild(token)
        await refusal.readonly()
        with pytest.raises(UnavailableError):
            await seldom_used.save([GATED])
        assert leases.unready_reason() is not None
        await refusal.end_readonly()

        async def serves() -> bool:
            await leases.capacity()
            return seldom_used.unready_reason() is None

        await until(serves, limit_s=10)


async def _is_ready_after_read(ledger: LedgerConnection) -> bool:
    await ledger.read_feed(0, count=1, block_s=0.01)
    return ledger.unready_reason is None


@pytest.mark.parametrize("code", ["TRYAGAIN", "CLUSTERDOWN", "UNKILLABLE", "UNHEARDOF"])
async def test_a_code_that_the_library_does_not_know_is_a_state_of_the_server(
    refusal: Refusal, code: str
) -> None:
    error = await _script_error(refusal, f"return redis.error_reply('{code} for now')")

    assert isinstance(translate(error, where="x", hint=""), UnavailableError)


async def test_a_script_that_an_operator_kills_is_no_bug(refusal: Refusal) -> None:
    await refusal.busy()
    running = refusal.calls[0]
    await refusal.server.command("SCRIPT", "KILL")

    text = (await running).decode().removeprefix("-ERR ").strip()

    assert "user_script" in text
    assert isinstance(translate(ResponseError(text), where="x", hint=""), UnavailableError)


@pytest.mark.parametrize(
    "script",
    [
        "return nil + 1",
        "redis.call('SET', KEYS[1])",
        "this is not Lua",
    ],
)
async def test_an_error_in_a_script_is_a_bug(refusal: Refusal, script: str) -> None:
    error = await _script_error(refusal, script)

    assert translate(error, where="x", hint="") is error


async def _script_error(refusal: Refusal, script: str) -> ResponseError:
    async with LedgerConnection(refusal.server.url, prefix="t:") as ledger:
        with pytest.raises(ResponseError) as raised:
            await ledger._redis.eval(script, 1, "t:key")
    return raised.value
