"""One record that cannot be decoded is written anew alone; all others stay as they are."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import redis.asyncio
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm
from shared.model.errors import ConflictError
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import NoCapacity, UnreadableRecord
from shared.model.leases.preemption import Preemption, StoredStart
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.placer.ledger import (
    NOW,
    damages,
    device,
    facts,
    ledger,
    queued,
    report,
    reservation,
    reserve,
    share,
    uses,
    uuid,
    verdict,
)

GARBAGE = [b"", b"\xff" * 41, bytes(range(200))]
DEFAULT = Namespace("default")
QUOTA = Quota(namespace=DEFAULT, limits=QuotaLimits(cards=9))
BUDGET = BudgetChanged(
    namespace=DEFAULT,
    state="ok",
    previous_state="ok",
    lease_class="guaranteed",
    weight=3,
    reported_at=NOW,
)
PREEMPTION = Preemption(
    id="preempts", victims=(), wanted=(reservation("preempts", share("c", mib=16_000), node="c"),)
)
START = StoredStart(
    id="starts",
    wanted=(reservation("starts", share("c", 1, mib=16_000), node="c"),),
    at_once=({},),
    waits_for=(),
    at=NOW + 3600,
    enforced=True,
    opened_at=NOW,
)
REPELS = AntiAffinityTerm(topology_key=HOSTNAME, selector=())
CLUSTER = {"a": 2, "b": 1, "c": 2}


class Used(NamedTuple):
    """A ledger with a record of each kind."""

    leases: RedisLeases
    plans: Preemptions
    redis: Any
    prefix: str

    def key(self, kind: str) -> str:
        beside = kind == "quotas" or kind.startswith("preemption:")
        return f"{self.prefix[:-1]}-{kind}" if beside else f"{self.prefix}{kind}"

    async def stored(self) -> dict[tuple[str, bytes], bytes]:
        """Return every record by its kind and key."""
        return {
            (kind, name): value
            for kind in (*RECORDS, "used-cores", "used-mib", "waiting-groups")
            if kind != "expiring"
            for name, value in (await self.redis.hgetall(self.key(kind))).items()
        }

    async def wait(self, *pods: str) -> None:
        capacity = await self.leases.capacity()
        large = [queued(pod, units=16_001) for pod in pods]
        await self.leases.waiting_pods.enqueue([verdict(pod, capacity) for pod in large])

    async def seen(self) -> list[object]:
        """Return what readers see, but for versions and fences."""
        leases = self.leases
        state = await self.plans.state(now=NOW)
        all_uses = await uses(leases)
        fair_share = await leases.totals.fair_share()
        return [
            {device: structs_without_fence(use) for device, use in all_uses.items()},
            [(node.facts, dict(node.used)) for node in (await leases.snapshot()).nodes],
            sorted(waiting.queued.pod for waiting in await leases.waiting_pods.load()),
            await leases.quotas.totals(),
            fair_share,
            await leases.totals.claimed(),
            await leases.totals.gangs(),
            await leases.resizes.unsynced(older_than_s=0),
            [read.preemption for read in state.open],
            state.starts,
            state.budgets,
        ]


def structs_without_fence(use: Any) -> Any:
    return use._replace(fence=0) if hasattr(use, "_replace") else structs.replace(use, fence=0)


@asynccontextmanager
async def used_ledger(url: str) -> AsyncIterator[Used]:
    async with (
        ledger(url, CLUSTER) as leases,
        redis.asyncio.Redis.from_url(url) as client,
    ):
        prefix = leases._connection.prefix
        async with Preemptions.connect(url, prefix=prefix) as plans:
            await leases.quotas.save([QUOTA], read_at=NOW)
            await plans.save_budget(BUDGET)
            made = await reserve(
                leases,
                structs.replace(reservation("runs", share("a")), gang="gang"),
                reservation("beside", share("a", mib=1_000, cores=10)),
                reservation("other", share("b"), node="b"),
                structs.replace(
                    reservation("quiet", share("b", mib=100), node="b"), repels=(REPELS,)
                ),
            )
            await leases.bind(made[:3])
            await leases.activate([(PodUid("runs"), NodeName("a"))])
            await leases.resizes.set_unsynced(made[:1])
            used = Used(leases, plans, client, prefix)
            await used.wait("waits", "waits-too")
            assert await plans.open(PREEMPTION)
            assert await plans.open_start(START)
            yield used


async def nothing(used: Used) -> None:
    """Do nothing: the record is whole again at once."""


async def report_devices(used: Used) -> None:
    await used.leases.save_devices([report("a", [device("a", 0), device("a", 1)], at=NOW)])


async def save_node(used: Used) -> None:
    await used.leases.save_nodes([facts("a")])


async def queue(used: Used) -> None:
    await used.wait("waits")


async def save_quotas(used: Used) -> None:
    await used.leases.quotas.save([QUOTA], read_at=NOW + 1)


async def save_budget(used: Used) -> None:
    await used.plans.save_budget(BUDGET)


async def plan_preemption(used: Used) -> None:
    [read] = (await used.plans.state(now=NOW)).open or [None]
    if read is not None:
        await used.plans.close(read)
    assert await used.plans.open(PREEMPTION)


async def plan_start(used: Used) -> None:
    assert await used.plans.open_start(START)


async def reserve_again(used: Used) -> None:
    again = structs.replace(reservation("quiet", share("b", mib=100), node="b"), repels=(REPELS,))
    await used.leases.release([PodUid("quiet")], reason="its pod is placed again")
    await reserve(used.leases, again)


RECORDS: dict[str, tuple[str, str, Any]] = {
    "leases": ("runs", "a", nothing),
    "devices": (uuid("a", 0), "a", report_devices),
    "nodes": ("a", "a", save_node),
    "waiting": ("waits", "", queue),
    "quotas": ("default", "", save_quotas),
    "quota-charges": ("runs", "", nothing),
    "quota-used": ("default", "", nothing),
    "entitlements": ("default", "", nothing),
    "node-sizes": ("a", "", nothing),
    "unsynced": ("runs", "", nothing),
    "claims": ("preempts", "", plan_preemption),
    "starts": ("starts", "", plan_start),
    "repelling": ("quiet", "", reserve_again),
    "preemption:preemptions": ("preempts", "", plan_preemption),
    "preemption:budgets": ("default", "", save_budget),
    "expiring": ("", "", nothing),
}
"""For each kind the record that is damaged, its node, and what its source does after that."""


async def damage(used: Used, kind: str, garbage: bytes) -> UnreadableRecord:
    name, node, _ = RECORDS[kind]
    if kind == "expiring":
        [(member, score)] = await used.redis.zrange(used.key(kind), 0, -1, withscores=True)
        await used.redis.zrem(used.key(kind), member)
        await used.redis.zadd(used.key(kind), {garbage: score})
    else:
        assert await used.redis.hset(used.key(kind), name, garbage) == 0, "it has such a record"
    return UnreadableRecord(kind, name, node)


async def renew(used: Used, record: UnreadableRecord, *leases: Lease) -> None:
    generation = await used.leases.generation()
    assert generation is not None
    assert await used.leases.renew([record], leases, generation=generation, now=NOW) == []


async def lease_of(used: Used, pod: str) -> Lease | None:
    [lease] = await used.leases.load([PodUid(pod)])
    return lease


@pytest.mark.parametrize("garbage", GARBAGE, ids=["empty", "no record", "numbers"])
@pytest.mark.parametrize("kind", RECORDS)
async def test_a_damaged_record_is_whole_again_and_its_neighbours_are_untouched(
    url: str, kind: str, garbage: bytes
) -> None:
    async with used_ledger(url) as used:
        lease = await lease_of(used, "runs")
        assert lease is not None
        assert await damages(used.leases) == {}
        seen = await used.seen()
        stored = await used.stored()

        record = await damage(used, kind, garbage)
        assert record in (await used.leases.checks.read()).unreadable
        assert await lease_of(used, "other") is not None
        await renew(used, record, *([lease] if kind == "leases" else []))
        name, node, repair = RECORDS[kind]
        untouched = await used.stored()
        await repair(used)

        assert (await used.leases.checks.read()).unreadable == ()
        assert await damages(used.leases) == {}
        assert await used.seen() == seen
        assert await lease_of(used, "runs") == lease
        changed = {record for record, value in stored.items() if untouched.get(record) != value}
        own = {(kind, name.encode())} | ({("nodes", node.encode())} if node else set())
        assert changed <= own | FOLLOWS.get(kind, set()), changed
        assert [each.key for each in await used.leases.checks.unreadable()] == [name]


FOLLOWS: dict[str, set[tuple[str, bytes]]] = {
    "devices": {
        ("node-sizes", b"a"),
        ("quota-charges", b"runs"),
        ("quota-charges", b"beside"),
        ("quota-used", b"default"),
    },
    "waiting": {("waiting-groups", b"1:16001:0:0:0:1:0:0")},
    "claims": {
        ("devices", uuid("c", 0).encode()),
        ("devices", uuid("c", 1).encode()),
        ("nodes", b"c"),
    },
    "starts": {("claims", b"starts"), ("devices", uuid("c", 1).encode()), ("nodes", b"c")},
    "preemption:preemptions": {
        ("claims", b"preempts"),
        ("devices", uuid("c", 0).encode()),
        ("nodes", b"c"),
    },
}
"""What is counted without the record until it is there again."""


async def test_what_a_damaged_lease_holds_is_never_free(url: str) -> None:
    async with used_ledger(url) as used:
        lease = await lease_of(used, "other")
        assert lease is not None
        record = UnreadableRecord("leases", "other", "b")
        await used.redis.hset(used.key("leases"), "other", b"\xff")
        whole = reservation("thief", share("b", mib=15_000), node="b")

        [before] = await used.leases.reserve([whole], now=NOW, ttl_s=30)
        await renew(used, record, lease)
        [after] = await used.leases.reserve([whole], now=NOW, ttl_s=30)

        assert isinstance(before, NoCapacity)
        assert isinstance(after, NoCapacity)
        assert (await uses(used.leases))[uuid("b", 0)].memory_mib == 4_100


async def test_a_reservation_of_which_nothing_else_is_known_ends_and_frees_its_capacity(
    url: str,
) -> None:
    async with used_ledger(url) as used:
        capacity = await used.leases.capacity()
        await reserve(used.leases, structs.replace(reservation("lost", share("a", 1)), gang="g"))
        await used.redis.hset(used.key("leases"), "lost", b"\xff")

        await renew(used, UnreadableRecord("leases", "lost", "a"))

        assert await damages(used.leases) == {}
        assert await used.leases.capacity() > capacity, "waiting pods are offered it"
        assert "g" not in await used.leases.totals.gangs()
        await reserve(used.leases, reservation("lost", share("a", 1, mib=16_000)))


async def test_thousands_of_claims_of_which_nothing_else_is_known_end_together(url: str) -> None:
    async with used_ledger(url) as used:
        claim = await used.redis.hget(used.key("claims"), "preempts")
        copies = {f"copy-{number}": claim for number in range(8_001)}
        await used.redis.hset(used.key("claims"), mapping=copies)

        await renew(used, UnreadableRecord("starts", "starts", ""))

        assert await used.redis.hkeys(used.key("claims")) == [b"preempts"]


async def test_fences_rise_although_the_record_of_their_device_was_damaged(url: str) -> None:
    async with used_ledger(url) as used:
        [before] = await reserve(used.leases, reservation("p", share("a", 1)))
        await used.leases.release([PodUid("p")], reason="it has ended")
        await used.redis.hset(used.key("devices"), uuid("a", 1), b"\xff")

        await renew(used, UnreadableRecord("devices", uuid("a", 1), "a"))
        await report_devices(used)

        [after] = await reserve(used.leases, reservation("q", share("a", 1)))
        assert after.shares[0].fence > before.shares[0].fence


async def test_reservations_expire_although_the_record_of_when_was_damaged(url: str) -> None:
    async with used_ledger(url) as used:
        await renew(used, await damage(used, "expiring", b"\xff"))

        expired = await used.leases.expire(NOW + 31)

        assert [(lease.pod, lease.state) for lease in expired] == [("quiet", LeaseState.EXPIRED)]


async def test_records_of_a_ledger_that_was_rebuilt_since_are_not_written_anew(url: str) -> None:
    async with used_ledger(url) as used:
        record = UnreadableRecord("leases", "runs", "a")

        with pytest.raises(ConflictError):
            await used.leases.renew([record], [], generation="another", now=NOW)

        assert await lease_of(used, "runs") is not None
