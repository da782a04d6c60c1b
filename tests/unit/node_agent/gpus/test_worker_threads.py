"""Blocking calls that start together: one thread, unless one of them takes long."""

import asyncio
import threading

import pytest

from services.node_agent.gpus.worker_threads import SingleFlight, start_in_thread


async def test_calls_that_start_together_share_a_thread() -> None:
    threads = await asyncio.gather(*(start_in_thread(threading.get_ident) for _ in range(5)))

    assert len(set(threads)) == 1


async def test_a_call_that_hangs_delays_neither_those_before_nor_those_after_it() -> None:
    hang = threading.Event()
    before, hanging, after = map(start_in_thread, (lambda: 1, lambda: hang.wait(60), lambda: 2))
    async with asyncio.timeout(20):
        returned = [await before, await after]
    is_hanging = not hanging.done()
    hang.set()

    assert (returned, is_hanging, await hanging) == ([1, 2], True, True)


async def test_a_call_that_crashes_does_not_delay_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: printed.set())

    def crash() -> None:
        raise IndexError("a bug of ours")

    crashed, after = start_in_thread(crash), start_in_thread(lambda: 2)
    async with asyncio.timeout(20):
        assert await after == 2
    assert "failed unexpectedly" in str(crashed.result())
    assert await asyncio.to_thread(printed.wait, 20)


async def test_a_result_that_was_not_fetched_is_not_returned_by_a_later_call() -> None:
    calls, results = SingleFlight[int](), iter([1, 2])
    calls.start({"a": lambda: next(results)})
    await start_in_thread(lambda: None)
    calls.start({"a": lambda: next(results)})

    assert await calls.call_each({"a": lambda: 3}, lambda: 20.0) == {"a": 2}
