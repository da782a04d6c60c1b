"""Takes the pictures of the page in `docs/pictures`: `python -m tools.generate.page_pictures`.

They show a fixed cluster at a fixed time, so that only a change of the page changes a picture.
"""

import asyncio
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from playwright.async_api import async_playwright

from services.dashboard.http_server import DashboardServer
from services.dashboard.service import Dashboard
from shared.credentials.authorization import AnonymousAuthenticator
from shared.model.clock import SystemClock
from shared.model.device import Device, DeviceUse
from shared.model.events.pod_events import PodBound, PodQueued
from shared.model.lease import Lease, LeaseState, Share
from shared.model.ledger import LedgerNode, NodeTotals, WaitingPod, counted_use
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Refusal
from shared.model.request import PodRequest
from shared.model.usage import ShareMeasurement
from shared.runtime import health

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
NOW = 1_787_000_000.0
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SIZE = {"width": 1100, "height": 560}


class FixedClock(SystemClock):
    """A wall clock that stands still."""

    def now(self) -> float:
        """Return the time of the pictures."""
        return NOW


def lease(number: int, node: str, gpu: int, mib: int, state: LeaseState) -> Lease:
    """A lease of one of three namespaces."""
    share = Share(
        container="main",
        device=DeviceUuid(f"GPU-{node}-{gpu}"),
        index=gpu,
        device_mib=16_000,
        memory_mib=mib,
        cores_percent=0,
        slot=number,
        fence=number,
    )
    return Lease(
        pod=PodUid(f"uid-{number}"),
        namespace=Namespace(("default", "team-a", "team-b")[number % 3]),
        name=f"train-{number}",
        node=NodeName(node),
        shares=(share,),
        state=state,
    )


def device(node: str, index: int) -> Device:
    """A GPU of a node."""
    return Device(
        uuid=DeviceUuid(f"GPU-{node}-{index}"),
        index=index,
        model="Tesla T4",
        memory_mib=15_360,
        slots=10,
        healthy=(node, index) != ("node-0", 0),
    )


def accounts() -> list[NodeTotals]:
    """Two nodes of four GPUs; one GPU is unhealthy."""
    active, bound, reserved = LeaseState.ACTIVE, LeaseState.BOUND, LeaseState.RESERVED
    held = {
        "node-0": [lease(4, "node-0", 3, 5_500, bound), lease(9, "node-0", 1, 12_000, active)],
        "node-1": [
            lease(8, "node-1", 0, 9_300, active),
            lease(7, "node-1", 1, 8_300, active),
            lease(5, "node-1", 2, 6_600, active),
            lease(6, "node-1", 2, 7_300, active),
            *(lease(n, "node-1", 3, 2_400 + 700 * n, active) for n in range(3)),
            lease(3, "node-1", 3, 3_000, reserved),
        ],
    }
    found = []
    for node, leases in held.items():
        uses, _ = counted_use(leases)
        devices = [device(node, index) for index in range(4)]
        known = LedgerNode(
            facts=NodeFacts(name=NodeName(node), allocatable={"pods": 110}),
            devices=tuple((one, uses.get(one.uuid, DeviceUse())) for one in devices),
        )
        found.append(NodeTotals(node=known, leases=tuple(leases)))
    return found


def usage(lease: Lease) -> ShareMeasurement:
    """The measured usage of a lease; one of them is idle."""
    (share,), number = lease.shares, int(lease.name.rpartition("-")[2])
    return ShareMeasurement(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        container=share.container,
        device=share.device,
        memory_mib=share.memory_mib * (20 + 8 * number) // 100,
        cores_percent=0 if number == 7 else 15 + 10 * number,
        processes=1,
        idle_since=NOW - 3 * 3_600 if number == 7 else None,
    )


async def no_agents(_: Iterable[NodeName]) -> Mapping[NodeName, None]:
    """The usage of no node."""
    return {}


def filled() -> Dashboard:
    """The page's state at that moment."""
    board = Dashboard(None, FixedClock(), read_usage=no_agents)  # type: ignore[arg-type]
    totals = accounts()
    board.projection.update_nodes([], totals)
    for of_node in totals:
        shares = [usage(lease) for lease in of_node.leases if lease.state is LeaseState.ACTIVE]
        update = board.projection.update_measured
        update(of_node.node.facts.name, shares, now=NOW, idle_after_s=600)
    queued = PodQueued(
        pod=PodUid("uid-huge"),
        namespace=Namespace("team-a"),
        name="huge",
        resource_version="1",
        request=PodRequest(),
    )
    why = Refusal(reason="0/2 nodes are available: 2 Insufficient GPU memory.")
    waiting = WaitingPod(queued=queued, refusal=why, capacity=1, waiting_since=NOW - 1_340)
    board.projection.update_waiting([waiting])
    events = [
        PodBound(lease=each, latency_s=0.012 * number)
        for number, each in enumerate(totals[1].leases[:4], start=1)
    ]
    board.feed.publish(board.projection.add_events(events, NOW))
    board.synced = True
    return board


async def take() -> None:
    """Write both pictures."""
    pages = DashboardServer(filled(), AnonymousAuthenticator(), None)  # type: ignore[arg-type]
    async with (
        health.served(pages.application(), "127.0.0.1:0") as address,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme in SCHEMES:
            page = await browser.new_page(color_scheme=scheme, viewport=SIZE, timezone_id="UTC")  # type: ignore[arg-type]
            await page.goto(f"http://{address}/")
            await page.locator(".share").nth(9).wait_for()
            await page.locator("#events li").first.wait_for()
            await page.screenshot(path=FOLDER / f"page-{scheme}.png")
        await browser.close()


if __name__ == "__main__":
    asyncio.run(take())
