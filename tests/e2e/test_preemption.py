"""A budget is used up while a pod runs: with notice, its place goes to a pod with budget left."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.kubernetes.errors import NotFoundError
from shared.model.lease_copy import ANNOTATION
from shared.model.preemption import PREEMPT_AT
from tests.support.stack import Stack, gpu_pod, running, stack, succeeded, vgpu
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUDGETS = """
apiVersion: leasehold.dev/v1alpha1
kind: GPUBudget
metadata: {name: team-a}
spec: {limitGPUMinutes: 0.02, policy: {type: none}}
"""
QUICK = {
    "LEASEHOLD_TICK_S": "0.2",
    "LEASEHOLD_PREEMPTION_NOTICE_S": "8",
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


async def until_pod(
    cluster: Stack, namespace: str, name: str, wanted: Callable[[dict[str, Any] | None], object]
) -> dict[str, Any]:
    async def pod() -> dict[str, Any] | None:
        with contextlib.suppress(NotFoundError):
            return dict(json.loads(await cluster.kube.read(path(namespace, name))))
        return None

    return await until(pod, wanted) or {}


def is_announced(pod: dict[str, Any] | None) -> bool:
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
    done = await until(lambda: cluster.leasehold(*command), succeeded)
    found: dict[str, Any] = json.loads(done.out)
    return found


async def test_a_pod_over_budget_is_preempted_for_one_with_budget(cluster: Stack) -> None:
    await cluster.kube.create(path("team-a"), gpu_pod("spender", vgpu(memory=12_000)))
    before = await until_pod(cluster, "team-a", "spender", lambda pod: pod and running(pod))
    await cluster.kube.create(path("team-b"), gpu_pod("saver", vgpu(memory=12_000)))
    watching = asyncio.create_task(until_pod(cluster, "team-a", "spender", is_announced))
    planned = await dry_run(cluster)
    notified = await watching

    assert not notified["metadata"].get("deletionTimestamp")
    victims = (planned["plan"] or planned["in_progress"])["victims"]
    assert [each["pod"] for each in victims] == ["team-a/spender"]
    after = await until_pod(cluster, "team-b", "saver", lambda pod: pod and running(pod))

    await until_pod(cluster, "team-a", "spender", lambda pod: pod is None)
    assert device_of(after) == device_of(before)
    events = json.loads(await cluster.kube.read("/api/v1/namespaces/team-a/events"))["items"]
    messages = [each["message"] for each in events if each["reason"] == "GPUBudgetPreempt"]
    assert any("will be evicted" in message and "team-b/saver" in message for message in messages)
    done = await cluster.leasehold("preemptions", "--json")
    [line] = json.loads(done.out)["evictions"]
    assert (line["pod"], line["cause"], line["beneficiary"]) == (
        "team-a/spender",
        "reclaimable",
        "team-b/saver",
    )
    await cluster.audit()
