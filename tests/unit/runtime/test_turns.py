"""Turns by size and owner."""

import asyncio

from shared.runtime.turns import SIZES, SMALLER_FIRST, SizedTurns

LARGE = SIZES[0] + 1


async def order(turns: SizedTurns, *work: tuple[str, int]) -> list[str]:
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

    assert await order(SizedTurns(), *work) == ["busy", "busy", "other", "third", "busy"]


async def test_small_work_comes_before_large_work_of_any_owner() -> None:
    work = (("first", 1), *((f"large-{number}", LARGE) for number in range(5)), ("small", 1))

    assert (await order(SizedTurns(), *work))[:3] == ["first", "small", "large-0"]


async def test_large_work_waits_for_a_bounded_number_of_small_turns() -> None:
    small = [(f"small-{number}", 1) for number in range(3 * SMALLER_FIRST)]

    done = await order(SizedTurns(), ("first", 1), ("large", LARGE), *small)

    assert done.index("large") == SMALLER_FIRST + 1


async def test_some_have_turns_at_once_and_one_that_gives_up_passes_its_turn_on() -> None:
    turns = SizedTurns(2)

    async def wait() -> None:
        async with turns.turn("b"):
            pass

    async with turns.turn("a"), turns.turn("a"):
        waiting = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()

    async with asyncio.timeout(5), turns.turn("c"):
        await waiting[1]
