"""A service or NATS stops with work in its hands: every pod is bound in time."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from urllib.request import urlopen

import pytest
import pytest_asyncio

from tests.support.stack import Stack, gpu_pod, stack, vgpu
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PODS = 20
BOUND_S = 15.0
"""A pending pod is bound within this time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Stack]:
    flags = ("--nodes", "2", "--gpus", "4xA100-80GB")
    async with stack(*flags, placers=2) as running_stack:
        yield running_stack


def readiness(up: Stack, service: str) -> str:
    """Return the text of a service's /readyz."""
    address = json.loads((up.root / "run" / f"{service}.json").read_text())["http"]
    try:
        with urlopen(f"http://{address}/readyz") as response:
            return str(response.read().decode())
    except OSError as error:
        return str(error.read().decode()) if hasattr(error, "read") else repr(error)


async def created(up: Stack, prefix: str) -> None:
    for number in range(PODS):
        await up.create(gpu_pod(f"{prefix}-{number}", vgpu(memory=1000)))


async def all_bound(up: Stack) -> bool:
    pods = await up.pods()
    return len(pods) == PODS and all(pod["spec"].get("nodeName") for pod in pods)


@pytest.mark.parametrize("victim", ["placer-0", "binder", "nats", "watcher"])
async def test_pods_are_bound_in_time_although_a_process_dies_with_work(
    up: Stack, victim: str
) -> None:
    before = len(up.names)
    creating = asyncio.create_task(created(up, f"killed-{victim}"))
    await until(lambda: len(up.names) > before + PODS // 3)
    up.kill(victim)
    await creating

    await until(lambda: all_bound(up), limit_s=BOUND_S)

    await up.clear()
    await up.audit()


async def test_pods_are_bound_in_time_although_one_of_two_placers_hangs(up: Stack) -> None:
    placer = up.pid("placer-0")
    os.kill(placer, signal.SIGSTOP)
    try:
        await created(up, "hung")

        await until(lambda: all_bound(up), limit_s=BOUND_S)
    finally:
        os.kill(placer, signal.SIGCONT)
    await up.clear()
    await up.audit()


async def test_while_no_placer_runs_the_watcher_says_so_and_pods_are_bound_afterwards(
    up: Stack,
) -> None:
    placers = [up.pid(f"placer-{number}") for number in range(2)]
    for placer in placers:
        os.kill(placer, signal.SIGSTOP)
    try:
        await created(up, "early")

        await until(lambda: "no replica receives pod.queued.v1" in readiness(up, "watcher"))
    finally:
        for placer in placers:
            os.kill(placer, signal.SIGCONT)
    await until(lambda: all_bound(up), limit_s=BOUND_S)
    await until(lambda: readiness(up, "watcher") == "ok\n")
    await up.clear()
    await up.audit()
