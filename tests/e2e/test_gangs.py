"""Gangs as their users make them: PodGroups through kubectl, all pods or none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, stack, vgpu
from tests.support.waiting import until

pytestmark = [
    *NEEDS_KUBECTL,
    pytest.mark.asyncio(loop_scope="module"),
]

CRDS = Path(__file__).parents[1] / "support" / "crds"
VOLCANO = "scheduling.volcano.sh/v1beta1"
COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
WHOLE = vgpu(number=1, cores=100)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Stack]:
    """One node with four GPUs, where both kinds of PodGroup are installed."""
    async with stack("--nodes", "1", "--gpus", "4xT4") as up:
        for kind in ("volcano", "coscheduling"):
            done = await up.kubectl("apply", "-f", str(CRDS / f"{kind}_podgroup.yaml"))
            assert done.code == 0, done.err
        yield up


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(cluster: Stack) -> AsyncIterator[None]:
    yield
    await cluster.clear()


def group(name: str, size: int, version: str = VOLCANO) -> str:
    return f"""
apiVersion: {version}
kind: PodGroup
metadata:
  name: {name}
spec:
  minMember: {size}
"""


async def apply(cluster: Stack, manifest: str) -> None:
    done = await cluster.kubectl("apply", "-f", "-", stdin=manifest)
    assert done.code == 0, done.err


def member(name: str, of: str) -> dict[str, Any]:
    return gpu_pod(name, WHOLE, annotations={"scheduling.k8s.io/group-name": of})


def why(pod: dict[str, Any]) -> str:
    conditions = pod["status"].get("conditions", [])
    return next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")


async def all_run(cluster: Stack, *names: str) -> None:
    await asyncio.gather(*(cluster.until(name, running) for name in names))


async def test_two_gangs_that_do_not_fit_together_run_one_after_the_other(cluster: Stack) -> None:
    await apply(cluster, "---".join((group("red", 3), group("blue", 3))))

    for number in range(3):
        for colour in ("red", "blue"):
            await cluster.create(member(f"{colour}-{number}", colour))
    pods = await until(cluster.pods, lambda pods: sum(map(running, pods)) >= 3)

    up = [pod for pod in pods if running(pod)]
    first = up[0]["metadata"]["name"].partition("-")[0]
    second = "blue" if first == "red" else "red"
    assert {pod["metadata"]["name"] for pod in up} == {f"{first}-{n}" for n in range(3)}
    waiting = await cluster.until(f"{second}-0", lambda pod: "1 of 3 fit" in why(pod))
    assert not waiting["spec"].get("nodeName")
    explained = await cluster.leasehold("explain", f"{second}-0")
    assert f"gang        default/{second}, at least 3 run together or none" in explained.out
    await cluster.audit()

    await asyncio.gather(
        *(cluster.kubectl("delete", "pod", f"{first}-{n}", "--now") for n in range(3))
    )

    await all_run(cluster, *(f"{second}-{n}" for n in range(3)))


async def test_a_lowered_minimum_lets_the_existing_pods_run(cluster: Stack) -> None:
    await apply(cluster, group("shrinking", 6))
    await cluster.create(member("only", "shrinking"))
    await cluster.until("only", lambda pod: "1 of 6 pods exist" in why(pod))

    await apply(cluster, group("shrinking", 1))

    await all_run(cluster, "only")


@pytest.mark.parametrize("scheduler", ["default-scheduler", "leasehold"])
async def test_a_pod_without_a_gpu_counts_whichever_scheduler_places_it(
    cluster: Stack, scheduler: str
) -> None:
    await apply(cluster, group("trained", 2))
    worker, launcher = member("worker", "trained"), member("launcher", "trained")
    launcher["spec"]["containers"][0].pop("resources")
    launcher["spec"]["schedulerName"] = scheduler
    await cluster.create(worker)
    await cluster.until("worker", lambda pod: "1 of 2 pods exist" in why(pod))

    await cluster.create(launcher)

    await all_run(cluster, "worker", "launcher")
    await cluster.audit()


async def test_coschedulings_label_and_koordinators_annotation_define_gangs(cluster: Stack) -> None:
    await apply(cluster, group("labelled", 2, COSCHEDULING))
    for name in ("l-0", "l-1"):
        pod = gpu_pod(name, WHOLE)
        pod["metadata"]["labels"] = {"scheduling.x-k8s.io/pod-group": "labelled"}
        await cluster.create(pod)
    await all_run(cluster, "l-0", "l-1")
    own = {
        "gang.scheduling.koordinator.sh/name": "own",
        "gang.scheduling.koordinator.sh/min-available": "3",
    }

    for number in range(3):
        await cluster.create(gpu_pod(f"k-{number}", WHOLE, annotations=own))

    await cluster.until("k-0", lambda pod: "2 of 3 fit" in why(pod))
    await cluster.kubectl("delete", "pod", "l-0", "--now")
    await all_run(cluster, "k-0", "k-1", "k-2")
