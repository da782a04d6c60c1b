"""Costs on a real valkey-server: recorded once, exactly, by any number of replicas."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from services.api.reports.showback import EntryRange, add_up
from services.timekeeper.cost_recorder import CostRecorder
from shared.model.budgets.budget import HOUR_MS
from shared.model.budgets.cost_records import (
    FREE,
    IDLE,
    UNLEASED,
    UNMEASURED,
    USED,
    USES,
    WHOLE,
    CostHour,
)
from shared.model.clock import SystemClock
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import ShareMeasurement
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.placer.ledger import device, facts, report, reservation, reserve, share
from tests.support.timekeeper.accounts import AccountLedger

DEFAULT = Namespace("default")
T4 = "Tesla T4"
DEVICES = 4


def measurement(pod: str, gpu: int, *, idle: bool, node: str = "a") -> ShareMeasurement:
    known: dict[str, Any] = {"pod": PodUid(pod), "namespace": DEFAULT, "name": pod}
    at = 1.0 if idle else None
    device = share(node, gpu).device
    return ShareMeasurement(**known, container="main", device=device, idle_since=at)


def recorder(found: AccountLedger, *measured: ShareMeasurement, keep_days: int = 1) -> CostRecorder:
    async def read_usage(nodes: Iterable[NodeName]) -> Mapping[NodeName, UsageReply | None]:
        return {name: UsageReply(measured_at=1.0, shares=measured) for name in nodes}

    return CostRecorder(
        store=found.store,
        ledger=found.leases,
        read_usage=read_usage,
        clock=SystemClock(),
        keep_days=keep_days,
    )


async def hours(found: AccountLedger) -> list[CostHour]:
    now_ms = await found.store.now_ms()
    return [*(await found.store.costs(now_ms - HOUR_MS, now_ms + 1)).hours.values()]


async def total(found: AccountLedger, namespace: str = DEFAULT) -> list[int]:
    rows = [
        amounts
        for hour in await hours(found)
        for name, _, amounts in hour.rows()
        if name == namespace
    ]
    return [sum(row[use] for row in rows) for use in range(len(USES))]


async def test_leased_time_equals_the_charges_and_everything_adds_up_whichever_replica_records(
    opened: AccountLedger,
) -> None:
    replicas = [recorder(opened) for _ in range(3)]
    keeper = opened.timekeeper(store=opened.store, clock=SystemClock(), charge_every_s=0)
    await replicas[0].record()
    for number in range(6):
        pod = f"p{number}"
        (bound,) = await reserve(opened.leases, reservation(pod, share("a", number % 2, mib=4_000)))
        await opened.leases.bind([bound])
        await asyncio.gather(*(each.record() for each in replicas))
        if number % 3:
            await opened.leases.release([PodUid(pod)], reason="a test")
            await keeper.count()
    for number in range(6):
        await opened.leases.release([PodUid(f"p{number}")], reason="a test")
    await keeper.count()
    await replicas[1].record()

    recorded = await hours(opened)
    (charged,) = await add_up(opened.store, [DEFAULT], EntryRange(), ["namespace"])
    assert sum(await total(opened)) == charged.units > 0
    assert not [text for hour in recorded for text in hour.imbalances()]
    mark = await opened.store.costs(0, 0)
    passed = mark.at_ms - min(hour.from_ms for hour in recorded)
    assert sum(hour.recorded_ms for hour in recorded) == passed
    assert sum(hour.device_ms[T4] for hour in recorded) == DEVICES * passed
    assert sum(await total(opened)) + sum(await total(opened, FREE)) == DEVICES * passed * WHOLE
    length = await opened.leases._connection._redis.xlen(f"{opened.ledger_prefix}tenures")
    assert length <= 2  # read by both, and trimmed


async def test_leased_time_is_used_idle_or_not_measured_as_the_agents_report(
    opened: AccountLedger,
) -> None:
    used, idle = measurement("used", 0, idle=False), measurement("idle", 1, idle=True)
    meter = recorder(opened, used, idle)
    for pod, gpu in (("used", 0), ("idle", 1), ("silent", 1)):
        (bound,) = await reserve(opened.leases, reservation(pod, share("a", gpu, mib=4_000)))
        await opened.leases.bind([bound])
    await meter.record()
    await asyncio.sleep(0.01)
    await meter.record()
    await opened.leases.release([PodUid("idle")], reason="a test")
    await asyncio.sleep(0.01)
    await meter.record()

    amounts = await total(opened)
    quarter = sum(hour.recorded_ms for hour in await hours(opened)) * 250
    assert (amounts[USED], amounts[UNMEASURED]) == (quarter, quarter)
    assert 0 < amounts[IDLE] < quarter
    assert (await total(opened, FREE))[UNLEASED] == 4 * DEVICES * quarter - sum(amounts)


async def test_an_agent_measures_no_shares_of_other_nodes(opened: AccountLedger) -> None:
    forged = measurement("theirs", 0, idle=True, node="b")

    async def read_usage(nodes: Iterable[NodeName]) -> Mapping[NodeName, UsageReply | None]:
        assert set(nodes) == {"a", "b"}
        return {NodeName("a"): UsageReply(measured_at=1.0, shares=(forged,)), NodeName("b"): None}

    await opened.leases.save_nodes([facts("b")])
    await opened.leases.save_devices([report("b", [device("b", 0)])])
    meter = recorder(opened)
    meter.read_usage = read_usage
    for pod, node in (("own", "a"), ("theirs", "b")):
        (bound,) = await reserve(
            opened.leases, reservation(pod, share(node, 0, mib=4_000), node=node)
        )
        await opened.leases.bind([bound])
    for _ in range(2):
        await meter.record()
        await asyncio.sleep(0.01)

    amounts = await total(opened)
    assert amounts[UNMEASURED] == sum(amounts) > 0


async def test_time_without_a_journal_is_not_recorded_and_old_hours_are_deleted(
    opened: AccountLedger,
) -> None:
    meter = recorder(opened)
    redis = opened.leases._connection._redis
    keys = opened.store._keys
    await meter.record()
    now_ms = await opened.store.now_ms()
    await redis.hset(keys.cost, "at", str(now_ms - 30 * HOUR_MS))
    await meter.record()
    kept = sorted(map(int, await redis.hkeys(keys.costs)))
    before = await redis.hgetall(keys.costs)
    await redis.hset(keys.cost, "at", "1000")  # the server's clock was wrong
    await meter.record()
    assert await redis.hgetall(keys.costs) == before
    await redis.hset(keys.cost, mapping={"at": str(now_ms - 2 * HOUR_MS), "generation": "another"})
    await meter.record()

    assert len(kept) in {24, 25}
    assert now_ms - kept[0] <= 24 * HOUR_MS
    assert await redis.hgetall(keys.costs) == before
    assert await redis.hget(keys.cost, "generation") != b"another"


async def test_a_time_in_the_far_future_deletes_no_recorded_hour(opened: AccountLedger) -> None:
    meter = recorder(opened)
    redis = opened.leases._connection._redis
    keys = opened.store._keys
    await meter.record()
    now_ms = await opened.store.now_ms()
    await redis.hset(keys.cost, "at", str(now_ms - 3 * HOUR_MS))
    await meter.record()
    before = await redis.hgetall(keys.costs)
    await redis.xadd(keys.tenures, {"kind": "held"}, id=f"{now_ms + 9_000 * HOUR_MS}-0")

    await meter.record()

    assert int(await redis.hget(keys.cost, "at")) > now_ms + 8_000 * HOUR_MS
    assert len(before) >= 3
    assert await redis.hgetall(keys.costs) == before


@pytest.mark.parametrize("has_entry", [False, True])
async def test_after_a_clock_that_was_ahead_costs_are_recorded_again_or_it_is_reported(
    opened: AccountLedger, caplog: pytest.LogCaptureFixture, *, has_entry: bool
) -> None:
    meter = recorder(opened)
    redis = opened.leases._connection._redis
    keys = opened.store._keys
    await meter.record()
    later_ms = await opened.store.now_ms() + 30 * HOUR_MS
    await redis.hset(keys.cost, "at", str(later_ms))
    later = CostHour(later_ms - later_ms % HOUR_MS, later_ms, 1)
    await redis.hset(keys.costs, str(later.from_ms), msgspec.json.encode(later).decode())
    if has_entry:
        await redis.xadd(keys.tenures, {"kind": "held"}, id=f"{later_ms}-0")
    await meter.record()
    await asyncio.sleep(0.01)
    await meter.record()

    assert "the clock of Redis was" in caplog.text
    assert bool(await hours(opened)) is not has_entry
    assert await redis.hexists(keys.costs, str(later.from_ms)) is has_entry


@pytest.mark.parametrize("damaged", ["cursor", "sizes", "at"])
async def test_a_damaged_mark_is_replaced(opened: AccountLedger, damaged: str) -> None:
    meter = recorder(opened)
    keeper = opened.timekeeper(store=opened.store, clock=SystemClock())
    await meter.record()
    await opened.leases._connection._redis.hset(opened.store._keys.cost, damaged, "?")
    await keeper.count()
    await meter.record()
    await asyncio.sleep(0.01)
    await meter.record()

    assert await hours(opened)
