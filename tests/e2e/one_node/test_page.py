"""The page of a whole stack: what kubectl applies is on it within a second."""

import json
import time

import pytest
from playwright.async_api import expect

from tests.support.api.browser import chromium, needed
from tests.support.stack import Stack, gpu_pod, vgpu

pytestmark = [*needed, pytest.mark.kubectl]

SOON_S = 1.0
SEEN = """(name) => new Promise((seen) => {
  const shown = () => [...document.querySelectorAll(".share")].map((one) => one.textContent);
  const look = () => shown().includes(name)
    ? seen(Date.now() / 1000) : requestAnimationFrame(look);
  look();
})"""


async def test_a_pod_applied_with_kubectl_is_a_block_on_the_page_within_a_second(
    up: Stack,
) -> None:
    async with chromium() as browser:
        url = f"http://127.0.0.1:{up.state()['ports']['page']}"
        page = await browser.new_page()
        await page.goto(url)
        await expect(page.locator(".dev")).to_have_count(4)
        fastest = float("inf")
        for number in range(5):  # a machine that is busy is late now and then, not five times
            name = f"train-{number}"
            pod = json.dumps(gpu_pod(name, vgpu(memory=1000)))

            applied = await up.kubectl("apply", "-f", "-", stdin=pod)
            accepted_at = time.time()

            assert applied.code == 0, applied.err
            fastest = min(fastest, await page.evaluate(SEEN, name) - accepted_at)
            if fastest < SOON_S:
                break

        assert fastest < SOON_S
        await expect(page.locator(".share.active")).not_to_have_count(0)
        await expect(page.locator("#events")).to_contain_text("running")
        await expect(page.get_by_role("alert")).to_be_hidden()
