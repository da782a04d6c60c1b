"""Locks by holder: one that is held keeps the others free."""

import asyncio

from services.node_agent.records.holder_locks import HolderLocks
from shared.model.names import PodUid

ONE = PodUid("one")
TWO = PodUid("two")
THREE = PodUid("three")


async def test_a_lock_that_is_held_keeps_that_holder_waiting_and_no_other() -> None:
    locks = HolderLocks()
    async with locks.hold(ONE):
        second = asyncio.create_task(_hold(locks, ONE))
        async with asyncio.timeout(10), locks.hold(TWO):
            assert not second.done()
        assert locks.is_held(ONE)

    async with asyncio.timeout(10):
        await second
    assert not locks.is_held(ONE)


async def test_free_locks_are_taken_first_and_the_others_one_by_one_without_a_lock_meanwhile() -> (
    None
):
    locks = HolderLocks()
    async with locks.hold(ONE):
        async with locks.hold_free({ONE, TWO, THREE}) as holders:
            assert holders == {TWO, THREE}
            assert locks.is_held(TWO)
        waiting = asyncio.create_task(_hold_free(locks, {ONE}))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not locks.is_held(TWO)

    async with asyncio.timeout(10):
        assert await waiting == {ONE}


async def _hold(locks: HolderLocks, holder: PodUid) -> None:
    async with locks.hold(holder):
        pass


async def _hold_free(locks: HolderLocks, holders: set[PodUid]) -> set[PodUid]:
    async with locks.hold_free(holders) as held:
        return set(held)
