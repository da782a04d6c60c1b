"""The planner's process gives way to those that bind pods."""

import asyncio
import os
import runpy
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.planner import wiring
from shared.runtime import run

NICEST = 19


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_the_planner_runs_with_a_higher_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = list[Callable[[object], Coroutine[Any, Any, None]]]()
    observed = list[int]()

    async def observe(settings: object) -> None:
        observed.append(niceness())

    monkeypatch.setattr(run, "run_service", lambda kind, entry, **more: entries.append(entry))
    monkeypatch.setattr(wiring, "serve_planner", observe)
    monkeypatch.delitem(sys.modules, "services.planner.__main__", raising=False)
    runpy.run_module("services.planner", run_name="__main__")

    # In a thread, which has a niceness of its own.
    thread = threading.Thread(target=lambda: asyncio.run(entries[0](None)))
    thread.start()
    thread.join()

    assert observed == [min(niceness() + 10, NICEST)]
