"""An operator resizes a running pod's lease, also while a component is killed."""

import asyncio
import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.lease_copy import ANNOTATION, load_lease
from shared.model.names import Namespace
from tests.support.dialects.checklist import annotation_of, leases
from tests.support.node_agent.regions import limit_mib, use_memory
from tests.support.stack import Done, Stack, gpu_pod, running, succeeded, vgpu
from tests.support.waiting import until

MIB = 1 << 20
IDS = "volcano.sh/vgpu-ids-new"
PHASE = "volcano.sh/bind-phase"


def region_at(up: Stack, pod: dict[str, Any]) -> Path:
    """Return where the region of a pod's container lies."""
    node = pod["spec"]["nodeName"]
    uid = pod["metadata"]["uid"]
    directory: Path = up.root / "agents" / node / "containers" / f"{uid}_cuda"
    (file,) = directory.glob("*.cache")
    return file


def copy_of(pod: dict[str, Any]) -> Lease:
    text = pod["metadata"]["annotations"][ANNOTATION]
    return load_lease(text, namespace=Namespace("default"), name=pod["metadata"]["name"])


async def started(up: Stack, name: str, memory: int, cores: int = 0) -> dict[str, Any]:
    """Create a pod and wait until it runs with an active lease, which may be resized."""
    await up.create(gpu_pod(name, vgpu(memory=memory, cores=cores)))
    pod = await up.until(name, running)
    await until(lambda: leases(up), lambda held: held[name].state is LeaseState.ACTIVE)
    return pod


async def resize(up: Stack, name: str, *flags: str) -> Done:
    return await up.leasehold("resize", name, *flags)


async def leased(up: Stack, name: str) -> dict[str, Any]:
    """Return the lease's share without its usage, which changes with each scan."""
    leases = json.loads((await up.leasehold("ps", "--json")).out)["leases"]
    (of_pod,) = (lease for lease in leases if lease["name"] == name)
    shares: list[dict[str, Any]] = of_pod["shares"]
    return {key: value for key, value in shares[0].items() if key != "measured"}


async def test_a_running_pod_is_resized_in_the_ledger_its_annotations_and_its_limits(
    up: Stack,
) -> None:
    pod = await started(up, "one", 4_000, 20)
    place = region_at(up, pod)

    done = await resize(up, "one", "--memory", "6000Mi", "--cores", "30")

    assert done.code == 0, done.err
    assert "has 6000 MiB and 30 % of the cores of GPU 0" in done.out
    assert "keep their cap of 20 % until they restart" in done.out
    assert "pending:" not in done.out
    assert limit_mib(place) == 6_000
    top = await up.leasehold("top", "--json")
    assert top.code == 0, top.err
    (row,) = json.loads(top.out)["shares"]
    assert (row["name"], row["memory_mib"]) == ("one", 6_000)
    pod = await up.until("one", lambda pod: annotation_of(pod, PHASE) == "success")
    assert copy_of(pod).shares[0].memory_mib == 6_000
    assert ",NVIDIA,6000,30:" in pod["metadata"]["annotations"][IDS]
    assert await leased(up, "one") | {"memory_mib": 6_000, "cores_percent": 30} == await leased(
        up, "one"
    )
    explained = (await up.leasehold("explain", "one")).out
    assert "resized: its pod requests 4000 MiB and 20 % of the cores" in explained
    again = await resize(up, "one", "--memory", "6000Mi", "--json")
    assert json.loads(again.out)["outcome"] == "unchanged"

    use_memory(place, 3_000)
    refused = await resize(up, "one", "--memory", "2Gi")
    least = await resize(up, "one", "--memory", "3000Mi", "--json")

    assert refused.code == 1
    assert "3000 MiB of GPU 0" in refused.err
    assert "--memory 3000Mi" in refused.err
    assert json.loads(least.out)["outcome"] == "resized", least.out
    assert limit_mib(place) == 3_000
    events = await until(
        lambda: up.kubectl("get", "events"), lambda done: "4000 to 6000 MiB" in done.out
    )
    assert re.search("LeaseResized.* container cuda: 4000 to 6000 MiB", events.out)
    await up.audit()


async def test_a_pod_runs_on_capacity_that_a_resize_freed(up: Stack) -> None:
    await started(up, "wide", 12_000)
    await up.create(gpu_pod("next", vgpu(memory=10_000)))
    await until(lambda: up.leasehold("ps"), lambda done: "next" in done.out)

    too_much = await resize(up, "wide", "--memory", "16Gi")
    more = await resize(up, "wide", "--memory", "15Gi", "--cores", "5")
    none = await resize(up, "nobody", "--memory", "1Gi")
    wrong = await resize(up, "wide", "--memory", "1.5")
    fewer = await resize(up, "wide", "--memory", "5000Mi")
    await up.until("next", running)

    assert (too_much.code, more.code, none.code, wrong.code, fewer.code) == (1, 0, 1, 2, 0)
    assert "15360 MiB in all" in too_much.err
    assert "there is no pod default/nobody" in none.err
    assert "6Gi or 6144Mi" in wrong.err
    blocked = await resize(up, "wide", "--memory", "6Gi")
    assert blocked.code == 1
    assert "360 of them free" in blocked.err
    await up.audit()


@pytest.mark.parametrize("victim", ["binder", "agent-node-0"])
async def test_a_resize_is_completed_although_a_component_is_killed_during_it(
    up: Stack, victim: str
) -> None:
    """Sizes keep changing while a part dies again and again: all agree on one in the end."""
    pod = await started(up, "one", 4_000)
    place = region_at(up, pod)
    chance = random.Random(victim)  # noqa: S311
    ended = asyncio.Event()

    async def killing() -> None:
        for _ in range(4):
            await asyncio.sleep(chance.uniform(0.3, 1.2))
            with contextlib.suppress(StopIteration, TypeError):
                up.kill(victim)
        ended.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(killing())
        while not ended.is_set():
            await resize(up, "one", "--memory", f"{chance.choice([2, 3, 5, 7, 9])}000Mi")

    last = await until(lambda: resize(up, "one", "--memory", "8000Mi", "--json"), succeeded)
    await until(lambda: limit_mib(place) == 8_000)
    await up.until("one", lambda pod: copy_of(pod).shares[0].memory_mib == 8_000)
    assert json.loads(last.out)["after"]["memory_mib"] == 8_000
    assert (await leased(up, "one"))["memory_mib"] == 8_000
    await up.audit()


async def test_a_rebuilt_ledger_has_the_new_size_of_a_resized_lease(up: Stack) -> None:
    async def sizes() -> list[int]:
        done = await up.leasehold("ps", "--json")
        leases = json.loads(done.out)["leases"] if done.code == 0 else ()
        return [lease["shares"][0]["memory_mib"] for lease in leases]

    await up.clear()
    await started(up, "one", 4_000)
    assert (await resize(up, "one", "--memory", "7000Mi")).code == 0
    redis_url = up.state()["redis_url"]
    client = redis.asyncio.Redis.from_url(redis_url, **up.login())
    try:
        await client.flushall()
    finally:
        await client.aclose()

    await until(sizes, lambda sizes_mib: sizes_mib == [7_000])
    await up.audit()
