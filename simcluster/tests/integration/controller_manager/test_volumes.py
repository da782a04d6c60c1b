"""Volumes of the simulated cluster are bound where a pod runs, and pods where their volumes are."""

from collections.abc import AsyncIterator

import pytest_asyncio

from simcluster.apimachinery.objects import Json, at_path, name_of
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.simcluster.workloads import workload_cluster
from tests.support.waiting import until

PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[ApiUnderTest]:
    async with workload_cluster(nodes=2) as api:
        yield api


def claim(name: str, kind: str) -> Json:
    wanted = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": kind, "resources": wanted}
    return {"metadata": {"name": name}, "spec": spec}


def pod(name: str, used: str, **spec: object) -> Json:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": used}}]
    containers = [{"name": "main", "image": "app", "command": ["sleep", "1000"]}]
    return {
        "metadata": {"name": name},
        "spec": {"containers": containers, "volumes": volumes, **spec},
    }


async def create(api: ApiUnderTest, path: str, obj: Json) -> None:
    async with api.client() as client:
        answer = await client.post(path, json=obj)
        assert answer.status == 201, await answer.text()


def found(api: ApiUnderTest, table: str, name: str) -> Json:
    return next(obj for obj in api.store.list(table) if name_of(obj) == name)


async def storage_class(api: ApiUnderTest, mode: str) -> None:
    kind = {
        "metadata": {"name": "disks"},
        "provisioner": "disks.example",
        "volumeBindingMode": mode,
    }
    await create(api, CLASSES, kind)


async def test_a_volume_waits_for_its_first_pod_and_keeps_the_next_on_its_node(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "WaitForFirstConsumer")
    await create(cluster, CLAIMS, claim("data", "disks"))
    on_second = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
    await create(cluster, PODS, pod("first", "data", **on_second))

    await until(lambda: at_path(found(cluster, "pods", "first"), "spec.nodeName") == "node-1")
    bound = found(cluster, "persistentvolumeclaims", "data")
    assert at_path(bound, "status.phase") == "Bound"
    assert bound["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] == "node-1"
    await create(cluster, PODS, pod("second", "data"))
    await until(lambda: at_path(found(cluster, "pods", "second"), "spec.nodeName") == "node-1")
    elsewhere = {"nodeSelector": {"kubernetes.io/hostname": "node-0"}}
    await create(cluster, PODS, pod("third", "data", **elsewhere))
    third = await until(
        lambda: found(cluster, "pods", "third"), lambda pod: at_path(pod, "status.conditions")
    )
    text = third["status"]["conditions"][0]["message"]
    assert "node(s) didn't match PersistentVolume's node affinity" in text


async def test_an_immediate_volume_is_bound_without_a_pod_and_deleted_with_its_claim(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "Immediate")
    await create(cluster, CLAIMS, claim("data", "disks"))

    await until(
        lambda: at_path(found(cluster, "persistentvolumeclaims", "data"), "status.phase") == "Bound"
    )
    await create(cluster, PODS, pod("first", "data"))
    await until(lambda: at_path(found(cluster, "pods", "first"), "spec.nodeName"))
    async with cluster.client() as client:
        await client.delete(f"{PODS}/first")
        await client.delete(f"{CLAIMS}/data")
    await until(lambda: not cluster.store.list("persistentvolumes"))


async def test_a_pod_waits_for_a_claim_that_does_not_exist(cluster: ApiUnderTest) -> None:
    await create(cluster, PODS, pod("first", "data"))

    waiting = await until(
        lambda: found(cluster, "pods", "first"), lambda pod: at_path(pod, "status.conditions")
    )

    text = waiting["status"]["conditions"][0]["message"]
    assert text == '0/2 nodes are available: 2 persistentvolumeclaim "data" not found.'
