"""Which operations a real valkey-server with users permits and denies."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, ResponseError

from services.auth.redis_users import USERS as LEDGER_USERS
from services.auth.redis_users import RedisUser
from services.cli.credentials import CredentialFiles
from shared.credentials.logins import ClientCredentials, load_login
from shared.ledger.budgets import Budgets
from shared.ledger.function_library import FUNCTIONS
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.errors import PermissionDeniedError, UnavailableError
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionCause,
)
from shared.model.names import NodeName
from tests.support.placer.ledger import rebuild, reservation, share
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until


@dataclass(frozen=True)
class Server:
    """A server, and the logins of its users."""

    url: str
    written: CredentialFiles

    @asynccontextmanager
    async def as_user(self, user: str) -> AsyncIterator[Any]:
        login = load_login(self.written.redis(user))
        async with redis.asyncio.Redis.from_url(
            self.url, username=login.user, password=login.secret
        ) as client:
            await until(lambda: _answers(client))
            yield client

    async def loaded(self, body: str) -> str:
        """Load a function as a binder may; return its name."""
        name = f"test_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
        text = f"#!lua name={name}\nredis.register_function('{name}', function() {body} end)"
        async with self.as_user("binder") as binder:
            await binder.function_load(text, replace=True)
        return name

    def keys(self, user: str) -> ClientCredentials:
        return ClientCredentials(login_file=self.written.redis(user))


@pytest.fixture(scope="module")
def at(written: CredentialFiles) -> Iterator[Server]:
    server = ValkeyServer()
    server.start("--aclfile", str(written.acl))
    yield Server(server.url, written)
    server.forget()


async def _answers(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except redis.exceptions.ConnectionError:
        return False


FORBIDDEN = (
    ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "SET", "maxmemory", "1"), ("KEYS", "*"), ("MONITOR",),
    ("SHUTDOWN",), ("ACL", "LIST"), ("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH"), ("SAVE",),
    ("REPLICAOF", "other", "1"), ("CLIENT", "LIST"), ("GET", "elsewhere"), ("SET", "lh", "x"),
    ("HSET", "elsewhere", "a", "b"), ("PUBLISH", "c", "x"), ("FUNCTION", "LIST"),
)  # fmt: skip
READERS = {"api": ("lh:", "lh-budget:"), "operator": ("lh:",), "timekeeper": ("lh:",)}


@pytest.mark.parametrize(("user", "prefix"), [(u, p) for u, ps in READERS.items() for p in ps])
async def test_a_user_cannot_write_through_a_function_what_it_only_reads(
    at: Server, user: str, prefix: str
) -> None:
    async with at.as_user(user) as client:
        await client.hgetall(f"{prefix}ledger")
        with pytest.raises(NoPermissionError):
            await client.hset(f"{prefix}ledger", "generation", "forged")
        function = await at.loaded(f"return redis.call('HSET', '{prefix}ledger', 'ready', '0')")
        with pytest.raises(ResponseError, match=r"ACL failure|no permissions to run the 'fcall'"):
            await client.fcall(function, 0)
        with pytest.raises(ResponseError, match="write flag"):
            await client.fcall_ro(function, 0)


LUA = "return 1"
OWN_CODE = (
    ("EVAL", LUA, "0"), ("EVAL_RO", LUA, "0"), ("EVALSHA", "0", "0"), ("SCRIPT", "LOAD", LUA),
    ("FUNCTION", "LOAD", "#!lua name=x"), ("FUNCTION", "DELETE", "x"), ("FUNCTION", "RESTORE", "x"),
)  # fmt: skip


@pytest.mark.parametrize("user", LEDGER_USERS, ids=lambda user: user.name)
async def test_only_the_binder_decides_what_functions_do(at: Server, user: RedisUser) -> None:
    permitted = set()
    async with at.as_user("admin") as admin:
        for arguments in OWN_CODE:
            if await allowed(admin, user.name, *arguments):
                permitted.add(arguments[:2])

    assert user.loads_functions is (user.name == "binder")
    loading = {("FUNCTION", "LOAD"), ("FUNCTION", "DELETE")}
    assert permitted == (loading if user.loads_functions else set())


@pytest.mark.parametrize("user", ["api", "timekeeper"])
async def test_other_users_wait_for_the_functions_that_a_binder_loads(
    at: Server, user: str
) -> None:
    async with (
        at.as_user("admin") as admin,
        RedisLeases.connect(at.url, credentials=at.keys(user)) as ledger,
        RedisLeases.connect(at.url, credentials=at.keys("binder")) as binder,
    ):
        api = ledger.part(Budgets)
        await admin.function_flush()
        with pytest.raises(UnavailableError, match="a binder of this version loads them"):
            await api.revisions()
        assert api.unready_reason() is not None

        for _ in range(2):
            await binder.generation()
            assert await api.revisions() == {}
            assert api.unready_reason() is None
            await admin.function_flush()


async def test_clients_without_a_user_have_no_permission_and_the_probe_user_may_ping(
    at: Server,
) -> None:
    probing = redis.asyncio.Redis.from_url(at.url, username="probe", password="-")  # noqa: S106
    async with at.as_user("admin"), probing as probe:
        for command_line in ("PING", "GET lh:meta", "AUTH default x", "AUTH x"):
            assert (await reply_to(at.url, command_line)).startswith((b"-NOAUTH", b"-WRONGPASS"))
        assert await probe.ping()
        for arguments in FORBIDDEN:
            with pytest.raises(NoPermissionError):
                await probe.execute_command(*arguments)
    async with RedisLeases.connect(at.url) as ledger:
        with pytest.raises(UnavailableError, match="--redis-credentials"):
            await ledger.generation()


async def reply_to(url: str, arguments: str) -> bytes:
    """Send one command line without a login; return the reply."""
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    writer.write(f"{arguments}\r\n".encode())
    answer = await reader.readline()
    writer.close()
    return answer


async def test_the_server_replays_the_transactions_of_every_user(at: Server) -> None:
    """Redis, and Valkey before 9.1, replay transactions with the rights of `default`."""
    async with at.as_user("admin") as admin:
        for key in KEYS:
            assert await allowed(admin, "default", "HSET", key, "field", "value")


async def test_each_client_does_its_work_as_its_own_user(at: Server) -> None:
    async with (
        at.as_user("admin"),
        RedisLeases.connect(at.url, credentials=at.keys("binder")) as binder,
        RedisLeases.connect(at.url, credentials=at.keys("api")) as api,
        RedisLeases.connect(at.url, credentials=at.keys("timekeeper")) as timekeeper,
    ):
        await rebuild(binder, now=1.0)
        accounts = timekeeper.part(Budgets)

        assert [page async for page in api.totals.pages()] == []
        assert await api.waiting_pods.load() == []
        assert await accounts.revisions() == {}
        assert await accounts.acquire_lock("count", every_ms=60_000)


async def test_a_planner_writes_plans_and_nothing_that_its_limits_are_counted_from(
    at: Server,
) -> None:
    async with (
        at.as_user("admin"),
        RedisLeases.connect(at.url, credentials=at.keys("binder")) as binder,
        RedisLeases.connect(at.url, credentials=at.keys("planner")) as planner,
    ):
        await rebuild(binder, {"a": 1}, now=1.0, force=True)
        plans = planner.part(Preemptions)
        wanted = reservation("waits", share("a", 0))
        budget = BudgetChanged(
            namespace=wanted.namespace,
            previous_state="ok",
            state="exhausted",
            lease_class="expired",
        )
        eviction = EvictionRecord(
            at=1.0,
            preemption="waits",
            pod=wanted.pod,
            namespace=wanted.namespace,
            name="waits",
            node=NodeName("a"),
            owner="owner",
            cause=PreemptionCause.PRIORITY,
            budget="none",
            devices=(),
            outcome=EvictionOutcome.EVICTED,
        )

        assert await plans.acquire_leadership("planner", "me", ttl_s=1)
        assert await plans.open(Preemption(id="waits", victims=(), wanted=(wanted,)))
        [read] = (await plans.state(now=1.0)).open
        with pytest.raises(PermissionDeniedError, match="denies access"):
            await plans.acquire_leadership("binder", "me", ttl_s=1)
        with pytest.raises(PermissionDeniedError, match="denies access"):
            await plans.save_budget(budget)
        with pytest.raises(PermissionDeniedError, match="denies access"):
            await plans.save(read, read.preemption, [eviction])

        state = await binder.part(Preemptions).state(now=1.0)
        assert (state.evictions, state.budgets) == ((), {})


async def test_functions_use_no_command_that_the_server_marks_as_dangerous(at: Server) -> None:
    async with at.as_user("admin") as admin:
        dangerous = {str(word) for word in await admin.acl_cat("dangerous")}

    of_functions = frozenset[str]().union(*(each.commands for each in FUNCTIONS.values()))
    assert of_functions & dangerous == {"info"}, "which says whether the server may evict keys"


async def test_only_the_user_that_rebuilds_the_ledger_may_list_keys(at: Server) -> None:
    async with at.as_user("admin") as admin:
        listing = {
            user.name
            for user in LEDGER_USERS
            for command in ("SCAN 0", "RANDOMKEY", "DBSIZE", "KEYS lh:*")
            if await allowed(admin, user.name, *command.split())
        }

    assert listing == {"binder"}


async def test_a_binder_may_check_the_policy_and_the_records(at: Server) -> None:
    async with RedisLeases.connect(at.url, credentials=at.keys("binder")) as binder:
        await rebuild(binder, {"a": 1}, now=1.0, force=True)

        await binder.checks.check_policy()

        assert (await binder.checks.read()).unreadable == ()


KEYS = (
    "lh:leases",
    "lh-quotas",
    "lh-preemption:preemptions",
    "lh-preemption:evictions",
    "lh-budget:meta",
    "lh",
    "elsewhere",
)


@pytest.mark.parametrize("user", LEDGER_USERS, ids=lambda user: user.name)
async def test_each_user_reads_and_writes_the_keys_it_declares_and_no_other(
    at: Server, user: RedisUser
) -> None:
    async with at.as_user("admin") as admin:
        for key in KEYS:
            writes = any(fnmatch(key, pattern) for pattern in user.writes)
            reads = writes or any(fnmatch(key, pattern) for pattern in user.reads)
            assert await allowed(admin, user.name, "HGET", key, "field") is reads, key
            assert await allowed(admin, user.name, "HSET", key, "field", "value") is writes, key
            assert writes or not await allowed(admin, user.name, "DEL", key), key


@pytest.mark.parametrize("user", LEDGER_USERS, ids=lambda user: user.name)
async def test_each_user_may_call_what_the_clients_and_functions_call_and_no_other_command(
    at: Server, user: RedisUser
) -> None:
    line = next(x for x in at.written.acl.read_text().splitlines() if x.split()[1] == user.name)
    granted = {word[1:].partition("|")[0] for word in line.split() if word.startswith("+")}
    async with at.as_user("admin") as admin:
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
