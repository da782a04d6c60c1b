"""Questions of those who see the page for the first time, answered by clicking from its overview.

Each task is what somebody wants to know; the test follows only links and buttons with words on
them, and reads the answer.
"""

import csv
import io
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from services.api.http.pod_objects import PodObjects
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kinds.gpu_prices import Prices
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.budgets.budget import AccountUpdate, BudgetWindow, ChargeEntry
from shared.model.leases.lease import ProcessUse
from shared.model.names import Namespace, PodUid
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.placer.ledger import device, facts, queued, report, verdict
from tests.support.simcluster.apiserver import PODS, a_pod, api_server, create
from tests.support.waiting import until

pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]

EUROS = Prices(currency="EUR", models={"T4": Decimal("1.50")})
FAULT = "cordoned: XidError: Xid 79, the GPU has fallen off the bus"


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(serve: Any) -> AsyncIterator[RunningApi]:
    """A pod that waits, one that is idle, one that has used a GPU, and a GPU with a past."""
    async with (
        api_server() as api,
        api.client() as client,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
    ):
        uids = {
            name: PodUid((await create(client, PODS, a_pod(name)))["metadata"]["uid"])
            for name in ("waits", "idle")
        }
        async with serve(pods=PodObjects(kube), prices=EUROS) as shown:
            await fill(shown, uids)
            yield shown


async def fill(shown: RunningApi, uids: dict[str, PodUid]) -> None:
    gpus = [device("night", gpu) for gpu in range(4)]
    sick = replace(gpus[3], healthy=False, fault=FAULT)
    await shown.ledger.save_nodes([facts("night")])
    await shown.ledger.save_devices([report("night", [*gpus[:3], sick])])
    idle = await reserve_lease(shown, uids["idle"], name="idle")
    await shown.ledger.bind([idle])
    process = ProcessUse(pid=4711, inner_pid=12, command="<b>train", memory_mib=300)
    since = time.time() - 7_200
    shown.usage.measure(
        idle, memory_mib=0, cores_percent=0, processes=1, running=(process,), idle_since=since
    )
    waiting = replace(queued(uids["waits"], units=99_000), name="waits")
    await shown.ledger.waiting_pods.enqueue([verdict(waiting, await shown.ledger.capacity())])
    await shown.publish(waiting)
    await shown.record_costs("default", "ended", idle=["default"])
    await until(shown.state, lambda state: "problem" in {it["kind"] for it in state["events"]})
    await shown.ledger.save_devices([report("night", gpus, at=1.0)])
    await until(shown.state, lambda state: "solved" in {it["kind"] for it in state["events"]})
    await until(shown.shares, lambda shares: shares and shares[0]["measured"])
    await shown.service.sample_history()


async def click(page: Page, role: Any, name: str, **more: Any) -> None:
    await page.get_by_role(role, name=name, **more).first.click()


async def test_why_does_this_pod_wait(browser: Browser, cluster: RunningApi) -> None:
    page = await opened(browser, cluster)
    main = page.get_by_role("main")

    await click(page, "link", "default/waits")

    await expect(main).to_contain_text("Why it waits")
    await expect(page.locator(".reason")).not_to_be_empty()
    requested = page.get_by_role("region", name="Requested", exact=True)
    await expect(requested).to_contain_text("example/image:1")
    await expect(requested).to_contain_text("no controller creates it again")
    await page.get_by_text("YAML, with the values of variables hidden").click()
    await expect(page.get_by_label("Manifest")).to_contain_text("kind: Pod")


async def test_which_gpus_are_idle_and_whose(browser: Browser, cluster: RunningApi) -> None:
    page = await opened(browser, cluster)
    await click(page, "link", "All idle pods")
    row = page.locator(".rows [role=row]")
    await expect(row).to_have_text(re.compile("default/idle.*idle.*a0"))
    await click(page, "link", "default/idle")
    await expect(page.get_by_role("main")).to_contain_text(re.compile("Wasted.*idle"))
    processes = page.get_by_role("region", name="Processes on GPUs")
    await expect(processes).to_contain_text("<b>train PID 4711, 12 in main: GPU 0, 300 MiB")

    await page.get_by_role("link", name="Nodes", exact=False).first.click()

    held = page.locator(".rows [role=row]").filter(has_text="a")
    await expect(held.first).to_contain_text("0.25")


async def test_what_did_a_namespace_cost_this_week(browser: Browser, cluster: RunningApi) -> None:
    page = await opened(browser, cluster)
    await click(page, "link", "Namespaces")
    await page.locator(".rows").get_by_role("link", name="default").click()

    costs = page.get_by_role("region", name="GPU time and cost")

    await expect(costs).to_contain_text(re.compile("7 d2 GPU-h, 3.00 EUR; 1 GPU-h of it idle"))
    await page.goto(f"{cluster.url}/#/namespace/ended")
    await expect(costs).to_contain_text(re.compile("7 d1 GPU-h, 1.50 EUR"))


async def test_what_happened_to_gpu_3_last_night(browser: Browser, cluster: RunningApi) -> None:
    page = await opened(browser, cluster)
    await click(page, "link", "Nodes")
    await click(page, "link", "night")
    await page.locator(".dev").nth(3).click(position={"x": 20, "y": 8})
    happened = page.get_by_role("region", name="What happened to it")
    past = re.compile("solved.*Xid 79.*problem.*Xid 79", re.DOTALL)
    await expect(happened).to_contain_text(past)

    await click(page, "button", "Period")
    await click(page, "button", "Last night")

    await expect(page).to_have_url(re.compile(r"from=.*Z&to=.*Z"))
    await expect(page.get_by_role("button", name="Period")).to_have_count(0)
    await expect(page.locator(".histories [aria-pressed=true]")).to_contain_text("20:00")


async def test_pods_and_gpus_have_links_by_name_and_unknown_views_say_so(
    browser: Browser, cluster: RunningApi
) -> None:
    heading = "main h2"
    page = await opened(browser, cluster, "#/pod/default/idle")
    await expect(page.locator(heading).first).to_have_text("default/idle")
    await page.goto(f"{cluster.url}/#/gpu/night/3")
    await expect(page.locator(heading).first).to_have_text("GPU 3 of night")
    await page.goto(f"{cluster.url}/#/pod/default/never-was")
    await expect(page.locator(heading).first).to_have_text("No such pod")

    await page.goto(f"{cluster.url}/#/nowhere")

    await expect(page.locator(heading).first).to_have_text("No such page")


async def test_a_table_is_saved_as_csv(browser: Browser, cluster: RunningApi) -> None:
    page = await opened(browser, cluster, "#/pods?state=idle")
    await expect(page.locator(".rows [role=row]")).to_have_count(1)
    async with page.expect_download() as saving:
        await click(page, "button", "CSV")
    download = await saving.value
    text = Path(await download.path()).read_text()

    assert download.suggested_filename == "pods.csv"
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["name"], row["state"], row["node"], row["memory_mib"]) == (
        "default/idle",
        "idle",
        "a",
        "4000",
    )


async def test_a_namespace_shows_who_granted_it_gpu_time(
    browser: Browser, cluster: RunningApi
) -> None:
    now_ms = await cluster.budgets.now_ms()
    window = BudgetWindow(id="w", start_ms=now_ms - 1000, end_ms=None, limit_units=None)
    grant = ChargeEntry(window="w", kind="grant", units=7_200_000_000, actor="ada", reason="due")
    update = AccountUpdate(
        namespace=Namespace("default"), revision=0, windows=(window,), entries=(grant,)
    )
    assert await cluster.budgets.save(update)

    page = await opened(browser, cluster, "#/namespace/default")

    granted = page.get_by_role("region", name="Granted by whom")
    await expect(granted).to_contain_text("ada: 2 GPU-h, due")
