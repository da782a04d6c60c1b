"""The page with thousands of devices in Chromium: how long it takes to come up, and its frames.

    python -m tests.benchmarks.dashboard [DEVICES] [CHANGES_A_SECOND]

A dashboard without NATS and Redis is filled with nodes of eight devices, each holding four leases;
for ten seconds leases change, told in rounds as the ledger would, while the page is scrolled from
top to bottom. Printed are the time until every block is drawn, and the times between frames as
requestAnimationFrame sees them; more than 50 ms is a stutter that one feels.
"""

import asyncio
import itertools
import sys
import time
from dataclasses import replace

from playwright.async_api import expect

from services.dashboard.doors import OpenDoor
from services.dashboard.pages import Pages
from services.dashboard.service import ROUND_S, Dashboard
from shared.model.lease import LeaseState
from shared.model.ledger import NodeAccount, counted_use
from shared.runtime import health
from shared.runtime.clock import SystemClock
from tests.support import build
from tests.support.browser import chromium

PER_NODE = 8
LEASES = 4
SECONDS = 10
WATCH = """(seconds) => new Promise((done) => {
  const times = [];
  let last = performance.now(), end = last + seconds * 1000;
  const tick = (now) => {
    times.push(now - last);
    last = now;
    window.scrollTo(0, document.body.scrollHeight * (1 - (end - now) / (seconds * 1000)));
    now < end ? requestAnimationFrame(tick) : done(times.slice(1));
  };
  requestAnimationFrame(tick);
})"""
STATES = (LeaseState.RESERVED, LeaseState.BOUND, LeaseState.ACTIVE)


def account(number: int, turn: int) -> NodeAccount:
    """A node whose leases differ from turn to turn."""
    name = f"node-{number:04}"
    devices = build.devices(PER_NODE, name)
    leases = tuple(
        build.lease(
            f"{name}-{gpu}-{slot}",
            name,
            build.share(f"GPU-{name}-{gpu}", gpu, slot=slot, fence=1, memory_mib=4000),
            name=f"train-{turn}-{slot}",
            namespace=f"team-{(number + gpu + slot) % 12}",
            state=STATES[(turn + slot) % 3],
        )
        for gpu in range(PER_NODE)
        for slot in range(LEASES)
    )
    uses, _ = counted_use(leases)
    node = build.ledger_node(name, *((one, uses[one.uuid]) for one in devices))
    return NodeAccount(node=replace(node, facts=build.facts(name)), leases=leases)


async def change(board: Dashboard, nodes: int, changes: int) -> None:
    """Change so many devices a second, for ever."""
    numbers = itertools.cycle(range(nodes))
    for turn in itertools.count(1):
        count = max(round(changes * ROUND_S / PER_NODE), 1)
        accounts = [account(next(numbers), turn) for _ in range(count)]
        board.hub.publish(board.projection.take_nodes([], accounts))
        await asyncio.sleep(ROUND_S)


async def measure(devices: int, changes: int) -> None:
    """Print what one page saw."""
    nodes = -(-devices // PER_NODE)
    board = Dashboard(None, SystemClock())  # type: ignore[arg-type]
    board.projection.take_nodes([], [account(number, 0) for number in range(nodes)])
    board.has_read = True
    pages = Pages(board, OpenDoor(), None)  # type: ignore[arg-type]
    async with (
        health.served(pages.application(), "127.0.0.1:0") as address,
        chromium() as browser,
    ):
        page = await browser.new_page(viewport={"width": 1280, "height": 720})
        began = time.monotonic()
        await page.goto(f"http://{address}/")
        await page.wait_for_selector(".share")
        first = time.monotonic() - began
        await expect(page.locator(".dev")).to_have_count(nodes * PER_NODE)
        print(f"{nodes * PER_NODE} devices: first block {first:.2f} s, all {_since(began):.2f} s")
        for name, rate in (("idle", 0), (f"{changes} devices changing a second", changes)):
            task = asyncio.create_task(change(board, nodes, rate)) if rate else None
            times = sorted(await page.evaluate(WATCH, SECONDS))
            if task is not None:
                task.cancel()
            _print(name, times)


def _since(began: float) -> float:
    return time.monotonic() - began


def _print(name: str, times: list[float]) -> None:
    middle, late = times[len(times) // 2], times[len(times) * 99 // 100]
    stutters = sum(one > 50 for one in times)
    print(
        f"scrolling, {name}: {len(times) / SECONDS:.0f} frames/s, median {middle:.1f} ms, "
        f"99 % below {late:.1f} ms, longest {times[-1]:.1f} ms, {stutters} above 50 ms"
    )


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    asyncio.run(measure(*(numbers + [5000, 500][len(numbers) :])))
