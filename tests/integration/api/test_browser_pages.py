"""The pages in Chromium: details and their URLs, filters, faults, usage, histories, tables."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from playwright.async_api import Browser, Locator, expect

from shared.ledger.waiting_pods import GatedPods
from shared.model.budgets.budget import (
    UNITS_PER_GPU_MINUTE,
    AccountUpdate,
    BudgetWindow,
    ChargeEntry,
)
from shared.model.devices.device import DeviceMode, MigLayout, MigProfile
from shared.model.events.pod_events import (
    BudgetChanged,
    PodGated,
    PodQueued,
    PodTerminated,
)
from shared.model.leases.preemption import Preemption
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Gang
from shared.runtime.telemetry import trace_id_of
from tests.support.api.board import eviction
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.placer.ledger import device, facts, queued, report, verdict
from tests.support.waiting import until

LONG_AGO = re.compile(r"idle since .*2023")


async def used_part(block: Locator) -> float:
    """Return which part of a share the browser draws as used memory, percent."""
    part: float = await block.evaluate(
        "one => 100 * parseFloat(getComputedStyle(one, '::after').width) / one.clientWidth"
    )
    return part


async def test_a_share_has_a_bar_of_its_used_memory(browser: Browser, shown: RunningApi) -> None:
    lease = await reserve_lease(shown, "p1")
    (share,) = lease.shares
    page = await opened(browser, shown)
    block = page.locator(".share")
    await expect(block).to_have_count(1)
    assert share.memory_mib == 4000
    held: dict[str, Any] = {"held_memory_mib": 9000, "read_back_at": 1_700_000_000.0}
    held["held_difference"] = "the region has 9000 MiB"
    shown.usage.measure(lease, memory_mib=1000, cores_percent=5, processes=1, **held)
    device = page.locator(".dev[aria-description*='1000 MiB in use']")
    await expect(device).to_have_count(1)

    assert round(await used_part(block)) == 25
    await device.click(position={"x": 5, "y": 5})
    await expect(page.get_by_role("main")).to_contain_text("uses 1000 MiB, 5 % of the cores")
    await expect(page.get_by_role("main")).to_contain_text(
        re.compile("memory by HAMi-core.*DIFFERS: the region has 9000 MiB, read back 1[45] Nov")
    )


async def test_an_idle_share_is_marked_and_a_silent_agent_removes_the_bars(
    browser: Browser, shown: RunningApi
) -> None:
    lease = await reserve_lease(shown, "p1")
    page = await opened(browser, shown)
    shown.usage.measure(lease, memory_mib=0, cores_percent=0, idle_since=1_700_000_000.0)

    await expect(page.locator(".share.idle")).to_have_count(1)
    idle = page.locator(".dev[aria-description*='0 MiB in use, 1 idle']")
    await expect(idle).to_have_count(1)
    await page.locator(".share").hover()
    await expect(page.locator(".share")).to_have_attribute("title", LONG_AGO)
    shown.usage.nodes.pop(NodeName(lease.node))

    await expect(page.locator(".share.idle")).to_have_count(0)


pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]

FAULT = "cordoned: XidError: Xid 79, the GPU has fallen off the bus"


async def wait(shown: RunningApi, name: str, namespace: str, *, gang: str = "") -> PodQueued:
    pod = replace(queued(f"uid-{name}"), namespace=Namespace(namespace), name=name)
    member = Gang(name=gang, min_member=2) if gang else None
    pod = replace(pod, request=structs.replace(pod.request, gang=member))
    capacity = await shown.ledger.capacity()
    await shown.ledger.waiting_pods.enqueue([verdict(pod, capacity)])
    return pod


async def test_the_overview_shows_what_gpu_hours_were_used_for(
    browser: Browser, shown: RunningApi
) -> None:
    await shown.record_costs("a", "b", idle=["c"])
    page = await opened(browser, shown)

    bars = page.locator("#costs .bar-row")
    await expect(bars).to_have_text([re.compile("used.*2 GPU-h"), re.compile("idle.*1 GPU-h")])


async def test_pages_have_urls_and_the_back_button_leads_through_them(
    browser: Browser, shown: RunningApi
) -> None:
    await reserve_lease(shown, "uid-train", 0, name="train", namespace="research")
    page = await opened(browser, shown)
    heading = page.get_by_role("main").get_by_role("heading", level=2).first
    await page.get_by_role("link", name="a", exact=True).click()
    await expect(heading).to_have_text("a")
    await page.locator(".dev").first.click(position={"x": 20, "y": 8})
    await expect(heading).to_have_text("GPU 0 of a")
    await page.get_by_role("link", name="research/train").click()
    await expect(heading).to_have_text("research/train")
    await page.get_by_role("main").get_by_role("link", name="research", exact=True).click()
    await expect(heading).to_have_text("research")
    await expect(page).to_have_url(f"{shown.url}/#/namespace/research")

    await page.go_back()
    await expect(heading).to_have_text("research/train")
    await page.go_back()
    await expect(heading).to_have_text("GPU 0 of a")
    await page.go_forward()
    await expect(heading).to_have_text("research/train")


async def test_a_waiting_pod_has_the_command_that_shows_what_would_make_room(
    browser: Browser, shown: RunningApi
) -> None:
    await shown.publish(await wait(shown, "big", "vision", gang="vision/training"))
    page = await opened(browser, shown)
    console: list[str] = []
    page.on("console", lambda message: console.append(message.text))
    await page.locator("#waiting").get_by_role("link", name="vision/big").click()
    command = "kubectl get pod big -n vision -o yaml | kubectl leasehold what-if -"
    await expect(page.get_by_role("main")).to_contain_text(command)
    await expect(page.get_by_role("main")).to_contain_text(
        "Gangvision/training: 0 pods with a lease, 1 waiting"
    )

    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_role("button", name="Copy kubectl get pod big").click()

    await expect(page.get_by_text("Copied.")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == command
    await page.reload(wait_until="networkidle")
    assert console == []


async def test_pods_of_a_gang_that_wait_for_the_same_reason_are_one_row(
    browser: Browser, shown: RunningApi
) -> None:
    for name in ("one", "two", "three"):
        await shown.publish(await wait(shown, name, "vision", gang="vision/training"))
    await shown.publish(await wait(shown, "alone", "vision"))
    page = await opened(browser, shown)

    rows = page.locator(".waits:visible")
    await expect(rows).to_have_count(2)
    await page.get_by_role("link", name="All waiting pods").click()
    await expect(page).to_have_url(f"{shown.url}/#/waiting")
    await expect(rows).to_have_count(2)
    await expect(rows.filter(has_text="gang vision/training")).to_contain_text("and 2 more")
    await expect(page.get_by_role("main")).to_contain_text("4 waiting pods")
    await page.get_by_label("Search", exact=True).fill("two")
    await expect(rows).to_have_count(1)
    await expect(rows).to_have_text(re.compile("vision/two(?!.* more)"))
    await page.goto(f"{shown.url}/#/namespace/vision")
    await expect(rows).to_have_count(2)


async def test_words_and_facets_narrow_all_lists_and_are_in_the_url(
    browser: Browser, shown: RunningApi
) -> None:
    for number in (1, 10):
        name = f"node-{number}"
        await shown.ledger.save_nodes([facts(name)])
        await shown.ledger.save_devices([report(name, [device(name, gpu) for gpu in range(2)])])
    await reserve_lease(shown, "uid-train", 0, node="node-1", name="train", namespace="research")
    await reserve_lease(shown, "uid-serve", 1, node="node-10", name="serve", namespace="vision")
    for name, namespace in (("first", "research"), ("second", "vision")):
        await shown.publish(await wait(shown, name, namespace))
    page = await opened(browser, shown)
    rows = page.locator(".node")
    tab = page.locator(".tab")
    search = page.get_by_label("Search", exact=True)
    await expect(rows).to_have_count(3)

    await page.keyboard.press("/")
    await page.keyboard.type("node-1 tesla")  # both words; a number is whole
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("train")
    await expect(tab.filter(has_text="Pods")).to_have_text("Pods1")
    await search.fill("node-1*")
    await expect(rows).to_have_count(2)
    await page.reload()
    await expect(search).to_have_value("node-1*")
    await expect(rows).to_have_count(2)

    await page.get_by_role("button", name="Namespace").click()
    await page.get_by_label("vision").check()
    await page.keyboard.press("Escape")
    await expect(rows).to_have_count(1)
    await expect(page.get_by_text("1 of 6 GPUs")).to_be_visible()
    await expect(page).to_have_url(re.compile(r"#/gpus\?q=node-1\*&namespace=vision$"))
    await search.fill("")
    for view, text in (("Waiting", "vision/second"), ("Namespaces", "vision")):
        await tab.filter(has_text=view).click()
        await expect(page.locator(".cards li, .rows [role=row]")).to_have_count(1)
        await expect(page.locator(".cards li, .rows [role=row]")).to_contain_text(text)

    await page.keyboard.press("/")
    await page.keyboard.type("nothing has this name")
    await expect(page.get_by_text("Nothing matches “nothing has this name”")).to_be_visible()
    await page.get_by_role("main").get_by_role("button", name="Clear filters").last.click()
    await expect(page.locator(".rows [role=row]")).to_have_count(2)


async def test_a_search_leads_to_the_lists_in_which_something_matches(
    browser: Browser, shown: RunningApi
) -> None:
    await shown.publish(await wait(shown, "second", "vision"))
    await until(shown.state, lambda state: state["waiting"]["total"] == 1)
    await shown.service.sample_history()
    page = await opened(browser, shown, "#/")
    await expect(page.locator(".tab").filter(has_text="Waiting")).to_have_text("Waiting1")
    await expect(page.locator(".chart .series").nth(2)).to_have_text("Waiting 1 pod")
    await page.get_by_role("searchbox", name="Search", exact=True).fill("second")
    await expect(page).to_have_url(re.compile(r"#/pods\?q=second$"))

    await page.locator(".tab").filter(has_text="GPUs").click()
    await page.get_by_role("main").get_by_role("link", name="Waiting: 1", exact=True).click()

    await expect(page.locator(".cards li")).to_contain_text("vision/second")


async def test_a_manifest_can_be_tried(browser: Browser, shown: RunningApi) -> None:
    page = await opened(browser, shown, "#/waiting")
    await page.get_by_role("link", name="What if").click()
    for memory, result in ((4000, "1 pod would run"), (20_000, "1 would wait")):
        limits = {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": memory}
        container = {"name": "main", "resources": {"limits": limits}}
        pod = {"kind": "Pod", "metadata": {"name": "new"}, "spec": {"containers": [container]}}
        await page.get_by_label("Manifest").fill(json.dumps({"apiVersion": "v1", **pod}))

        await page.get_by_role("button", name="Try them").click()

        await expect(page.locator(".result")).to_contain_text(result)
    await page.get_by_label("Manifest").fill("kind: Nothing")
    await page.get_by_role("button", name="Try them").click()
    await expect(page.locator(".result .problem")).not_to_be_empty()


async def test_the_table_of_pods_sorts_by_any_column(browser: Browser, shown: RunningApi) -> None:
    for number, cores in enumerate((30, 60, 10)):
        await reserve_lease(shown, f"uid-{number}", 0, cores=cores, name=f"train-{number}")
    page = await opened(browser, shown, "#/pods")
    names = page.locator(".rows .main")
    await expect(names).to_have_count(3)

    await page.get_by_role("button", name="GPUs", exact=True).click()

    await expect(names).to_have_text([f"default/train-{number}" for number in (1, 0, 2)])
    await expect(page.get_by_role("columnheader", name="GPUs", exact=True)).to_have_attribute(
        "aria-sort", "descending"
    )
    await page.reload()
    await expect(names).to_have_text([f"default/train-{number}" for number in (1, 0, 2)])


async def test_an_unhealthy_device_has_its_fault_in_words(
    browser: Browser, shown: RunningApi
) -> None:
    bad = replace(device("a", 0), healthy=False, fault=FAULT)
    await shown.ledger.save_devices([report("a", [bad])])

    page = await opened(browser, shown)
    block = page.locator(".dev.bad")
    await expect(block).to_contain_text("Xid 79, the GPU has fallen off the bus")
    await expect(block).to_have_attribute("aria-description", re.compile(f"unhealthy: {FAULT}"))
    await expect(page.locator("#sick")).to_contain_text("Xid 79")
    await block.click()
    await expect(page.get_by_role("main")).to_contain_text(FAULT)


async def test_a_closed_device_has_its_reason_in_words(browser: Browser, shown: RunningApi) -> None:
    node = replace(facts("a"), excluded_devices=(1,), exclusions=("fan is loud",))
    await shown.ledger.save_nodes([node])

    page = await opened(browser, shown)

    closed = page.locator(".dev.closed")
    await expect(closed).to_have_text(re.compile("closed: fan is loud"))
    await expect(page.locator("#sick")).to_contain_text("a GPU 1fan is loud")
    await page.get_by_role("link", name="Show them").click()
    await expect(page.get_by_text("1 of 2 GPUs")).to_be_visible()
    await closed.click()
    await expect(page.get_by_role("main")).to_contain_text("Closed to new podsfan is loud")


async def test_the_page_of_a_node_shows_another_manager_of_its_gpus(
    browser: Browser, shown: RunningApi
) -> None:
    manager = "condition gpu-fractioning.nvidia.com/Ready"
    await shown.ledger.save_nodes([replace(facts("a"), other_manager=manager)])

    page = await opened(browser, shown, "#/node/a")

    await expect(page.get_by_role("main")).to_contain_text(f"Also shared by{manager}")


async def test_a_device_in_mig_mode_is_marked_and_counts_instances(
    browser: Browser, shown: RunningApi
) -> None:
    profile = MigProfile(name="1g.10gb", memory_mib=9_728, count=7)
    layouts = (MigLayout(name="small", profiles=(profile,)),)
    mig = replace(device("a", 0), mode=DeviceMode.MIG, layouts=layouts)
    await shown.ledger.save_devices([report("a", [mig])])

    page = await opened(browser, shown)

    block = page.locator(".dev").first
    await expect(page.locator(".node .what")).to_have_text("Tesla T4, MIG")
    await expect(block).to_contain_text("0/7 instances")


async def test_the_bar_of_cores_is_as_long_as_the_leased_cores(
    browser: Browser, shown: RunningApi
) -> None:
    await reserve_lease(shown, cores=40)
    page = await opened(browser, shown)
    await expect(page.locator(".share")).to_have_count(1)

    bar = page.locator(".dev .cores").first
    sizes = await bar.evaluate("one => getComputedStyle(one).backgroundSize")

    assert sizes.split(", ")[1] == "40% 100%"
    await expect(page.locator(".dev").first).to_have_attribute(
        "aria-description", re.compile("40 % of")
    )


async def test_the_map_has_the_colours_of_use_if_the_url_says_so(
    browser: Browser, shown: RunningApi
) -> None:
    busy, unmeasured = [await reserve_lease(shown, f"p{gpu}", gpu) for gpu in (0, 1)]
    shown.usage.measure(busy, memory_mib=1000, cores_percent=75, processes=1)
    page = await opened(browser, shown, "#/gpus?q=a")
    await page.get_by_label("Colour by").select_option("use")

    for _ in range(2):
        await expect(page).to_have_url(re.compile(r"#/gpus\?q=a&colour=use$"))
        await expect(page.locator(f".share.u4[data-pod={busy.pod}]")).to_have_count(1)
        await expect(page.locator(f".anonymous[data-pod={unmeasured.pod}]")).to_have_count(1)
        await expect(page.locator(".use dd")).to_have_text(
            ["0 %", "1 to 24 %", "25 to 49 %", "50 to 74 %", "75 to 100 %", "not measured"]
        )
        await page.reload()


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
        await expect(page.get_by_role("region", name="Over time")).to_be_visible()
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


async def test_a_device_and_its_namespace_have_the_history_of_the_last_hour(
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
    minute = UNITS_PER_GPU_MINUTE
    now = time.time()
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
        reported_at=now + 60,  # later than what the page reads itself
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

    # On a loaded machine, agents may be reported as silent, too.
    events = page.locator("#events li", has_text="evicted")
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
