"""Measured usage in Chromium: bars within the leased bars, with names for screen readers."""

import re

import pytest
from playwright.async_api import Browser, Locator, expect

from shared.model.names import NodeName
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi, reserve_lease

LONG_AGO = re.compile(r"idle since .*2023")
pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]


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
