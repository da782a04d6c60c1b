"""The page at three widths, light and dark: axe-core finds nothing, nothing is cut or overflows.

`python -m tests.integration.api.test_pictures` writes the pictures in `docs/pictures`.
"""

import asyncio
from base64 import b64encode
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.support.api.browser import chromium, needed
from tests.support.api.fixed_cluster import fixed_page

pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDTHS = {390: 844, 1440: 900, 2560: 1300}
"""Heights by width: a phone, a laptop, a large screen."""
PATHS = {
    "": "#events li",
    "?view=table": "table",
    "#device/GPU-gpu-a-0": "dialog canvas",
    "#lease/uid-7": "dialog .waterfall",
    "#namespace/research": "dialog .chart + h3 + .chart canvas",
}
"""Views, each with what is shown once it is complete."""
PICTURES = {"page": ""}
"""Views whose pictures are in docs, by the beginning of the file's name."""
PICTURE_SIZE = {"width": 1200, "height": 560}
AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
EXPERIMENTAL = {"rules": {"label-content-name-mismatch": {"enabled": True}}}
CUT = """() => [...document.querySelectorAll("h1, h2, th, td, li, dd, .head span, .amounts")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.checkVisibility())
  .filter((one) => !["inline", "contents"].includes(getComputedStyle(one).display))
  .map((one) => one.outerHTML)"""
SET_HUES = """(shares, first) => shares.forEach((share, at) => {
  share.style.setProperty("--hue", first + at % 12 * 15);
})"""
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url():  # type: ignore[no-untyped-def]
    async with fixed_page() as served:
        yield served


async def opened(
    browser: Browser, url: str, path: str, *, width: int = 1440, scheme: Scheme = "light"
) -> Page:
    size = {"width": width, "height": WIDTHS[width]}
    page = await browser.new_page(color_scheme=scheme, viewport=size, timezone_id="UTC")  # type: ignore[arg-type]
    await page.goto(f"{url}/{path}")
    await page.locator(PATHS[path]).first.wait_for()
    return page


async def findings(page: Page) -> list[str]:
    """Return what axe-core finds."""
    await page.evaluate(AXE)
    found: dict[str, Any] = await page.evaluate("options => axe.run(options)", EXPERIMENTAL)
    return [
        f"{violation['id']}: {node['html']}: {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


@pytest.mark.parametrize(("width", "scheme"), list(product(WIDTHS, SCHEMES)))
async def test_axe_finds_nothing(browser: Browser, url: str, width: int, scheme: Scheme) -> None:
    for path in PATHS:
        page = await opened(browser, url, path, width=width, scheme=scheme)
        await page.locator("details summary").evaluate_all(
            "all => all.forEach((one) => one.click())"
        )

        assert await findings(page) == [], path
        await page.close()


async def test_axe_finds_what_is_wrong(browser: Browser, url: str) -> None:
    page = await opened(browser, url, "")
    await page.evaluate("document.querySelector('#events').style.color = '#999'")

    assert any("color-contrast" in finding for finding in await findings(page))


@pytest.mark.parametrize("width", WIDTHS)
async def test_nothing_is_cut_and_the_page_does_not_scroll_sideways(
    browser: Browser, url: str, width: int
) -> None:
    for path in PATHS:
        page = await opened(browser, url, path, width=width)
        cut = await page.evaluate(CUT)

        assert [text for text in cut if "Xid" not in text] == [], path
        assert await page.evaluate(OVERFLOW) <= 0, path
        await page.close()


async def test_all_colours_of_namespaces_are_readable(browser: Browser, url: str) -> None:
    for scheme, first in product(SCHEMES, (0, 180)):
        page = await opened(browser, url, "", scheme=scheme)
        await page.locator(".share").evaluate_all(SET_HUES, first)
        await page.evaluate(AXE)
        found = await page.evaluate("axe.run('#grid', { runOnly: ['color-contrast'] })")

        assert found["violations"] == []
        await page.close()


@pytest.mark.parametrize(("name", "scheme"), list(product(PICTURES, SCHEMES)))
async def test_the_pictures_in_docs_show_the_page(
    browser: Browser, url: str, name: str, scheme: Scheme
) -> None:
    taken = await picture(browser, url, name, scheme)
    page = await browser.new_page()
    kept = (FOLDER / f"{name}-{scheme}.png").read_bytes()

    difference = await page.evaluate(DIFFERENCE, [b64encode(one).decode() for one in (taken, kept)])

    command = "python -m tests.integration.api.test_pictures"
    assert difference < 30, f"the page looks different: {command}"


DIFFERENCE = """async (pictures) => {
  const [taken, kept] = await Promise.all(pictures.map(async (text) => {
    const image = new Image();
    image.src = `data:image/png;base64,${text}`;
    await image.decode();
    const canvas = new OffscreenCanvas(30, 14), context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return context.getImageData(0, 0, canvas.width, canvas.height).data;
  }));
  return Math.max(...taken.map((value, at) => Math.abs(value - kept[at])));
}"""
"""The largest difference of any part, 0 to 255; coarse, since fonts differ between machines."""


async def picture(browser: Browser, url: str, name: str, scheme: Scheme) -> bytes:
    page = await opened(browser, url, PICTURES[name], scheme=scheme)
    await page.set_viewport_size(PICTURE_SIZE)  # type: ignore[arg-type]
    await page.locator(".share").last.wait_for()
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return await page.screenshot()


async def take() -> None:
    """Write the pictures."""
    async with fixed_page() as url, chromium() as browser:
        for name, scheme in product(PICTURES, SCHEMES):
            path = FOLDER / f"{name}-{scheme}.png"
            path.write_bytes(await picture(browser, url, name, scheme))


if __name__ == "__main__":
    asyncio.run(take())
