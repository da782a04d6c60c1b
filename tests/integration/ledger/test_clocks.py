"""Stored times with hosts whose clocks are an hour off, and evidence that binders collect."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import redis.asyncio
from msgspec import structs

from services.binder.ledger_sync.reconciliation import LedgerMismatch
from shared.ledger.connection_pool import LedgerClock
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.bounds import MOST_VERSION
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.leases.ledger import ReservedLease
from shared.model.names import Namespace
from shared.model.quantity import HOUR_S
from tests.support.placer.ledger import (
    NOW,
    device,
    facts,
    ledger,
    queued,
    rebuild,
    report,
    reservation,
    reserve,
    share,
    verdict,
)
from tests.support.planner.scene import budget
from tests.support.waiting import until

DEVICES = 32


async def test_leases_are_restored_with_less_than_one_command_each(url: str) -> None:
    async with ledger(url, {"a": DEVICES}) as leases, redis.asyncio.from_url(url) as db:
        wanted = [reservation(f"p{gpu}", share("a", gpu)) for gpu in range(DEVICES)]
        bound = await leases.bind(await reserve(leases, *wanted))
        kept = [lease for lease in bound if isinstance(lease, Lease)]
        token = await leases.begin_rebuild(now=NOW, force=True)
        assert token
        await leases.save_nodes([facts("a")])
        await leases.save_devices([report("a", [device("a", gpu) for gpu in range(DEVICES)])])
        await db.config_resetstat()

        assert await leases.restore(kept, now=NOW, token=token) == []

        commands = await db.info("commandstats")
        counting = {f"cmdstat_{name}" for name in ("hlen", "zcard", "scard")}
        assert len(kept) == DEVICES
        others = [each["calls"] for name, each in commands.items() if name not in counting]
        assert sum(others) < DEVICES


OFF = pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S])


@asynccontextmanager
async def host(url: str, leases: RedisLeases) -> AsyncIterator[tuple[RedisLeases, LedgerClock]]:
    """Another host's connection to the same ledger, and the clock that its services use."""
    clock = LedgerClock()
    prefix = leases._connection.prefix
    async with RedisLeases.connect(url, prefix=prefix, clock=clock) as opened:
        await opened.generation()
        yield opened, clock


@contextmanager
def clock_off(monkeypatch: pytest.MonkeyPatch, off_s: float) -> Iterator[None]:
    """Set the clock of this machine for a while, but not the server's."""
    now = time.time
    with monkeypatch.context() as machine:
        machine.setattr(time, "time", lambda: now() + off_s)
        yield


@asynccontextmanager
async def host_with_clock_off(
    url: str, leases: RedisLeases, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> AsyncIterator[tuple[RedisLeases, LedgerClock]]:
    """Another host, whose own clock is off."""
    with clock_off(monkeypatch, off_s):
        async with host(url, leases) as opened:
            yield opened


async def reserved(leases: RedisLeases, clock: LedgerClock, *, ttl_s: float) -> Lease:
    [outcome] = await leases.reserve([reservation("p", share("a"))], now=clock.now(), ttl_s=ttl_s)
    assert isinstance(outcome, ReservedLease)
    return outcome.lease


@OFF
async def test_a_host_uses_the_time_of_the_server(
    url: str, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    true = time.time()
    async with (
        ledger(url) as leases,
        host_with_clock_off(url, leases, monkeypatch, off_s) as (_, clock),
    ):
        assert abs(clock.now() - true) < 60


async def test_no_time_is_used_before_the_server_has_replied() -> None:
    with pytest.raises(UnavailableError, match="not known yet"):
        LedgerClock().now()


@OFF
async def test_a_reservation_expires_in_time_whichever_host_reserved_and_expires(
    url: str, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    async with ledger(url) as leases, host(url, leases) as (binder, theirs):
        async with host_with_clock_off(url, leases, monkeypatch, off_s) as (placer, ours):
            await reserved(placer, ours, ttl_s=2.0)

        early = await binder.expire(theirs.now())
        ended = await until(lambda: binder.expire(theirs.now()))

    assert [lease.pod for lease in early] == []
    assert [lease.pod for lease in ended] == ["p"]


@OFF
async def test_a_lease_without_a_pod_is_found_whichever_host_reserved(
    url: str, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    true = time.time()
    async with (
        ledger(url) as leases,
        host_with_clock_off(url, leases, monkeypatch, off_s) as (placer, ours),
    ):
        lease = await reserved(placer, ours, ttl_s=30)

    bound = structs.replace(lease, state=LeaseState.BOUND)
    mismatch = LedgerMismatch(())
    mismatch.add([bound])
    assert mismatch.orphans == [bound]
    assert abs(lease.created_at - true) < 60, "ages of leases are right on every host"


@pytest.mark.parametrize(
    ("activated_in_s", "counted"), [(-60.0, -60.0), (HOUR_S, 0.0), (None, 0.0)]
)
async def test_a_restored_lease_was_neither_created_nor_activated_in_the_future(
    url: str, activated_in_s: float | None, counted: float
) -> None:
    async with ledger(url) as leases, host(url, leases) as (binder, clock):
        lease = await reserved(binder, clock, ttl_s=30)
        await leases.release([lease.pod], reason="a test")
        forged = structs.replace(
            lease,
            state=LeaseState.ACTIVE,
            created_at=clock.now() + HOUR_S,
            expires_at=0.0,
            activated_at=0.0 if activated_in_s is None else clock.now() + activated_in_s,
        )

        assert await binder.restore([forged], now=clock.now()) == []

        [stored] = await binder.load([lease.pod])
        assert stored is not None
        # The server stored its own time, which a binder knows to within a round trip.
        assert stored.created_at <= clock.now() + 1.0
        assert abs(stored.activated_at - clock.now() - counted) < 5


@pytest.mark.parametrize("number", [-1, MOST_VERSION])
def test_a_copy_of_a_lease_with_a_version_that_the_ledger_never_gave_is_refused(
    number: int,
) -> None:
    lease = Lease(
        pod=queued("p").pod,
        namespace=Namespace("n"),
        name="p",
        node=facts("a").name,
        shares=(share("a"),),
        version=1,
    )
    for copy in (
        structs.replace(lease, version=number),
        structs.replace(lease, shares=(structs.replace(lease.shares[0], fence=number),)),
    ):
        with pytest.raises(RequestError, match="is not a lease: "):
            load_lease(dump_lease(copy), namespace=lease.namespace, name=lease.name)


@OFF
async def test_an_offer_is_repeated_in_time_whichever_host_offered(
    url: str, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    async with ledger(url, {"a": 1}) as leases, host(url, leases) as (binder, theirs):
        await leases.waiting_pods.enqueue([verdict(queued("w"), await leases.capacity())])
        await leases.save_devices([report("a", [device("a", gpu) for gpu in range(2)])])
        async with host_with_clock_off(url, leases, monkeypatch, off_s) as (other, ours):
            first = await other.waiting_pods.choose_offers(now=ours.now())

        soon = await binder.waiting_pods.choose_offers(now=theirs.now())
        late = await binder.waiting_pods.choose_offers(now=theirs.now() + 61)

    assert [[pod.pod for pod in each.pods] for each in (first, soon, late)] == [["w"], [], ["w"]]


@OFF
async def test_the_lock_of_a_rebuild_ends_in_time_whichever_host_took_it(
    url: str, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    async with ledger(url) as leases, host(url, leases) as (binder, theirs):
        async with host_with_clock_off(url, leases, monkeypatch, off_s) as (other, ours):
            assert await other.begin_rebuild(now=ours.now(), lock_s=2.0, force=True)

        assert await binder.begin_rebuild(now=theirs.now(), lock_s=2.0) is None
        await until(lambda: binder.begin_rebuild(now=theirs.now(), lock_s=2.0))


async def test_a_rebuild_lock_of_a_clock_that_was_ahead_blocks_no_rebuild(url: str) -> None:
    """The server's own clock was ahead, before another server took over."""
    async with ledger(url) as leases, host(url, leases) as (binder, clock):
        assert await leases.begin_rebuild(now=clock.now() + HOUR_S, lock_s=6, force=True)

        assert await binder.begin_rebuild(now=clock.now(), lock_s=6)


async def test_versions_rise_although_the_clock_of_the_server_is_an_hour_behind(url: str) -> None:
    async with ledger(url) as leases, host(url, leases) as (_, clock):
        await rebuild(leases, {"a": 1}, now=clock.now(), force=True)
        lease = await reserved(leases, clock, ttl_s=30)
        await leases._connection._redis.delete(f"{leases._connection.prefix}ledger")

        await rebuild(leases, {"a": 1}, now=clock.now() - HOUR_S)
        [again] = await reserve(leases, reservation("p", share("a")), now=clock.now() - HOUR_S)

    assert again.version > lease.version
    assert again.shares[0].fence > lease.shares[0].fence


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S, 60.0, -60.0])
async def test_a_report_of_devices_counts_soon_after_the_clock_of_its_host_was_set(
    url: str, off_s: float
) -> None:
    """An agent's reports are compared with each other only, and for 20 s."""
    true = time.time()
    one = [device("a", 0)]
    two = [device("a", 0), device("a", 1)]
    async with ledger(url, {}) as leases, redis.asyncio.from_url(url) as client:
        assert await leases.save_devices([report("a", one, at=true + off_s)]) is not None
        counts_at_once = await leases.save_devices([report("a", two, at=true)])
        await client.hincrby(f"{leases._connection.prefix}facts:a", "saved_at", -20)

        counts_later = await leases.save_devices([report("a", two, at=true + 1)])

    delivered_late = off_s == 60.0
    assert (counts_at_once is None, counts_later is None) == (delivered_late, not delivered_late)


@OFF
async def test_quotas_are_saved_although_the_previous_ones_have_another_hosts_time(
    url: str, off_s: float
) -> None:
    true = time.time()
    team = Namespace("team")
    quotas = [Quota(namespace=team, limits=QuotaLimits(cards=number)) for number in range(2)]
    async with ledger(url) as leases, redis.asyncio.from_url(url) as client:
        before, after = (true + off_s, true + 1) if off_s > 0 else (true, true + off_s)
        assert await leases.quotas.save(quotas[:1], read_at=before)
        saved = await leases.quotas.save(quotas[1:], read_at=after)
        [key] = await client.keys(f"{leases._connection.prefix.rstrip(':')}*read-at")
        assert 0 < await client.ttl(key) <= 120
        await client.expire(key, 0)
        if not saved:
            saved = await leases.quotas.save(quotas[1:], read_at=after)

        assert saved
        assert (await leases.quotas.totals()).quotas[team].limits.cards == 1


@OFF
async def test_the_state_of_a_budget_counts_although_the_one_before_was_from_the_future(
    url: str, off_s: float
) -> None:
    """Times of budgets are the server's; the clock of the one that had failed was off."""
    true = time.time()
    async with ledger(url) as leases:
        store = Preemptions(leases._connection)
        await store.save_budget(budget("team", "reclaimable", reported_at=true + off_s))
        await store.save_budget(budget("team", "guaranteed", reported_at=true))

        state = await store.state(now=true)

    stored = (state.budgets or {})[Namespace("team")]
    assert stored.lease_class == "guaranteed"
