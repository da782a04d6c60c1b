"""Takes the pictures of the page in `docs/pictures`: `python -m tools.generate.page_pictures`.

They show a fixed cluster at a fixed time, so that only a change of the page changes a picture.
"""

import asyncio
from pathlib import Path
from typing import Literal

from services.dashboard.http_server import DashboardServer
from services.dashboard.service import Dashboard
from shared.credentials.authorization import AnonymousAuthenticator
from shared.model.events.pod_events import PodBound
from shared.model.lease import Lease, LeaseState
from shared.model.ledger import NodeTotals, WaitingPod, counted_use
from shared.model.names import Namespace
from shared.model.placement import Refusal
from shared.runtime import health
from tests.support import build
from tests.support.clock import FakeClock
from tests.support.dashboard.browser import chromium

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
NOW = 1_787_000_000.0
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SIZE = {"width": 1100, "height": 560}


def lease(number: int, node: str, gpu: int, mib: int, state: LeaseState) -> Lease:
    """A lease of one of three namespaces."""
    share = build.share(f"GPU-{node}-{gpu}", gpu, slot=number, fence=number, memory_mib=mib)
    team = ("default", "team-a", "team-b")[number % 3]
    return build.lease(
        f"uid-{number}", node, share, name=f"train-{number}", namespace=team, state=state
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
        devices = build.devices(4, node, model="Tesla T4", memory_mib=15_360)
        uses, _ = counted_use(leases)
        rows = [
            build.device(
                one.uuid,
                one.index,
                model=one.model,
                memory_mib=one.memory_mib,
                healthy=(node, one.index) != ("node-0", 0),
            )
            for one in devices
        ]
        known = build.ledger_node(
            node, *((one, uses[one.uuid]) if one.uuid in uses else one for one in rows)
        )
        found.append(NodeTotals(node=known, leases=tuple(leases)))
    return found


def filled() -> Dashboard:
    """The page's state at that moment."""
    board = Dashboard(None, FakeClock(NOW))  # type: ignore[arg-type]
    totals = accounts()
    board.projection.update_nodes([], totals)
    queued = build.pod_queued("uid-huge", namespace=Namespace("team-a"), name="huge")
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
        chromium() as browser,
    ):
        for scheme in SCHEMES:
            page = await browser.new_page(color_scheme=scheme, viewport=SIZE, timezone_id="UTC")  # type: ignore[arg-type]
            await page.goto(f"http://{address}/")
            await page.locator(".share").nth(9).wait_for()
            await page.locator("#events li").first.wait_for()
            await page.screenshot(path=FOLDER / f"page-{scheme}.png")


if __name__ == "__main__":
    asyncio.run(take())
