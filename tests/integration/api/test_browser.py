"""The page in Chromium: live, by keyboard, without scripts, and safe with any names."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from shared.model.names import PodUid
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.placer.ledger import device, facts, report

pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]

NOTHING_IS_CUT = """(block) => [...block.querySelectorAll(".head span, .amounts")]
  .every((one) => one.scrollWidth <= one.clientWidth)"""
EVIL = '<img src=x onerror="window.pwned=1">'


async def test_a_lease_appears_hatched_in_its_device_and_disappears(
    browser: Browser, shown: RunningApi
) -> None:
    page = await opened(browser, shown)
    await expect(page.locator(".dev")).to_have_count(2)

    await reserve_lease(shown, "train", name="train")

    block = page.locator(".share.reserved[data-pod=train]")
    await expect(block).to_have_text("train")
    hatch = await block.evaluate("one => getComputedStyle(one).backgroundImage")
    assert hatch.startswith("repeating-linear-gradient")
    await shown.ledger.release([PodUid("train")], reason="test")
    await expect(block).to_have_count(0)


TOUCHED = """() => {
  const touched = new Set();
  new MutationObserver((all) => all.forEach(({ target }) => touched.add(
    (target.nodeType === 1 ? target : target.parentNode).closest(".dev")?.dataset.uuid ?? "node"
  ))).observe(document.getElementById("grid"),
    { subtree: true, childList: true, attributes: true, characterData: true });
  window.touched = () => [...touched];
}"""


async def test_a_change_touches_only_its_own_device(browser: Browser, shown: RunningApi) -> None:
    await reserve_lease(shown, "before", gpu=0, name="before")
    page = await opened(browser, shown)
    await expect(page.locator(".share")).to_have_count(1)
    await page.evaluate(TOUCHED)

    await reserve_lease(shown, "train", gpu=1, name="train")

    await expect(page.locator(".share")).to_have_count(2)
    await expect(page.locator("h2 small").first).to_have_text("2 of 2 GPUs in use")
    assert set(await page.evaluate("window.touched()")) == {"GPU-a-1", "node"}


async def test_changes_of_invisible_devices_are_shown_once_they_are_visible(
    browser: Browser, shown: RunningApi
) -> None:
    for number in range(40):
        name = f"node-{number}"
        await shown.ledger.save_nodes([facts(name)])
        await shown.ledger.save_devices([report(name, [device(name, gpu) for gpu in range(4)])])
    page = await opened(browser, shown)
    await expect(page.locator(".dev")).to_have_count(162)

    await reserve_lease(shown, "last", node="node-39", gpu=3, name="last")

    block = page.locator(".dev[data-uuid=GPU-node-39-3]")
    await block.scroll_into_view_if_needed()
    await expect(block.locator(".share")).to_have_text("last")
    await expect(page.locator("#totals")).to_contain_text("162 GPUs")


async def test_the_keyboard_reaches_a_lease_through_its_device_and_returns(
    browser: Browser, shown: RunningApi
) -> None:
    await reserve_lease(shown, "train", gpu=1, name="train")
    page = await opened(browser, shown)
    await expect(page.locator(".share")).to_have_count(1)
    focused = "document.activeElement.dataset.uuid"
    async with asyncio.timeout(20):
        while await page.evaluate(focused) != "GPU-a-0":
            await page.keyboard.press("Tab")

    await page.keyboard.press("ArrowRight")
    assert await page.evaluate(focused) == "GPU-a-1"
    await page.keyboard.press("Enter")
    drawer = page.get_by_role("dialog")
    await expect(drawer).to_contain_text("GPU 1 of a")
    link = drawer.get_by_role("link", name="default/train")
    await link.focus()
    await page.keyboard.press("Enter")
    await expect(drawer).to_contain_text("leasehold trace train -n default")

    await page.keyboard.press("Escape")
    await expect(drawer).to_be_hidden()
    assert await page.evaluate(focused) == "GPU-a-1"


async def test_without_scripts_the_page_is_a_table(browser: Browser, shown: RunningApi) -> None:
    await reserve_lease(shown, "train", name="train")
    await shown.until_shares(1)

    page = await opened(browser, shown, scripts=False)

    row = page.get_by_role("row", name="GPU").or_(page.get_by_role("row", name="Tesla T4"))
    await expect(row.filter(has_text="default/train main: 4000 MiB")).to_have_count(1)


async def test_with_scripts_the_table_is_not_laid_out_unless_requested(
    browser: Browser, shown: RunningApi
) -> None:
    await shown.until_shares(0)
    context = await browser.new_context()
    page = await context.new_page()
    await page.route("**/api/v1/state", lambda route: route.abort())

    await page.goto(shown.url)
    await expect(page.locator("table").first).to_be_hidden()
    await page.get_by_role("link", name="Table").click()
    await expect(page.locator("table").first).to_be_visible()


async def test_devices_that_differ_in_memory_only_look_different(
    browser: Browser, shown: RunningApi
) -> None:
    models = {"NVIDIA A100-SXM4-40GB": 40_960, "NVIDIA A100-SXM4-80GB": 81_920}
    devices = [
        replace(device("a", gpu), model=model, memory_mib=memory_mib)
        for gpu, (model, memory_mib) in enumerate(models.items())
    ]
    await shown.ledger.save_devices([report("a", devices)])
    page = await opened(browser, shown)

    for gpu, (name, size) in enumerate((("A100-SXM4-40GB", "40"), ("A100-SXM4-80GB", "80"))):
        block = page.locator(f".dev[data-uuid=GPU-a-{gpu}]")
        await expect(block.locator(".head span")).to_have_text(name)
        await expect(block.locator(".amounts")).to_have_text(f"0 % of {size} GiB, 0 % cores")
        assert await block.evaluate(NOTHING_IS_CUT)


async def test_names_with_scripts_are_escaped(browser: Browser, shown: RunningApi) -> None:
    page = await opened(browser, shown)
    await expect(page.locator(".dev")).to_have_count(2)
    await reserve_lease(shown, "uid-1", namespace=EVIL, name=EVIL)

    await expect(page.locator(".share")).to_have_text(EVIL)
    await page.locator(".share").click()
    await expect(page.get_by_role("dialog")).to_contain_text(f"leasehold trace {EVIL}")
    await page.reload()
    await expect(page.locator(".share")).to_have_text(EVIL)

    assert await page.evaluate("window.pwned") is None
    assert await page.locator("img").count() == 0


async def test_leases_of_a_forbidden_namespace_are_shown_as_in_use(
    browser: Browser, serve: Any
) -> None:
    async with serve(tokens="for-mine mine\n") as shown:
        await reserve_lease(shown, "uid-secret", namespace="secret-team", name="secret-pod")
        await reserve_lease(shown, "uid-mine", namespace="mine", name="my-pod", gpu=1)
        page = await opened(browser, shown, token="for-mine")  # noqa: S106 - of the test

        await expect(page.locator(".share")).to_have_count(2)
        await expect(page.locator(".share[data-pod]")).to_have_text("my-pod")
        await page.locator(".dev").first.click()
        await expect(page.get_by_role("dialog")).to_contain_text("in use: 4000 MiB")

        assert "secret" not in await page.content()


async def test_a_page_reports_that_the_api_does_not_respond(browser: Browser, serve: Any) -> None:
    async with serve() as shown:
        page = await opened(browser, shown)
        await expect(page.locator(".dev")).to_have_count(2)
    await expect(page.get_by_role("alert")).to_contain_text("does not respond")
