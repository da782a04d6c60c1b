"""A mirror that reads changes together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shared.ledger.leases import RedisLeases
from shared.model.errors import UnavailableError
from shared.model.leases.ledger import LedgerChange, LedgerSnapshot
from shared.runtime import ledger_mirror
from shared.runtime.ledger_mirror import LedgerMirror
from tests.support.clock import FakeClock
from tests.support.waiting import until

LONG_S = 3600.0


class FedLedger(RedisLeases):
    """A ledger whose changes and errors a test feeds."""

    def __init__(self) -> None:
        """It needs no server."""
        self.feed: asyncio.Queue[list[LedgerChange] | Exception] = asyncio.Queue()
        self.snapshots = 0
        self.rebuilding = False

    async def snapshot(self) -> LedgerSnapshot:
        if self.rebuilding:
            raise UnavailableError("the ledger is being rebuilt")
        self.snapshots += 1
        return LedgerSnapshot(position="1", capacity=7, nodes=())

    async def changes(self, position: str) -> AsyncIterator[list[LedgerChange]]:
        while True:
            item = await self.feed.get()
            if isinstance(item, Exception):
                raise item
            yield item


@contextlib.asynccontextmanager
async def following(*, pauses: bool) -> AsyncIterator[tuple[FedLedger, LedgerMirror]]:
    ledger = FedLedger()
    followed = LedgerMirror(ledger, FakeClock(), may_pause=lambda: pauses)
    task = asyncio.create_task(followed.follow())
    await until(lambda: followed.unready_reason() is None)
    yield ledger, followed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def change(capacity: int) -> list[LedgerChange]:
    return [LedgerChange(position=str(capacity), cause="released", capacity=capacity)]


async def read(ledger: FedLedger, followed: LedgerMirror, capacity: int) -> None:
    ledger.feed.put_nowait(change(capacity))
    await until(lambda: followed.mirror.capacity == capacity)


async def test_changes_are_not_read_during_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_mirror, "READ_PAUSE_S", LONG_S)
    async with following(pauses=True) as (ledger, followed):
        await read(ledger, followed, 8)
        ledger.feed.put_nowait(change(9))
        for _ in range(10):
            await asyncio.sleep(0)
        assert followed.mirror.capacity == 8

        followed.read_now()

        await until(lambda: followed.mirror.capacity == 9)


async def test_what_an_event_was_queued_for_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_mirror, "READ_PAUSE_S", LONG_S)
    monkeypatch.setattr(ledger_mirror, "REACH_S", LONG_S)
    async with following(pauses=True) as (ledger, followed):
        await read(ledger, followed, 8)
        for capacity in (9, 10):
            ledger.feed.put_nowait(change(capacity))

        async with asyncio.timeout(30):
            await followed.reach(10)

        assert followed.mirror.capacity == 10


async def test_changes_that_do_not_come_are_not_awaited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_mirror, "REACH_S", 0.01)
    async with following(pauses=True) as (_, followed), asyncio.timeout(30):
        await followed.reach(1_000)

        assert followed.mirror.capacity < 1_000


async def test_without_pauses_every_change_is_read_as_it_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_mirror, "READ_PAUSE_S", LONG_S)
    async with following(pauses=False) as (ledger, followed):
        for capacity in (8, 9):
            await read(ledger, followed, capacity)


async def test_a_mirror_that_fails_after_each_snapshot_is_unready_and_says_why() -> None:
    ledger = FedLedger()
    clock = FakeClock()
    followed = LedgerMirror(ledger, clock)
    for _ in range(4):
        ledger.feed.put_nowait(ValueError("a change that cannot be applied"))
        with pytest.raises(ValueError, match="cannot be applied"):
            await followed.follow()
        clock.advance(4)

    assert followed.unready_reason() == (
        "disconnected from the ledger for 16 s: a change that cannot be applied"
    )


async def test_a_mirror_is_ready_from_its_first_snapshot_on() -> None:
    ledger = FedLedger()
    clock = FakeClock()
    followed = LedgerMirror(ledger, clock)
    ledger.rebuilding = True
    with pytest.raises(UnavailableError):
        await followed.follow()
    clock.advance(8)
    ledger.rebuilding = False

    task = asyncio.create_task(followed.follow())
    await until(lambda: ledger.snapshots == 1)
    clock.advance(4)

    assert followed.unready_reason() is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_mirror_that_has_followed_for_long_is_ready_again() -> None:
    ledger = FedLedger()
    clock = FakeClock()
    followed = LedgerMirror(ledger, clock)
    ledger.feed.put_nowait(ValueError("once"))
    with pytest.raises(ValueError, match="once"):
        await followed.follow()
    clock.advance(60)

    task = asyncio.create_task(followed.follow())
    await until(lambda: ledger.snapshots == 2)
    clock.advance(11)

    assert followed.unready_reason() is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
