"""A budget is used up while a pod runs: with notice, its place goes to a pod with budget left."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from shared.kubernetes.errors import NotFoundError
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.leases.preemption import PREEMPT_AT
from tests.support.dialects.checklist import condition_text
from tests.support.stack import Stack, gpu_pod, running, succeeded, vgpu
from tests.support.waiting import until

HELD = "still hold 12000 MiB of GPU 0 of node node-0"


def path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}".rstrip("/")


async def until_pod(
    up: Stack, namespace: str, name: str, wanted: Callable[[dict[str, Any] | None], object]
) -> dict[str, Any]:
    async def pod() -> dict[str, Any] | None:
        with contextlib.suppress(NotFoundError):
            return dict(json.loads(await up.kube.read(path(namespace, name))))
        return None

    return await until(pod, wanted) or {}


def is_announced(pod: dict[str, Any] | None) -> bool:
    return pod is not None and PREEMPT_AT in pod["metadata"].get("annotations", {})


def device_of(pod: dict[str, Any]) -> str:
    lease = json.loads(pod["metadata"]["annotations"][ANNOTATION])
    return str(lease["shares"][0][1])


async def dry_run(up: Stack) -> dict[str, Any]:
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
    done = await until(lambda: up.leasehold(*command), succeeded)
    shown: dict[str, Any] = json.loads(done.out)
    return shown


async def test_a_pod_over_budget_is_preempted_for_one_with_budget(up: Stack) -> None:
    # The first command of a run imports all others; a preemption does not wait for it.
    assert succeeded(await up.leasehold("preemptions"))
    await up.kube.create(path("team-a"), gpu_pod("spender", vgpu(memory=12_000)))
    before = await until_pod(up, "team-a", "spender", lambda pod: pod and running(pod))
    await up.kube.create(path("team-b"), gpu_pod("saver", vgpu(memory=12_000)))
    watching = asyncio.create_task(until_pod(up, "team-a", "spender", is_announced))
    planned = await dry_run(up)
    notified = await watching

    assert not notified["metadata"].get("deletionTimestamp")
    victims = (planned["plan"] or planned["in_progress"])["victims"]
    assert [victim["pod"] for victim in victims] == ["team-a/spender"]
    after = await until_pod(up, "team-b", "saver", lambda pod: pod and running(pod))

    await until_pod(up, "team-a", "spender", lambda pod: pod is None)
    assert device_of(after) == device_of(before)
    events = json.loads(await up.kube.read("/api/v1/namespaces/team-a/events"))["items"]
    messages = [event["message"] for event in events if event["reason"] == "GPUBudgetPreempt"]
    assert any("will be evicted" in message for message in messages)
    assert not any("team-b" in message for message in messages), "whose pods others may not see"
    done = await up.leasehold("preemptions", "--json")
    [line] = json.loads(done.out)["evictions"]
    assert (line["pod"], line["cause"], line["beneficiary"]) == (
        "team-a/spender",
        "reclaimable",
        "team-b/saver",
    )
    await up.audit()


async def test_a_preemptor_waits_with_the_reason_while_processes_of_its_victim_stay(
    up: Stack,
) -> None:
    victim = gpu_pod("stuck", vgpu(memory=12_000))
    victim["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 1000 & wait"]
    await up.kube.create(path("team-a"), victim)
    await until_pod(up, "team-a", "stuck", lambda pod: pod and running(pod))
    assert succeeded(await up.leasehold("sim", "break", "node-0/0", "--fault", "stuck"))
    try:
        await up.kube.create(path("team-b"), gpu_pod("saver", vgpu(memory=12_000)))
        await until_pod(up, "team-a", "stuck", lambda pod: pod is None)
        waiting = await until_pod(
            up, "team-b", "saver", lambda pod: pod and HELD in condition_text(pod)
        )
        assert "nodeName" not in waiting["spec"]
        assert waiting["status"]["phase"] == "Pending"
    finally:
        assert succeeded(await up.leasehold("sim", "heal", "node-0/0"))

    started = await until_pod(up, "team-b", "saver", lambda pod: pod and running(pod))
    assert started["metadata"]["uid"] == waiting["metadata"]["uid"]
