"""Turns go round among owners, however much work one of them has."""

import asyncio

from services.webhook.service import FairTurns


async def test_an_owner_with_one_piece_of_work_waits_for_one_of_another() -> None:
    turns, done = FairTurns(), list[str]()

    async def work(owner: str) -> None:
        async with turns.turn(owner):
            await asyncio.sleep(0)
            done.append(owner)

    async with asyncio.TaskGroup() as group:
        for owner in ("busy", "busy", "busy", "busy", "other", "third"):
            group.create_task(work(owner))

    assert done == ["busy", "busy", "other", "third", "busy", "busy"]


async def test_work_that_gives_up_passes_its_turn_on() -> None:
    turns = FairTurns()

    async def wait() -> None:
        async with turns.turn("b"):
            pass

    async with turns.turn("a"):
        waiting = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()

    async with asyncio.timeout(5), turns.turn("c"):
        await waiting[1]
