"""Debian's Chromium, driven through Playwright, with a profile of its own."""

import contextlib
import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.support.api.running import RunningApi

CHROMIUM = shutil.which("chromium")
DISABLED_FEATURES = (
    # Lists that drop down from the address bar, of which nobody sees any: a process for each
    # window, which takes more processor time than our page.
    *("WebUIOmniboxAimPopup", "WebUIOmniboxPopup"),
    # Those that Playwright disables, since its flag has no effect beside this one.
    *("AimEnabled", "AvoidCorsURLLoaderRestartOnRedirect", "AvoidUnnecessaryBeforeUnloadCheckSync"),
    *("DestroyProfileOnBrowserClose", "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades"),
    *("LensOverlay", "MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints"),
    *("PaintHolding", "PreconnectToSearch", "ThirdPartyStoragePartitioning"),
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(DISABLED_FEATURES)}",
)
needed = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
"""Marks of tests that look at the page in a browser."""


expect.set_options(timeout=30_000)  # milliseconds; machines that run tests are slow


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a browser without a window; it is ended with the context."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


async def opened(browser: Browser, shown: RunningApi, path: str = "", *, token: str = "") -> Page:
    """Open the page in a context of its own, and sign in with a token, if any."""
    context = await browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = await context.new_page()
    await page.goto(f"{shown.url}/{path}")
    if token:
        await page.get_by_label("Token").fill(token)
        await page.get_by_role("button", name="Sign in").click()
    return page
