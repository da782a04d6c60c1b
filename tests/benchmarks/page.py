"""The page with thousands of devices in Chromium: how long it takes to come up, and its frames.

    python -m tests.benchmarks.page 400 500

An API without NATS and Redis is filled with nodes of eight devices, each holding four leases;
for ten seconds leases change, published in rounds as by the ledger, while the map is scrolled from
top to bottom. Printed are the load of the machine, of which two cores must be free; the time until
the first row is drawn, as the page itself notes it and as Playwright, which polls, sees it, for the
first viewer, for whom the API encodes all devices, and a later one; the times between frames as
requestAnimationFrame sees them (more than 50 ms is a stutter that one feels), tasks of more than
50 ms, and how much of a CPU the page's main thread used, which means most on a busy machine.
"""

import argparse
import asyncio
import itertools
import os
import time
from dataclasses import replace

from playwright.async_api import Browser, CDPSession, Page

from services.api.http.http_server import HttpServer
from services.api.http.read_api import ReadApi
from services.api.service import ApiService, ApiTiming
from shared.credentials.authorization import AnonymousAuthenticator
from shared.ledger.connection_pool import LedgerClock
from shared.model.clock import SystemClock
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import NodeTotals, counted_use
from shared.runtime import health
from tests.support import build
from tests.support.api.browser import chromium
from tests.support.api.running import NodesUsage

PER_NODE = 8
ROUND_S = ApiTiming().round_s
LEASES = 4
SECONDS = 10
WATCH = """(seconds) => new Promise((done) => {
  const times = [], tasks = [];
  const note = (list) => tasks.push(...list.getEntries().map((one) => one.duration));
  new PerformanceObserver(note).observe({ type: "longtask" });
  let last = performance.now(), end = last + seconds * 1000;
  const tick = (now) => {
    times.push(now - last);
    last = now;
    window.scrollTo(0, document.body.scrollHeight * (1 - (end - now) / (seconds * 1000)));
    now < end ? requestAnimationFrame(tick) : setTimeout(() => done([times.slice(1), tasks]), 100);
  };
  requestAnimationFrame(tick);
})"""
STATES = (LeaseState.RESERVED, LeaseState.BOUND, LeaseState.ACTIVE)


def account(number: int, turn: int) -> NodeTotals:
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
    node = build.ledger_node(name, *((device, uses[device.uuid]) for device in devices))
    return NodeTotals(node=replace(node, facts=build.facts(name)), leases=leases)


async def change(board: ApiService, nodes: int, changes: int) -> None:
    """Change so many devices a second, for ever."""
    numbers = itertools.cycle(range(nodes))
    for turn in itertools.count(1):
        count = max(round(changes * ROUND_S / PER_NODE), 1)
        accounts = [account(next(numbers), turn) for _ in range(count)]
        board.feed.publish(board.projection.update_nodes([], accounts))
        await asyncio.sleep(ROUND_S)


async def measure(devices: int, changes: int) -> None:
    """Print what the page saw."""
    nodes = -(-devices // PER_NODE)
    usage = NodesUsage()
    clock = SystemClock()
    board = ApiService(None, clock, read_usage=usage, preemptions=None, ledger_clock=LedgerClock())  # type: ignore[arg-type]
    board.projection.update_nodes([], [account(number, 0) for number in range(nodes)])
    board.synced = True
    api = ReadApi(board, None, None)  # type: ignore[arg-type]
    pages = HttpServer(api, AnonymousAuthenticator())
    async with (
        health.served(pages.application(), "127.0.0.1:0") as address,
        chromium() as browser,
    ):
        print(f"{nodes * PER_NODE} devices, load {os.getloadavg()[0]:.1f}")
        first = await _opened(browser, f"http://{address}/#/gpus", "first")
        await first.close()
        page = await _opened(browser, f"http://{address}/#/gpus", "later")
        thread = await page.context.new_cdp_session(page)
        await thread.send("Performance.enable", {"timeDomain": "threadTicks"})
        for what, rate in (("idle", 0), (f"{changes} devices changing a second", changes)):
            task = asyncio.create_task(change(board, nodes, rate)) if rate else None
            before = await _seconds(thread)
            times, tasks = await page.evaluate(WATCH, SECONDS)
            after = await _seconds(thread)
            if task is not None:
                task.cancel()
            _print(what, sorted(times), sorted(tasks))
            spent = {name: after[name] - before[name] for name in after}
            parts = ", ".join(f"{k} {1000 * v / len(times):.1f}" for k, v in spent.items())
            print(f"  ms of the main thread's CPU per frame: {parts}")


async def _opened(browser: Browser, url: str, viewer: str) -> Page:
    """Open the page without a cache, and print when its first row was there."""
    page = await browser.new_page(viewport={"width": 1280, "height": 720})
    began = time.monotonic()
    await page.goto(url)
    await page.wait_for_selector(".share")
    seen_s = time.monotonic() - began
    drawn_s = await page.evaluate("performance.getEntriesByName('drawn')[0].startTime / 1000")
    print(
        f"  {viewer} viewer: first row drawn {drawn_s:.2f} s after the navigation began, "
        f"seen by Playwright after {seen_s:.2f} s"
    )
    return page


async def _seconds(thread: CDPSession) -> dict[str, float]:
    """Return how much CPU time the page's main thread has used, and for what."""
    reported = await thread.send("Performance.getMetrics")
    metrics = {metric["name"]: float(metric["value"]) for metric in reported["metrics"]}
    kinds = {"busy": "Task", "script": "Script", "layout": "Layout", "style": "RecalcStyle"}
    return {kind: metrics[f"{name}Duration"] for kind, name in kinds.items()}


def _print(name: str, times: list[float], tasks: list[float]) -> None:
    middle = times[len(times) // 2]
    late = times[len(times) * 99 // 100]
    stutters = sum(time > 50 for time in times)
    print(
        f"  scrolling, {name}: {len(times) / SECONDS:.0f} frames/s, median {middle:.1f} ms, "
        f"99 % below {late:.1f} ms, longest {times[-1]:.1f} ms, {stutters} above 50 ms; "
        f"{len(tasks)} tasks above 50 ms, longest {max(tasks, default=0):.0f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("devices", type=int, nargs="?", default=5000)
    parser.add_argument("changes", type=int, nargs="?", default=500, help="of devices, a second")
    options = parser.parse_args()
    asyncio.run(measure(options.devices, options.changes))
