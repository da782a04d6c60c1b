"""What a viewer sees of other namespaces, in every response of the dashboard: `in use`."""

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp

from shared.credentials.authorization import TokenAuthenticator
from shared.credentials.tokens import load_access_tokens
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import (
    BudgetChanged,
    PlacementChosen,
    PlacementRefused,
    PodBound,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.placement import Refusal
from tests.support.dashboard.dashboard import RunningDashboard, dashboard, reserve_lease
from tests.support.placer.ledger import queued, verdict
from tests.support.waiting import until

THEIRS = ("p1", "1234567", "w1", "default", "reason-of-theirs", "window-of-theirs")
"""Words of a namespace, its pods, and their messages."""


async def streamed_until(shown: RunningDashboard, after: str, token: str, expected: str) -> str:
    """Return everything that is streamed for a token until a word arrives."""
    found = ""
    async with shown.client.get(
        f"{shown.url}/api/v1/events",
        params={"after": after},
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as answer:
        async with asyncio.timeout(20):
            while expected not in found:
                found += (await answer.content.readline()).decode()
    return found


async def test_neither_stream_nor_api_nor_pages_name_a_namespace_that_the_viewer_may_not_see(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("for-b b\nfor-default default\n")
    async with dashboard(TokenAuthenticator(load_access_tokens(tokens))) as shown:
        begin = (await shown.state("for-b"))["id"]
        lease = await reserve_lease(shown)
        shown.usage.measure(lease, memory_mib=1_234_567)
        await until(
            lambda: shown.shares("for-default"), lambda found: found and found[0]["measured"]
        )
        waits = queued("w1", units=99_000)
        mine = replace(queued("mine", units=99_000), namespace=Namespace("b"), name="name-of-mine")
        capacity = await shown.ledger.capacity()
        await shown.ledger.waiting_pods.enqueue([verdict(waits, capacity), verdict(mine, capacity)])
        await shown.publish(
            PlacementChosen(lease=lease),
            PodBound(lease=lease),
            PlacementRefused(
                pod=waits.pod,
                namespace=waits.namespace,
                name=waits.name,
                refusal=Refusal(reason="reason-of-theirs"),
            ),
            PlacementRefused(
                pod=mine.pod,
                namespace=mine.namespace,
                name=mine.name,
                refusal=Refusal(reason="full"),
            ),
            ViolationFound(
                node=NodeName("a"),
                pod=PodUid("p1"),
                namespace=Namespace("default"),
                name="name-of-p1",
                container="main",
                reason="GpuLimitTampered",
                message="reason-of-theirs",
            ),
            BudgetChanged(
                namespace=Namespace("default"),
                state="ok",
                previous_state="ok",
                lease_class="guaranteed",
                window="window-of-theirs",
            ),
        )

        theirs, others = await asyncio.gather(
            streamed_until(shown, begin, "for-default", "name-of-p1"),
            streamed_until(shown, begin, "for-b", "name-of-mine"),
        )
        await until(lambda: shown.state("for-b"), lambda state: state["waiting"]["hidden"] >= 1)
        device = DeviceUuid("GPU-a-0")
        answers = [
            others,
            str(await shown.state("for-b")),
            *[
                str((await shown.get(path, "for-b"))[1])
                for path in (f"/api/v1/devices/{device}", "/", "/?view=table")
            ],
        ]

        assert "name-of-p1" in theirs
        for text in answers:
            assert [expected for expected in THEIRS if expected in text] == []
        assert "in use" in answers[-1]
        for path in ("/api/v1/leases/p1", "/api/v1/leases/w1", "/api/v1/namespaces/default"):
            assert (await shown.get(path, "for-b"))[0] == 404
