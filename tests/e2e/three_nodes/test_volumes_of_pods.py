"""Pods with claims, placed where their volumes are, or can be: as users write them."""

import json
from typing import Any

import pytest

from tests.support.dialects.checklist import condition_text
from tests.support.stack import Stack, gpu_pod, running, vgpu
from tests.support.storage import (
    ZONE,
    Manifest,
    capacity,
    claim,
    driver,
    in_,
    storage_class,
    volume,
)
from tests.support.waiting import until

NAMESPACE = "/api/v1/namespaces/default"
CLAIMS = f"{NAMESPACE}/persistentvolumeclaims"
STORAGE = "/apis/storage.k8s.io/v1"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
SELECTED = "volume.kubernetes.io/selected-node"


async def create(up: Stack, path: str, manifest: Manifest) -> None:
    metadata = manifest["metadata"]
    kept = {key: metadata[key] for key in metadata if key not in {"uid", "namespace"}}
    await up.kube.create(path, {**manifest, "metadata": kept})


async def read_claim(up: Stack, name: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(await up.kube.read(f"{CLAIMS}/{name}"))
    return stored


def with_claim(name: str, claim_name: str, **spec: Any) -> dict[str, Any]:
    volumes = [{"name": "home", "persistentVolumeClaim": {"claimName": claim_name}}]
    return gpu_pod(name, vgpu(memory=1000), volumes=volumes, **spec)


@pytest.fixture(autouse=True)
async def zones(up: Stack) -> None:
    """Node-0 is in zone a, the others are in zone b."""
    for node, zone in (("node-0", "a"), ("node-1", "b"), ("node-2", "b")):
        await up.kubectl("label", "node", node, f"{ZONE}={zone}", "--overwrite")


async def test_a_notebook_runs_again_where_its_home_claim_is(up: Stack) -> None:
    await create(up, CLAIMS, claim("home", storage_class=None))
    await up.create(with_claim("notebook", "home"))
    first = await up.until("notebook", running)
    home = await read_claim(up, "home")
    await up.clear()
    await up.create(with_claim("notebook", "home"))
    again = await up.until("notebook", running)

    assert first["spec"]["schedulerName"] == "volcano"
    assert home["metadata"]["annotations"][SELECTED] == first["spec"]["nodeName"]
    zone = {"node-0": "a", "node-1": "b", "node-2": "b"}
    assert zone[again["spec"]["nodeName"]] == zone[first["spec"]["nodeName"]]
    await up.audit()


async def test_a_pod_waits_for_a_claim_that_does_not_exist_and_runs_once_it_does(
    up: Stack,
) -> None:
    await up.create(with_claim("early", "late"))
    waits = await up.until("early", condition_text)
    await until(lambda: up.leasehold("ps"), lambda listed: "early" in listed.out)
    await create(up, CLAIMS, claim("late", storage_class=None))
    await up.until("early", running)

    missing = '3 persistentvolumeclaim "late" not found. Create it in namespace default'
    assert missing in condition_text(waits)


async def test_a_pod_goes_to_the_zone_that_has_storage(up: Stack) -> None:
    await create(up, f"{STORAGE}/csidrivers", driver("disks.example", storageCapacity=True))
    await create(up, f"{STORAGE}/storageclasses", storage_class("disks", "disks.example"))
    capacities = f"{STORAGE}/namespaces/default/csistoragecapacities"
    await create(up, capacities, capacity("a", "100Gi", {ZONE: "a"}, storage_class="disks"))
    await create(up, CLAIMS, claim("small", storage_class="disks"))
    await create(up, CLAIMS, claim("large", storage_class="disks", size="200Gi"))

    await up.create(with_claim("fits", "small"))
    await up.create(with_claim("too-large", "large"))
    placed = await up.until("fits", running)
    missing = "3 node(s) did not have enough free storage"
    waits = await up.until("too-large", lambda pod: missing in condition_text(pod))

    assert placed["spec"]["nodeName"] == "node-0"
    assert "add storage for PersistentVolumeClaim large" in condition_text(waits)


async def test_a_pod_gets_a_volume_that_is_there(up: Stack) -> None:
    local = storage_class("local", "kubernetes.io/no-provisioner")
    await create(up, f"{STORAGE}/storageclasses", local)
    disk = volume("disk", in_("kubernetes.io/hostname", "node-2"), storage_class="local", driver="")
    disk["spec"]["hostPath"] = {"path": "/data"}
    await create(up, CLAIMS, claim("data", storage_class="local"))
    await up.create(with_claim("trainer", "data"))
    missing = "3 node(s) didn't find available persistent volumes to bind"
    # The watcher may see the pod before its claim, and say so first.
    await up.until("trainer", lambda pod: missing in condition_text(pod))
    await create(up, "/api/v1/persistentvolumes", disk)
    placed = await up.until("trainer", running)

    assert placed["spec"]["nodeName"] == "node-2"
    assert (await read_claim(up, "data"))["spec"]["volumeName"] == "disk"


async def test_each_replica_of_a_statefulset_runs_with_a_claim_of_its_own(up: Stack) -> None:
    template = with_claim("x", "x")
    spec = {key: template["spec"][key] for key in ("schedulerName", "containers")}
    replicas = {
        "metadata": {"name": "worker"},
        "spec": {
            "replicas": 3,
            "serviceName": "worker",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "worker"}},
            "template": {"metadata": {"labels": {"app": "worker"}}, "spec": spec},
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "data"},
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": "1Gi"}},
                    },
                }
            ],
        },
    }

    await up.kube.create(SETS, replicas)
    await up.until_all(3)

    for number in range(3):
        pod = await up.pod(f"worker-{number}")
        stored = await read_claim(up, f"data-worker-{number}")
        assert stored["metadata"]["annotations"][SELECTED] == pod["spec"]["nodeName"]
        assert stored["status"]["phase"] == "Bound"
    await up.kube.delete(f"{SETS}/worker")
    await up.clear()
    await up.audit()
