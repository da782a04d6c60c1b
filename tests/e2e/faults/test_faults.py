"""Whatever dies or hangs in the middle, every pod is bound in time, and the audit is clean."""

import asyncio
import contextlib
from typing import Any

import pytest
import redis.asyncio

from shared.model.errors import ConflictError, UnavailableError
from tests.support.dialects.checklist import delete_all_pods
from tests.support.stack import Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

PODS = 100
WORK = 20
BOUND_S = 15.0
"""A pending pod is bound within this time."""


@pytest.mark.parametrize("victim", ["agent-node-0", "valkey", "simcluster"])
async def test_a_hundred_pods_are_bound_although_a_service_is_killed(
    up: Stack, victim: str
) -> None:
    names = [f"{victim}-{n}" for n in range(PODS)]

    async def arrive() -> None:
        for name in names:
            await asyncio.shield(created(up, name))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(arrive())
        await until(lambda: up.names and names[PODS // 3] in up.names)
        up.kill(victim)

    await all_bound(up, refused_too=victim in {"agent-node-0", "simcluster"})
    await up.audit()
    await delete_all_pods(up)
    await up.audit()


async def all_bound(up: Stack, *, refused_too: bool) -> None:
    """Wait until every pod is bound and runs.

    A kubelet whose device plugin is away refuses what it admits at that moment, for good; such pods
    are bound, and count if `refused_too`.
    """

    async def left() -> dict[str, Any]:
        return {
            pod["metadata"]["name"]: pod["status"]
            for pod in await up.pods()
            if not running(pod) and not (refused_too and refused_by_kubelet(pod))
        }

    await until(left, lambda pods: not pods, limit_s=90)


def refused_by_kubelet(pod: dict[str, Any]) -> bool:
    """Whether the pod reached its node while the kubelet had no device plugin."""
    return bool(
        pod["spec"].get("nodeName") and pod["status"].get("reason") == "UnexpectedAdmissionError"
    )


async def created(up: Stack, name: str) -> None:
    """Create a pod, again and again while the API server is away."""

    async def is_created() -> bool:
        with contextlib.suppress(ConflictError):
            try:
                await up.create(gpu_pod(name, vgpu(memory=1000, cores=5)))
            except UnavailableError:
                return False
        return True

    await until(is_created)


async def test_a_ledger_of_an_older_format_is_rebuilt_while_its_pods_run(up: Stack) -> None:
    for number in range(5):
        await up.create(gpu_pod(f"before-{number}", vgpu(memory=2000)))
    await up.until_all(5)
    async with redis.asyncio.Redis.from_url(up.state()["redis_url"], **up.login()) as client:
        earlier = int(await client.hget("lh:ledger", "format")) - 1
        await client.hset("lh:ledger", "format", earlier)

        await up.create(gpu_pod("after", vgpu(memory=2000)))

        await up.until("after", running, limit_s=60)
        assert int(await client.hget("lh:ledger", "format")) == earlier + 1
        assert await client.hlen("lh:leases") == 6
    await up.audit()
    await delete_all_pods(up)
    await up.audit()


async def test_leases_of_pods_that_a_restored_api_server_does_not_know_end_within_30_s(
    up: Stack,
) -> None:
    await up.create(gpu_pod("kept", vgpu(memory=2000)))
    await up.until("kept", running)
    before = up.back_up_objects()
    for number in range(24):
        await up.create(gpu_pod(f"forgotten-{number}", vgpu(memory=70000)))
    await up.until_all(24)

    up.restore_objects(before)

    async with redis.asyncio.Redis.from_url(up.state()["redis_url"], **up.login()) as client:
        await until(lambda: client.hlen("lh:leases"), lambda count: count == 1, limit_s=30)
    await up.create(gpu_pod("after", vgpu(number=8, memory=70000)))
    await up.until("after", running)
    await up.audit()
    await delete_all_pods(up)
    await up.audit()


async def work_created(up: Stack, prefix: str) -> None:
    for number in range(WORK):
        await up.create(gpu_pod(f"{prefix}-{number}", vgpu(memory=1000)))


async def work_is_bound(up: Stack) -> bool:
    pods = await up.pods()
    return len(pods) == WORK and all(pod["spec"].get("nodeName") for pod in pods)


@pytest.mark.parametrize("victim", ["placer-0", "binder", "nats", "watcher"])
async def test_pods_are_bound_in_time_although_a_process_dies_with_work(
    up: Stack, victim: str
) -> None:
    before = len(up.names)
    creating = asyncio.create_task(work_created(up, f"killed-{victim}"))
    await until(lambda: len(up.names) > before + WORK // 3)
    up.kill(victim)
    await creating

    await until(lambda: work_is_bound(up), limit_s=BOUND_S)

    await delete_all_pods(up)
    await up.audit()
