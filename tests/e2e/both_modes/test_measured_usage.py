"""Measured use of a real program on simulated GPUs, wherever it is shown."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from playwright.async_api import expect

from simcluster.gpu_driver.build import compiler
from tests.support.api.browser import chromium, needed
from tests.support.pseudo_terminal import (
    ALTERNATE_SCREEN,
    CONTROL_C,
    MAIN_SCREEN,
    SHOW_CURSOR,
    on_terminal,
)
from tests.support.stack import LEASEHOLD, Stack, gpu_pod, running, vgpu
from tests.support.waiting import until
from tools.generate.reference_metrics import node_page, scheduler_page

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="simulated GPUs' driver needs a C compiler"),
]

BROWSER, CHROMIUM = needed
USED_MIB = 2048 + 256
"""What the program allocates, and its context."""
MIB = 1 << 20


@contextlib.asynccontextmanager
async def loaded(up: Stack, name: str = "load") -> AsyncIterator[None]:
    """Run a pod whose program keeps 2 GiB and computes, and wait until it is measured."""
    await up.create(gpu_pod(name, vgpu(memory=3000, cores=50)))
    await up.until(name, running)
    program = asyncio.create_task(up.exec(name, "gpu-load", "alloc 2g", "burn 600s"))
    try:
        await until(lambda: share_of(up, name), lambda share: cores_of(share) > 0, limit_s=60)
        yield
    finally:
        await up.clear()
        await program


def cores_of(share: dict[str, Any]) -> int:
    return int((share.get("measured") or {}).get("cores_percent") or 0)


async def share_of(up: Stack, name: str) -> dict[str, Any]:
    """Return the row of a pod in `leasehold top --json`."""
    done = await up.leasehold("top", "--json")
    assert done.code == 0, done.err
    rows: list[dict[str, Any]] = json.loads(done.out)["shares"]
    return next((row for row in rows if row["name"] == name), {})


async def finished_of(up: Stack, name: str) -> dict[str, Any]:
    """Return what the API lists of a pod that has finished."""
    url = f"http://127.0.0.1:{up.state()['ports']['page']}/api/v1/finished?name={name}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        pods: list[dict[str, Any]] = (await response.json())["pods"]
    return pods[0] if pods else {}


async def test_top_shows_a_running_program_and_leaves_a_clean_terminal(up: Stack) -> None:
    command = (*LEASEHOLD, "top", "--interval", "0.5", "--state", str(up.root))
    async with loaded(up), on_terminal(command, os.environ) as terminal:
        before = terminal.modes()
        used = f"{USED_MIB} of 3000"
        await until(terminal.read, lambda drawn: drawn.count(used) >= 3, limit_s=60)
        terminal.press(CONTROL_C)
        code = await terminal.end()

        assert code == 0
        assert ALTERNATE_SCREEN in terminal.output
        assert terminal.output.index(ALTERNATE_SCREEN) < terminal.output.index(used)
        assert MAIN_SCREEN in terminal.output.rpartition(used)[2]
        assert terminal.output.rstrip().endswith((SHOW_CURSOR, MAIN_SCREEN))
        assert "Traceback" not in terminal.output
        assert terminal.modes() == before


async def test_top_sorts_and_filters_by_what_is_measured(up: Stack) -> None:
    await up.create(gpu_pod("aside", vgpu(memory=1000)))
    await up.until("aside", running)
    async with loaded(up):
        by_cores = json.loads((await up.leasehold("top", "--json", "--sort", "cores")).out)
        elsewhere = await up.leasehold("top", "-n", "elsewhere")

        assert [row["name"] for row in by_cores["shares"]] == ["load", "aside"]
        assert by_cores["shares"][0]["measured"]["memory_mib"] == USED_MIB
        said = "no pod holds a lease in namespace elsewhere; -A shows all namespaces\n"
        assert elsewhere.out == said


async def test_a_share_has_no_more_series_than_stated_and_they_end_with_it(
    up: Stack, metrics_port: int
) -> None:
    names = [f"series-{number}" for number in range(4)]
    stated = sum("pod" in labels for _, _, labels, _ in (*node_page(), *scheduler_page()))

    async def numbers() -> list[int]:
        lines = await up.metrics(f"127.0.0.1:{metrics_port}")
        return [sum(f'"{name}"' in line for line in lines) for name in names]

    await asyncio.gather(*(up.create(gpu_pod(name, vgpu(memory=1000))) for name in names))
    await up.until_all(len(names))
    measured = await until(numbers, lambda values: min(values) > stated / 2)
    assert max(measured) <= stated
    await up.clear()

    await until(numbers, lambda values: max(values) == 0)


async def test_both_metrics_ports_have_the_use_of_a_running_program(
    up: Stack, metrics_port: int
) -> None:
    async with loaded(up):
        series = await until(
            lambda: up.values_of("load", f"127.0.0.1:{metrics_port}"),
            lambda values: values.get("leasehold_share_cores_used_ratio", 0) > 0,
        )
        (node,) = json.loads((await up.leasehold("gpus", "--json")).out)["nodes"]

    busy = next(device["hardware"] for device in node["devices"] if device["model"] == "Tesla T4")
    assert (busy["sm_clock_mhz"], busy["power_limit_w"]) == (1410, 400)
    assert busy["temperature_c"] > 31
    for name in ("vGPU_device_memory_usage_in_bytes", "hami_vgpu_memory_used_bytes"):
        assert series[name] == USED_MIB * MIB
    assert series["vGPU_device_memory_limit_in_bytes"] == 3000 * MIB
    for name in ("Device_utilization_desc_of_container", "hami_container_device_utilization_ratio"):
        assert 0 < series[name] <= 70, "it may use half of the device"
    assert series["Device_last_kernel_of_container"] < 30
    assert series["leasehold_container_idle_seconds"] == 0
    assert series["leasehold_share_memory_used_bytes"] == USED_MIB * MIB
    assert series["vGPUMemoryAllocated"] == 3000 * MIB
    assert series["leasehold_share_idle"] == 0


async def test_a_program_sees_the_mig_instance_of_its_pod_and_no_more(up: Stack) -> None:
    await up.create(gpu_pod("mig", vgpu(memory=4000), annotations={"volcano.sh/vgpu-mode": "mig"}))
    await up.until("mig", running)

    listed = (await up.exec("mig", "nvidia-smi", "-L")).out.splitlines()
    program = asyncio.create_task(
        up.exec("mig", "gpu-load", "total 0", "alloc 4g", "alloc 1g", "sleep 600s")
    )
    try:
        share = await until(
            lambda: share_of(up, "mig"),
            lambda row: (row.get("measured") or {}).get("memory_mib") == 4096 + 256,
            limit_s=60,
        )
    finally:
        await up.clear()
        done = await program

    assert listed[0].startswith("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-")
    assert listed[1].split()[:5] == ["MIG", "1g.5gb", "Device", "0:", "(UUID:"]
    assert len(listed) == 2
    assert done.out.splitlines()[:3] == [
        f"total 0: total={5120 * MIB}", "alloc 4g: ok", "alloc 1g: out of memory"
    ]  # fmt: skip
    assert share["measured"]["cores_percent"] is None, "NVML does not report it in MIG mode"
    assert share["measured"]["idle_since"] is None, "so it counts as in use"


async def test_a_pod_without_a_program_is_idle_and_reported_with_its_owner(up: Stack) -> None:
    pod = gpu_pod("lazy", vgpu(memory=3000, cores=20))
    owner = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "name": "night",
        "uid": "u",
        "controller": True,
    }
    pod["metadata"]["ownerReferences"] = [owner]
    await up.create(pod)
    await up.until("lazy", running)

    async def report() -> dict[str, Any]:
        done = await up.leasehold("report", "--idle", "--idle-after", "0", "--json")
        assert done.code == 0, done.err
        shape: dict[str, Any] = json.loads(done.out)
        return shape

    shape_now = await until(report, lambda shape: shape["holders"], limit_s=60)
    explained = await up.leasehold("explain", "lazy", "--idle-after", "0")
    usual = await up.leasehold("explain", "lazy")
    await up.clear()
    finished = await until(lambda: finished_of(up, "lazy"), limit_s=60)

    assert finished["reason"] in {"Succeeded", "deleted"}
    assert (finished["node"], finished["gpus"]) == ("node-0", 0.2)
    assert finished["gpu_hours"] > 0
    (holder,) = shape_now["holders"]
    assert (holder["namespace"], holder["owner"]) == ("default", "PyTorchJob/night")
    assert (holder["memory_mib"], holder["gpus"]) == (3000, 0.2)
    assert "its pod holds it without using it" in explained.out
    assert "without using it" not in usual.out


@BROWSER
@CHROMIUM
async def test_the_page_shows_the_use_of_a_running_program(up: Stack) -> None:
    async with loaded(up), chromium() as browser:
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{up.state()['ports']['page']}")

        described = page.locator(f'[aria-description*="{USED_MIB / 1024:g} GiB in use"]')
        await expect(described).to_have_count(1)
        share = page.locator(".share.measured", has_text="load")
        await expect(share).to_have_count(1)

        async def memory() -> int:
            """Return the percent of the lease that is drawn as used memory."""
            part: str = await share.evaluate("one => one.style.getPropertyValue('--memory')")
            return int(part.removesuffix("%"))

        await until(memory, lambda percent: percent == round(100 * USED_MIB / 3000))
        await share.hover()

        await expect(share).to_have_attribute("title", re.compile(f"uses {USED_MIB / 1024:g} GiB"))
