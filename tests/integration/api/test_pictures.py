"""The page at two widths, light and dark: axe-core finds nothing, nothing is cut or overflows.

`python -m tests.integration.api.test_pictures` writes the pictures in `docs/pictures`.
"""

import asyncio
import itertools
import math
import re
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
WIDTHS = {390: 844, 1440: 900}
"""Heights by width: a phone, a laptop."""
PATHS = {
    "": "canvas",
    "#/gpus": ".share",
    "#/gpus?colour=use": ".share",
    "#/nodes": ".rows .tr",
    "#/pods": ".rows .tr",
    "#/waiting": ".cards li",
    "#/namespaces": ".rows .tr",
    "#/events": ".event",
    "#/node/gpu-c": "canvas",
    "#/gpu/GPU-gpu-a-0": "canvas",
    "#/pod/uid-7": "canvas",
    "#/pod/uid-wait-1": ".reason",
    "#/nowhere": ".nothing",
    "#/namespace/research": "canvas",
    "#/gpus?q=nothing": ".nothing button",
}
"""Views, each with what is shown once it is complete."""
PICTURES = {"page": "", "page-pod": "#/pod/uid-7"}
"""Views whose pictures are in docs, by the beginning of the file's name."""
PICTURE_SIZE = {"width": 1200, "height": 720}
AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
WITHOUT_CONTRAST = {
    "rules": {
        "label-content-name-mismatch": {"enabled": True},  # experimental
        "color-contrast": {"enabled": False},
    }
}
CONTRAST = {"runOnly": ["color-contrast"]}
CUT = """() => [...document.querySelectorAll("h1, h2:not(.sr), th, td, li, dd, .tab, .facet")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.checkVisibility())
  .filter((one) => !["inline", "contents"].includes(getComputedStyle(one).display))
  .map((one) => one.outerHTML)"""
SET_COLOURS = """(shares, names) => shares.forEach((share, at) => {
  share.className = share.className.replace(/c[0-9]+/, names[at % names.length]);
})"""
NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url():  # type: ignore[no-untyped-def]
    async with fixed_page() as served:
        yield served


async def opened(
    browser: Browser, url: str, path: str, *, width: int = 1440, scheme: Scheme = "light"
) -> Page:
    size = {"width": width, "height": WIDTHS[width]}
    page = await browser.new_page(
        color_scheme=scheme,
        viewport=size,  # type: ignore[arg-type]
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    await page.goto(f"{url}/{path}")
    await page.locator(PATHS[path]).first.wait_for()
    return page


async def findings(page: Page, options: dict[str, Any]) -> list[str]:
    """Return what axe-core finds."""
    found: dict[str, Any] = await page.evaluate("options => axe.run(options)", options)
    return [
        f"{violation['id']}: {node['html']}: {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


@pytest.mark.parametrize("width", WIDTHS)
async def test_axe_finds_nothing_and_nothing_is_cut_or_overflows(
    browser: Browser, url: str, width: int
) -> None:
    page = await opened(browser, url, "", width=width)
    await page.evaluate(AXE)
    for path, complete in PATHS.items():
        if path:
            await page.goto(f"{url}/{path}")  # the same document: only the view is another
        await page.evaluate(NEXT_FRAME)
        await page.locator(complete).first.wait_for()

        assert await page.evaluate(CUT) == [], path
        assert await page.evaluate(OVERFLOW) <= 0, path
        assert await findings(page, WITHOUT_CONTRAST) == [], path
        if width == max(WIDTHS):  # colours depend on the scheme only
            for scheme in SCHEMES:
                await page.emulate_media(color_scheme=scheme)
                assert await findings(page, CONTRAST) == [], (path, scheme)
    await page.close()


async def test_axe_finds_what_is_wrong(browser: Browser, url: str) -> None:
    page = await opened(browser, url, "")
    await page.evaluate(AXE)
    await page.evaluate("document.querySelector('#events').style.color = '#999'")

    assert any("color-contrast" in finding for finding in await findings(page, CONTRAST))


@pytest.mark.parametrize(("kind", "number"), [("c", 12), ("u", 5)])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_text_on_all_colours_of_namespaces_and_of_use_is_readable(
    browser: Browser, url: str, kind: str, number: int, scheme: Scheme
) -> None:
    page = await opened(browser, url, "#/gpus", scheme=scheme)
    names = [f"{kind}{at}" for at in range(number)]
    await page.locator(".share").evaluate_all(SET_COLOURS, names)
    await page.evaluate(AXE)
    found = await page.evaluate("axe.run('#grid', { runOnly: ['color-contrast'] })")

    assert found["violations"] == []


VISIONS = {
    "trichromatic": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
}
"""What viewers see of linear RGB. https://doi.org/10.1109/TVCG.2009.113"""


def oklab(rgb: tuple[float, ...]) -> tuple[float, ...]:
    """Return a linear colour where distances are as large as they look.

    https://bottosson.github.io/posts/oklab/
    """
    cones = (
        (0.4122214708, 0.5363325363, 0.0514459929),
        (0.2119034982, 0.6806995451, 0.1073969566),
        (0.0883024619, 0.2817188376, 0.6299787005),
    )
    axes = (
        (0.2104542553, 0.7936177850, -0.0040720468),
        (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660),
    )
    return product_of(axes, tuple(max(one, 0) ** (1 / 3) for one in product_of(cones, rgb)))


def product_of(matrix: Any, vector: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sum(one * other for one, other in zip(row, vector, strict=True)) for row in matrix)


@pytest.mark.parametrize("vision", VISIONS)
async def test_colours_of_namespaces_differ_for_all_viewers(vision: str) -> None:
    css = (resources.files("services.api") / "static" / "views.css").read_text()
    found = re.findall(r"\.c\d+ { --fill: #(\w{6})", css)
    assert len(found) == 12
    linear = [
        tuple((int(text[at : at + 2], 16) / 255) ** 2.2 for at in (0, 2, 4)) for text in found
    ]
    seen = [oklab(product_of(VISIONS[vision], rgb)) for rgb in linear]

    assert min(math.dist(*pair) for pair in itertools.combinations(seen, 2)) > 0.085


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
    const canvas = new OffscreenCanvas(30, 18), context = canvas.getContext("2d");
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
    await page.evaluate(NEXT_FRAME)
    return await page.screenshot()


async def take() -> None:
    """Write the pictures."""
    async with fixed_page() as url, chromium() as browser:
        for name, scheme in product(PICTURES, SCHEMES):
            path = FOLDER / f"{name}-{scheme}.png"
            path.write_bytes(await picture(browser, url, name, scheme))


if __name__ == "__main__":
    asyncio.run(take())
