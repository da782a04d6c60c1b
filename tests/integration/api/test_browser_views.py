"""The page in Chromium: URLs of details, the filter, faults, MIG, measured usage, the table."""

import re
from dataclasses import replace

import pytest
from msgspec import structs
from playwright.async_api import Browser, Locator, expect

from shared.model.device import DeviceMode, MigLayout, MigProfile
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, NodeName
from shared.model.request import Gang
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.placer.ledger import device, queued, report, verdict

LONG_AGO = re.compile(r"idle since .*2023")


async def bar_sizes(block: Locator) -> list[str]:
    """Return the sizes of the bars that the browser draws in a share: of cores, of memory."""
    size: str = await block.evaluate("one => getComputedStyle(one).backgroundSize")
    return size.split(", ")


async def test_a_share_has_a_bar_of_its_memory_and_one_of_its_cores(
    browser: Browser, shown: RunningApi
) -> None:
    lease = await reserve_lease(shown, "p1")
    (share,) = lease.shares
    page = await opened(browser, shown)
    block = page.locator(".share")
    await expect(block).to_have_count(1)
    await expect(page.locator(".share.measured")).to_have_count(0)

    used = share.memory_mib // 4
    shown.usage.measure(lease, memory_mib=used, cores_percent=0, processes=1)
    await expect(page.locator(".share.measured")).to_have_count(1)
    device = page.locator(f".dev[aria-description*='{used} MiB in use']")
    await expect(device).to_have_count(1)

    assert await bar_sizes(block) == ["0% 5px", "25% 5px"]
    await device.click(position={"x": 5, "y": 5})
    await expect(page.get_by_role("dialog")).to_contain_text(f"uses {used} MiB, 0 % of the cores")


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

    await expect(page.locator(".share.measured, .share.idle")).to_have_count(0)


pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]

FAULT = "cordoned: XidError: Xid 79, the GPU has fallen off the bus"


async def wait(shown: RunningApi, name: str, namespace: str, *, gang: str = "") -> PodQueued:
    pod = replace(queued(f"uid-{name}"), namespace=Namespace(namespace), name=name)
    member = Gang(name=gang, min_member=2) if gang else None
    pod = replace(pod, request=structs.replace(pod.request, gang=member))
    capacity = await shown.ledger.capacity()
    await shown.ledger.waiting_pods.enqueue([verdict(pod, capacity)])
    return pod


async def test_details_have_urls_and_the_back_button_leads_through_them(
    browser: Browser, shown: RunningApi
) -> None:
    await reserve_lease(shown, "uid-train", 0, name="train", namespace="research")
    page = await opened(browser, shown)
    drawer = page.get_by_role("dialog")
    await page.locator(".dev").first.click(position={"x": 20, "y": 8})
    await expect(drawer).to_contain_text("GPU 0 of a")
    await drawer.get_by_role("link", name="research/train").click()
    await expect(drawer).to_contain_text("Pod UID")
    await drawer.get_by_role("link", name="namespace research").click()
    await expect(drawer).to_contain_text("Namespace research")
    await expect(page).to_have_url(f"{shown.url}/#namespace/research")

    await page.go_back()
    await expect(drawer).to_contain_text("Pod UID")
    await page.go_back()
    await expect(drawer).to_contain_text("GPU 0 of a")
    await page.go_back()
    await expect(drawer).to_be_hidden()
    await page.go_forward()
    await expect(drawer).to_contain_text("GPU 0 of a")
    await page.get_by_role("button", name="Close").click()
    await expect(drawer).to_be_hidden()
    await expect(page).to_have_url(f"{shown.url}/")


async def test_a_url_opens_its_details_at_once(browser: Browser, shown: RunningApi) -> None:
    await reserve_lease(shown, "uid-train", 0, name="train", namespace="research")
    await shown.until_shares(1)

    page = await opened(browser, shown, "#lease/uid-train")

    await expect(page.get_by_role("dialog")).to_contain_text("research/train")


async def test_a_waiting_pod_has_the_command_that_shows_what_would_make_room(
    browser: Browser, shown: RunningApi
) -> None:
    await shown.publish(await wait(shown, "big", "vision", gang="vision/training"))
    page = await opened(browser, shown)
    await page.locator("#waiting").get_by_role("link", name="vision/big").click()
    command = "kubectl get pod big -n vision -o yaml | leasehold what-if -"
    await expect(page.get_by_role("dialog")).to_contain_text(command)
    await expect(page.get_by_role("dialog")).to_contain_text("Gangvision/training")

    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_role("dialog").get_by_role("button", name="Copy").click()

    await expect(page.get_by_role("status")).to_have_text("Copied.")
    assert await page.evaluate("navigator.clipboard.readText()") == command


async def test_the_filter_applies_to_all_lists(browser: Browser, shown: RunningApi) -> None:
    await reserve_lease(shown, "uid-train", 0, name="train", namespace="research")
    await reserve_lease(shown, "uid-serve", 1, name="serve", namespace="vision")
    page = await opened(browser, shown)
    for name, namespace in (("first", "research"), ("second", "vision")):
        await shown.publish(await wait(shown, name, namespace))
    for part in ("#waiting", "#namespaces", "#events"):
        await expect(page.locator(f"{part} li:visible")).to_have_count(2)

    await page.get_by_label("Filter").fill("VISION")

    await expect(page.locator(".dev:visible")).to_have_count(1)
    await expect(page.locator(".dev:visible")).to_contain_text("serve")
    for part, text in (
        ("#waiting", "second"),
        ("#namespaces", "vision"),
        ("#events", "second"),
    ):
        await expect(page.locator(f"{part} li:visible")).to_have_count(1)
        await expect(page.locator(f"{part} li:visible")).to_contain_text(text)
    await page.get_by_label("Filter").fill("nothing has this name")
    await expect(page.locator(".node:visible, .panels li:visible")).to_have_count(0)
    await page.get_by_label("Filter").fill("")
    await expect(page.locator(".dev:visible")).to_have_count(2)


async def test_an_unhealthy_device_has_its_fault_in_words(
    browser: Browser, shown: RunningApi
) -> None:
    bad = replace(device("a", 0), healthy=False, fault=FAULT)
    await shown.ledger.save_devices([report("a", [bad])])

    page = await opened(browser, shown)
    block = page.locator(".dev.bad")
    await expect(block).to_contain_text("Xid 79, the GPU has fallen off the bus")
    await block.hover()
    await expect(block).to_have_attribute("title", re.compile(f"unhealthy: {FAULT}"))
    await block.click()
    await expect(page.get_by_role("dialog")).to_contain_text(f"UNHEALTHY: {FAULT}")
    await page.goto(f"{shown.url}/?view=table")
    await expect(page.get_by_role("table").first).to_contain_text(f"UNHEALTHY: {FAULT}")


async def test_a_device_in_mig_mode_is_marked_and_counts_instances(
    browser: Browser, shown: RunningApi
) -> None:
    profile = MigProfile(name="1g.10gb", memory_mib=9_728, count=7)
    layouts = (MigLayout(name="small", profiles=(profile,)),)
    mig = replace(device("a", 0), mode=DeviceMode.MIG, layouts=layouts)
    await shown.ledger.save_devices([report("a", [mig])])

    page = await opened(browser, shown)

    block = page.locator(".dev").first
    await expect(block).to_contain_text("Tesla T4, MIG")
    await expect(block.locator(".amounts")).to_contain_text("0 of 7 instances")


async def test_the_bar_of_cores_is_as_long_as_the_leased_cores(
    browser: Browser, shown: RunningApi
) -> None:
    await reserve_lease(shown, cores=40)
    page = await opened(browser, shown)
    await expect(page.locator(".share")).to_have_count(1)

    bar = page.locator(".dev .cores").first
    sizes = await bar.evaluate("one => getComputedStyle(one).backgroundSize")

    assert sizes.split(", ")[1] == "40% 100%"
    await expect(page.locator(".dev .amounts").first).to_contain_text("40 % cores")


@pytest.mark.parametrize("width", [390, 1440])
async def test_the_table_breaks_no_word(browser: Browser, width: int, shown: RunningApi) -> None:
    await reserve_lease(
        shown,
        "uid-a-pod-with-a-rather-long-name-as-controllers-make-them",
        0,
        name="a-pod-with-a-rather-long-name-as-controllers-make-them",
        namespace="research",
    )
    await shown.until_shares(1)
    page = await opened(browser, shown, "?view=table")
    await page.set_viewport_size({"width": width, "height": 800})

    broken = await page.evaluate(BROKEN_WORDS)
    wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")

    assert [word for word in broken if len(word) < 30] == []
    assert wide <= 0
    await expect(page.get_by_role("cell", name="16000 MiB").first).to_be_visible()


BROKEN_WORDS = """() => {
  const words = [];
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    for (const match of walk.currentNode.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(walk.currentNode, match.index);
      range.setEnd(walk.currentNode, match.index + match[0].length);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (lines.size > 1) words.push(match[0]);
    }
  }
  return words;
}"""
