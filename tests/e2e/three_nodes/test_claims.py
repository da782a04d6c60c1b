"""Pods with claims get volumes where they run, also gangs, and in spite of failures and kills."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dialects.checklist import leases
from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL

CRDS = Path(__file__).parents[2] / "support" / "crds"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
GROUP = """
apiVersion: scheduling.volcano.sh/v1beta1
kind: PodGroup
metadata: {name: train}
spec: {minMember: 8}
"""
PODS = 40


async def storage_class(up: Stack, name: str, **parameters: str) -> None:
    body = {
        "metadata": {"name": name},
        "provisioner": "disks.example",
        "volumeBindingMode": "WaitForFirstConsumer",
        "parameters": parameters,
    }
    await up.kube.create(CLASSES, body)


async def with_claim(
    up: Stack, name: str, storage_class_name: str = "", *, claim: str = "", **annotations: str
) -> None:
    """Create a pod with a claim that exists, or with a new one of its name."""
    if not claim:
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": storage_class_name,
            "resources": {"requests": {"storage": "1Gi"}},
        }
        await up.kube.create(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim or name}}]
    notes = {key.replace("__", "/"): value for key, value in annotations.items()}
    await up.create(gpu_pod(name, vgpu(memory=1000), annotations=notes, volumes=volumes))


async def items(up: Stack, path: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(await up.kube.read(path))["items"]
    return listed


async def nodes_of_volumes(up: Stack) -> dict[str, str]:
    """Return the node from which the volume of each bound claim can be reached."""
    nodes = {}
    for volume in await items(up, VOLUMES):
        terms = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        [node] = terms[0]["matchExpressions"][0]["values"]
        nodes[volume["spec"]["claimRef"]["name"]] = node
    return nodes


async def nodes_of_pods(up: Stack) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in await up.pods()}


async def delete_claims(up: Stack) -> None:
    for claim in await items(up, CLAIMS):
        await up.kube.delete(f"{CLAIMS}/{claim['metadata']['name']}")
    await until(lambda: items(up, VOLUMES), lambda volumes: not volumes)


async def test_a_gang_of_eight_gets_a_volume_for_each_pod_where_it_runs(up: Stack) -> None:
    await up.apply(CRDS / "volcano_podgroup.yaml")
    await up.apply(GROUP)
    await storage_class(up, "slow", delay="1")

    for number in range(8):
        group = {"scheduling.k8s.io__group-name": "train"}
        await with_claim(up, f"train-{number}", "slow", **group)
    await up.until_all(8)

    assert await nodes_of_volumes(up) == await nodes_of_pods(up)
    await up.clear()
    await delete_claims(up)


async def test_pods_of_a_gang_that_share_a_claim_of_one_node_run_on_one_node(up: Stack) -> None:
    await up.apply(GROUP.replace("minMember: 8", "minMember: 3").replace("train", "sharing"))
    await storage_class(up, "of-one-node", delay="1")
    notes = {"scheduling.k8s.io__group-name": "sharing", "hami.io__node-scheduler-policy": "spread"}
    await with_claim(up, "sharing-0", "of-one-node", **notes)

    for number in (1, 2):
        await with_claim(up, f"sharing-{number}", claim="sharing-0", **notes)
    await up.until_all(3)

    [node] = set((await nodes_of_pods(up)).values())
    assert await nodes_of_volumes(up) == {"sharing-0": node}
    await up.clear()
    await delete_claims(up)


async def test_pods_run_where_the_provisioner_has_space_left(up: Stack) -> None:
    fails_on = {"fails-on": "node-0,node-1"}
    await storage_class(up, "scarce", **fails_on)

    for number in range(3):
        await with_claim(up, f"scarce-{number}", "scarce")
    await up.until_all(3, limit_s=120.0)

    assert set((await nodes_of_pods(up)).values()) == {"node-2"}
    await up.clear()
    await delete_claims(up)


@pytest.mark.parametrize("service", ["binder", "watcher"])
async def test_kills_leave_no_pod_without_its_volume(up: Stack, service: str) -> None:
    await storage_class(up, service, delay="2")
    names = [f"{service}-{number}" for number in range(PODS)]

    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(with_claim(up, name, service))
        tasks.create_task(kill(up, service, times=3))
    await up.until_all(PODS, limit_s=240.0)

    assert await nodes_of_volumes(up) == await nodes_of_pods(up)
    assert {claim["metadata"]["name"] for claim in await items(up, CLAIMS)} == set(names)
    await up.audit()
    await up.clear()
    await until(lambda: leases(up), lambda left: not left)
    await delete_claims(up)


async def kill(up: Stack, service: str, *, times: int) -> None:
    """Kill a service while pods start: each time once more of them run."""
    for number in range(times):
        await until_running(up, 8 * number)
        await until(lambda: up.has_process(service))
        up.kill(service)


async def until_running(up: Stack, least: int) -> None:
    await until(up.pods, lambda pods: sum(map(running, pods)) >= least, limit_s=120.0)
