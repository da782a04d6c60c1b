"""A budget is used up while a pod runs: with notice, its place goes to a pod with budget left."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.kubernetes.errors import NotFoundError
from shared.model.lease_copy import ANNOTATION
from shared.model.preemption import PREEMPT_AT
from tests.support.stack import Stack, gpu_pod, running, stack, vgpu

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUDGETS = """
apiVersion: leasehold.dev/v1alpha1
kind: GPUBudget
metadata: {name: team-a}
spec: {limitGPUMinutes: 0.02, policy: {type: none}}
"""
QUICK = {
    "LEASEHOLD_TICK_S": "0.2",
    "LEASEHOLD_PREEMPTION_NOTICE_S": "3",
    "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "4",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One GPU, and a namespace with a second's worth of it."""
    budgets: Path = tmp_path_factory.mktemp("budgets") / "budgets.yaml"
    budgets.write_text(BUDGETS)
    async with stack("--nodes", "1", "--gpus", "1xT4", "--budgets", str(budgets), env=QUICK) as up:
        for namespace in ("team-a", "team-b"):
            await up.kube.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        yield up


def path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}".rstrip("/")


async def until(
    cluster: Stack, namespace: str, name: str, wanted: Callable[[dict[str, Any] | None], object]
) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    async with asyncio.timeout(40):
        while not wanted(found):
            await asyncio.sleep(0.05)
            try:
                found = json.loads(await cluster.kube.read(path(namespace, name)))
            except NotFoundError:
                found = None
                if wanted(None):
                    return {}
    return found or {}


def told(pod: dict[str, Any] | None) -> bool:
    return pod is not None and PREEMPT_AT in pod["metadata"].get("annotations", {})


def device_of(pod: dict[str, Any]) -> str:
    lease = json.loads(pod["metadata"]["annotations"][ANNOTATION])
    return str(lease["shares"][0][1])


async def dry_run(cluster: Stack) -> dict[str, Any]:
    """The plan for the waiting pod, once its devices may be taken back."""
    command = (
        "preemptions",
        "--dry-run",
        "saver",
        "-n",
        "team-b",
        "--min-runtime-s",
        "0",
        "--json",
    )
    async with asyncio.timeout(30):
        while (done := await cluster.leasehold(*command)).code:
            await asyncio.sleep(0.1)
    found: dict[str, Any] = json.loads(done.out)
    return found


async def test_the_place_of_a_pod_over_budget_goes_to_one_with_budget(cluster: Stack) -> None:
    await cluster.kube.create(path("team-a"), gpu_pod("spender", vgpu(memory=12_000)))
    before = await until(cluster, "team-a", "spender", lambda pod: pod and running(pod))
    await cluster.kube.create(path("team-b"), gpu_pod("saver", vgpu(memory=12_000)))
    watching = asyncio.create_task(until(cluster, "team-a", "spender", told))
    planned = await dry_run(cluster)
    notified = await watching

    assert not notified["metadata"].get("deletionTimestamp")
    victims = (planned["plan"] or planned["in_progress"])["victims"]
    assert [each["pod"] for each in victims] == ["team-a/spender"]
    after = await until(cluster, "team-b", "saver", lambda pod: pod and running(pod))

    await until(cluster, "team-a", "spender", lambda pod: pod is None)
    assert device_of(after) == device_of(before)
    events = json.loads(await cluster.kube.read("/api/v1/namespaces/team-a/events"))["items"]
    said = [each["message"] for each in events if each["reason"] == "GPUBudgetPreempt"]
    assert any("will be evicted" in message and "team-b/saver" in message for message in said)
    done = await cluster.leasehold("preemptions", "--json")
    [line] = json.loads(done.out)["evictions"]
    assert (line["pod"], line["cause"], line["beneficiary"]) == (
        "team-a/spender",
        "reclaimable",
        "team-b/saver",
    )
    await cluster.audit()
