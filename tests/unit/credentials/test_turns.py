"""Turns by size and owner."""

import asyncio

import pytest

from shared.credentials.turns import SIZES, SMALLER_FIRST, TooManyRequestsError, Turns

LARGE = SIZES[0] + 1


async def order(turns: Turns, *work: tuple[str, int]) -> list[str]:
    """Do work that arrives at once, and return whose it was, in order."""
    done: list[str] = []

    async def do(owner: str, size: int) -> None:
        async with turns.turn(owner, size):
            await asyncio.sleep(0)
            done.append(owner)

    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(do(*each))
    return done


async def test_an_owner_with_much_work_waits_for_others() -> None:
    work = (("busy", 1), ("busy", 1), ("busy", 1), ("other", 1), ("third", 1))

    assert await order(Turns(), *work) == ["busy", "busy", "other", "third", "busy"]


async def test_small_work_comes_before_large_work_of_any_owner() -> None:
    work = (("first", 1), *((f"large-{number}", LARGE) for number in range(5)), ("small", 1))

    assert (await order(Turns(), *work))[:3] == ["first", "small", "large-0"]


async def test_large_work_waits_for_a_bounded_number_of_small_turns() -> None:
    small = [(f"small-{number}", 1) for number in range(3 * SMALLER_FIRST)]

    done = await order(Turns(), ("first", 1), ("large", LARGE), *small)

    assert done.index("large") == SMALLER_FIRST + 1


async def test_some_have_turns_at_once_and_one_that_gives_up_passes_its_turn_on() -> None:
    turns = Turns(2)

    async def wait() -> None:
        async with turns.turn("b"):
            pass

    async with turns.turn("a"), turns.turn("a"):
        waiting = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()

    async with asyncio.timeout(5), turns.turn("c"):
        await waiting[1]


async def test_an_owner_holds_its_share_of_turns_and_no_more_of_its_work_waits_than_may() -> None:
    turns = Turns(3, of_one=2, most_waiting=1)
    release = asyncio.Event()
    begun = list[str]()

    async def work(owner: str) -> None:
        async with turns.turn(owner):
            begun.append(owner)
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for owner in ("busy", "busy", "busy", "other", "other"):
            group.create_task(work(owner))
        await asyncio.sleep(0)
        assert begun == ["busy", "busy", "other"]
        with pytest.raises(TooManyRequestsError, match="1 requests of busy wait"):
            async with asyncio.timeout(5), turns.turn("busy"):
                pass
        release.set()

    assert sorted(begun) == ["busy", "busy", "busy", "other", "other"]


async def test_work_that_gave_up_counts_for_nobody_and_is_not_waited_for() -> None:
    turns = Turns(1, most_waiting=1)
    async with turns.turn("first"):
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), turns.turn("busy", LARGE):
                    pass
        waiting = asyncio.create_task(take(turns, "busy"))
        await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await waiting


async def test_a_turn_of_work_that_gives_up_as_it_gets_it_is_passed_on() -> None:
    turns = Turns()
    async with turns.turn("first"):
        waiting = asyncio.create_task(take(turns, "late"))
        await asyncio.sleep(0)
    waiting.cancel()  # its turn has come, and it has not run yet

    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(5):
        await take(turns, "other")


async def take(turns: Turns, owner: str) -> None:
    async with turns.turn(owner):
        pass


async def test_an_owner_with_its_share_of_turns_does_not_hold_up_larger_work_of_others() -> None:
    turns = Turns(2, of_one=1)
    done = list[str]()

    async def do(owner: str, size: int) -> None:
        async with turns.turn(owner, size):
            done.append(owner)

    async with asyncio.timeout(5), turns.turn("busy"):
        async with asyncio.TaskGroup() as group, turns.turn("first"):
            small = asyncio.create_task(do("busy", 1))
            await asyncio.sleep(0)
            group.create_task(do("other", LARGE))
            await asyncio.sleep(0)
        assert done == ["other"]
    await small
