"""Details in Chromium: traces, histories, budgets, evictions, and what to try first."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from shared.ledger.waiting_pods import GatedPods
from shared.model.budget import (
    UNITS_PER_GPU_MINUTE,
    AccountUpdate,
    BudgetWindow,
    ChargeEntry,
)
from shared.model.events.pod_events import (
    BudgetChanged,
    PodGated,
    PodTerminated,
)
from shared.model.names import Namespace, PodUid
from shared.model.preemption import Preemption
from shared.runtime.telemetry import trace_id_of
from tests.support.api.board import eviction
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.placer.ledger import queued, verdict
from tests.support.waiting import until

pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]


def span(pod: str, name: str, parent: str, start_ms: int, end_ms: int, **more: object) -> str:
    fields = {
        "trace": trace_id_of(pod),
        "span": name,
        "parent": parent,
        "service": "leasehold-placer",
        "name": f"step {name}",
        "start_ns": start_ms * 1_000_000,
        "end_ns": end_ms * 1_000_000,
        "ok": True,
        "text": "",
    }
    return json.dumps({**fields, **more}) + "\n"


async def test_spans_of_the_trace_are_drawn_where_they_can_be_read(
    browser: Browser, serve: Any, tmp_path: Path
) -> None:
    (tmp_path / "placer.jsonl").write_text(
        span("p1", "a", "", 1_000, 1_100)
        + span("p1", "b", "a", 1_050, 1_100, ok=False, text="no room", notes=[(1_060_000_000, "x")])
        + span("other", "c", "", 0, 9_000)
    )
    async with serve(traces=tmp_path) as shown:
        await reserve_lease(shown)
        await shown.until_shares(1)

        page = await opened(browser, shown, "#/pod/p1")

        rows = page.locator(".waterfall tbody tr")
        await expect(rows).to_have_count(2)
        await expect(page.locator(".waterfall caption")).to_have_text("2 spans in 100 ms")
        await expect(rows.last).to_contain_text("placer: step b")
        await expect(rows.last).to_contain_text("no room")
        await expect(rows.last).to_contain_text("0.1 s: x")
        first, second = [
            await row.locator(".span").evaluate(
                "one => ['--width', '--from'].map((name) => one.style.getPropertyValue(name))"
            )
            for row in await rows.all()
        ]
        assert (first, second) == (["100%", "0%"], ["50%", "50%"])


async def test_a_pod_that_has_ended_still_has_its_trace(
    browser: Browser, shown: RunningApi
) -> None:
    ended = PodTerminated(
        pod=PodUid("p1"),
        namespace=Namespace("default"),
        name="p1",
        node=None,
        phase="Succeeded",
    )
    await shown.publish(queued("p1"))
    await until(shown.state, lambda state: bool(state["events"]))
    await shown.publish(ended)
    page = await opened(browser, shown)

    await page.locator("#events").get_by_role("link", name="default/p1").first.click()

    main = page.get_by_role("main")
    await expect(main).to_contain_text("It has no lease.")
    await expect(main.locator(".waterfall")).to_contain_text("until terminated")


async def test_a_device_and_its_namespace_have_the_history_of_the_last_day(
    browser: Browser, shown: RunningApi
) -> None:
    lease = await reserve_lease(shown)
    shown.usage.measure(lease, memory_mib=1_600, cores_percent=7)
    await until(shown.shares, lambda shares: bool(shares and shares[0]["measured"]))
    await shown.service.sample_history()

    page = await opened(browser, shown, "#/gpu/GPU-a-0")

    memory, compute = (page.locator(".chart .series").nth(number) for number in (0, 1))
    await expect(memory).to_have_text("Leased 3.91 GiBUsed 1.56 GiB")
    await expect(compute).to_contain_text("Used 7 %")
    assert await page.locator(".chart canvas").first.evaluate(IS_PAINTED)
    _, history = await shown.get("/api/v1/devices/GPU-a-0/history")
    assert history["memory"][-1] == history["memory_capacity"] / 4
    await page.goto(f"{shown.url}/#/namespace/default")
    await expect(memory).to_contain_text("Leased 3.91 GiB")


IS_PAINTED = """canvas => canvas.getContext("2d")
  .getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0)"""


async def test_a_budget_has_its_limit_and_agrees_with_the_text(
    browser: Browser, shown: RunningApi
) -> None:
    minute, now = UNITS_PER_GPU_MINUTE, time.time()
    window = BudgetWindow(
        id="w",
        start_ms=round(now * 1000) - 3_600_000,
        end_ms=round(now * 1000) + 3_600_000,
        limit_units=100 * minute,
        used_units=40 * minute,
    )
    charge = ChargeEntry(
        window="w", kind="charge", units=40 * minute, to_ms=round(now * 1000) - 60_000
    )
    update = AccountUpdate(
        namespace=Namespace("team"), revision=0, windows=(window,), entries=(charge,)
    )
    event = BudgetChanged(
        namespace=Namespace("team"),
        state="ok",
        previous_state="ok",
        lease_class="guaranteed",
        window="w",
        reported_at=now,
        used_units=40 * minute,
        remaining_units=60 * minute,
        current_rate_milli_gpu=2_000,
        exhausted_at=now + 1_800,
    )
    assert await shown.budgets.save(update)
    await shown.preemptions.save_budget(event)
    await until(shown.state, lambda state: bool(state["namespaces"]))

    page = await opened(browser, shown, "#/namespace/team")

    main = page.get_by_role("main")
    await expect(main).to_contain_text("40.0 GPU-minutes")
    legend = page.get_by_role("group", name="GPU-minutes used").locator(".series")
    await expect(legend).to_have_text("Used 40 minLimit 100 minAt the current rate 40 min")


async def test_evictions_are_among_the_recent_events(browser: Browser, shown: RunningApi) -> None:
    page = await opened(browser, shown)
    stored = Preemption(id="uid-for", victims=())
    assert await shown.preemptions.open(stored)
    (read,) = (await shown.preemptions.state(now=time.time())).open

    await shown.preemptions.save(read, stored, [eviction("victim", time.time())])

    events = page.locator("#events li")
    await expect(events).to_have_count(1)
    await expect(events).to_contain_text("evicteda/victimon n1 for b/urgent")
    await expect(events).to_contain_text("a pod of higher priority needs its devices")


async def test_without_a_lease_there_is_a_pod_to_try(browser: Browser, shown: RunningApi) -> None:
    page = await opened(browser, shown)
    first = page.get_by_role("region", name="First steps")
    await expect(first).to_contain_text("volcano.sh/vgpu-number: 1")

    await first.get_by_role("button", name="Copy").click()
    await expect(first.get_by_role("status")).to_have_text("Copied.")
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("kubectl apply -f - <<'EOF'\napiVersion: v1\n")
    assert copied.endswith("\nEOF\n")

    await reserve_lease(shown)
    await expect(first).to_be_hidden()


async def test_a_pod_that_waits_for_its_budget_is_a_waiting_pod(
    browser: Browser, shown: RunningApi
) -> None:
    gated = PodGated(
        pod=PodUid("uid-g"),
        namespace=Namespace("team"),
        name="g",
        resource_version="1",
        created_at=time.time() - 60,
    )
    await shown.ledger.part(GatedPods).save([gated])
    page = await opened(browser, shown, "#/waiting")

    await expect(page.locator(".cards li")).to_contain_text("budget of namespace team is used up")
    await expect(page.locator(".tab", has_text="Waiting")).to_have_text("Waiting1")
    await page.get_by_role("link", name="team/g").click()
    await expect(page.get_by_role("main")).to_contain_text("leasehold budget team")
    _, leases = await shown.get("/api/v1/leases?namespace=team")
    assert [pod["code"] for pod in leases["waiting"]] == ["Budget"]


async def test_a_waiting_pod_has_position_age_and_reason(
    browser: Browser, shown: RunningApi
) -> None:
    capacity = await shown.ledger.capacity()
    await shown.ledger.waiting_pods.enqueue([verdict(queued("w1"), capacity)])
    await shown.publish(queued("w1"))
    page = await opened(browser, shown)

    row = page.locator("#waiting .waits")

    await expect(row).to_contain_text("1.default/w1")
    await expect(row.locator("p").first).to_have_text("full")
    await expect(row.locator(".end")).not_to_be_empty()
