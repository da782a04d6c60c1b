"""Processes outlive their pods: what they hold is given to no other pod, and none fails for it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.dialects.checklist import condition_text
from tests.support.stack import PODS, Stack, gpu_pod, running, succeeded
from tests.support.waiting import until

DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
WHOLE = {"nvidia.com/gpu": 1}
HELD = "still hold 15360 MiB of"
LEASE_ENDS_S = 30.0
"""A lease ends within this time of its pod's last process."""


def program(name: str) -> dict[str, Any]:
    """A pod with a whole GPU, whose command runs as processes of this machine."""
    pod = gpu_pod(name, WHOLE)
    pod["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 1000 & wait"]
    return pod


@asynccontextmanager
async def stuck(up: Stack, pod: str) -> AsyncIterator[int]:
    """Processes on the GPU of a pod cannot be killed; yields its index."""
    [node] = json.loads((await up.leasehold("gpus", "-o", "json")).out)["nodes"]
    [index] = [
        device["index"]
        for device in node["devices"]
        if any(share["name"] == pod for share in device["shares"])
    ]
    gpu = f"node-0/{index}"
    assert succeeded(await up.leasehold("sim", "break", gpu, "--fault", "stuck"))
    try:
        yield index
    finally:
        assert succeeded(await up.leasehold("sim", "heal", gpu))


async def test_the_next_pods_of_a_deployment_wait_until_the_processes_have_ended(up: Stack) -> None:
    template = program("unnamed")
    template["metadata"] = {"labels": {"app": "trainer"}}
    selector = {"matchLabels": {"app": "trainer"}}
    spec = {"replicas": 4, "selector": selector, "template": template}
    await up.kube.create(DEPLOYMENTS, {"metadata": {"name": "trainer"}, "spec": spec})
    try:
        await up.until_all(4)
        first = (await up.pods())[0]["metadata"]["name"]
        async with stuck(up, first) as index:
            await up.kube.delete(f"{PODS}/{first}")
            waiting = await until(lambda: held_up(up))
            name = waiting["metadata"]["name"]
            assert f"GPU {index} of node node-0" in condition_text(waiting)
            gpus = (await up.leasehold("gpus")).out
            doctor = await up.leasehold("doctor", "--only", "cluster")
            events = await up.kube.read("/api/v1/namespaces/default/events")
            explained = (await up.leasehold("explain", name)).out
            assert f"of pod default/{first}, which has no lease any more, {HELD} it" in gpus
            assert doctor.code == 1
            assert f"{HELD} GPU {index} of node node-0" in doctor.out
            assert "GpuHeldByEndedPod" in events.decode()
            assert HELD in explained

        await up.until(name, running)
        assert {pod["status"]["phase"] for pod in await up.pods()} == {"Running"}
        assert HELD not in (await up.leasehold("gpus")).out
    finally:
        await up.kube.delete(f"{DEPLOYMENTS}/trainer")


async def held_up(up: Stack) -> dict[str, Any] | None:
    """Return the only pod that waits, once it says for which processes."""
    pods = await up.pods()
    assert all(pod["status"]["phase"] != "Failed" for pod in pods)
    waiting = [pod for pod in pods if "nodeName" not in pod["spec"]]
    if len(pods) != 4 or len(waiting) != 1 or HELD not in condition_text(waiting[0]):
        return None
    return waiting[0]


async def test_the_lease_of_a_pod_deleted_by_force_ends_with_its_last_process(up: Stack) -> None:
    await up.create(program("wrapped"))
    await up.until("wrapped", running)
    async with stuck(up, "wrapped"):
        await up.kube.delete(f"{PODS}/wrapped?gracePeriodSeconds=0")
        gpus = await until(lambda: shown(up), lambda text: HELD in text)
        assert "of pod default/wrapped, which was deleted, still hold" in gpus

    # Its agent sees the end at once, and a binder asks for it every few seconds.
    await until(lambda: shown(up), lambda text: "wrapped" not in text, limit_s=LEASE_ENDS_S)
    await up.audit()


async def shown(up: Stack) -> str:
    return (await up.leasehold("gpus")).out
