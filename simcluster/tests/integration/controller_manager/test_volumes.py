"""Volumes of the simulated cluster are bound where a pod runs, and pods where their volumes are."""

from collections.abc import AsyncIterator

import pytest_asyncio

from simcluster.apimachinery.objects import Json, at_path, name_of
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.simcluster.workloads import workload_cluster
from tests.support.waiting import until

PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
PHASE = "status.phase"
ON_NODE_1 = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[ApiUnderTest]:
    async with workload_cluster(nodes=2) as api:
        yield api


def claim(name: str, kind: str, *, mode: str = "ReadWriteOnce") -> Json:
    wanted = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": [mode], "storageClassName": kind, "resources": wanted}
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


async def storage_class(api: ApiUnderTest, mode: str, **fields: object) -> None:
    kind = {
        "metadata": {"name": "disks"},
        "provisioner": "disks.example",
        "volumeBindingMode": mode,
        **fields,
    }
    await create(api, CLASSES, kind)


def static_volume(name: str, size: str, node: str, **spec: object) -> Json:
    reach = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [reach]}]}
    return {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "disks",
            "local": {"path": "/disks/1"},
            "nodeAffinity": {"required": terms},
            **spec,
        },
    }


async def bound_volume(api: ApiUnderTest, name: str) -> str:
    await until(lambda: at_path(found(api, "persistentvolumeclaims", name), PHASE) == "Bound")
    return str(at_path(found(api, "persistentvolumeclaims", name), "spec.volumeName"))


def events_about(api: ApiUnderTest, name: str) -> set[str]:
    return {
        event["reason"]
        for event in api.store.list("events")
        if at_path(event, "involvedObject.name") == name
    }


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


async def test_a_volume_for_many_nodes_is_reached_from_all_of_them(cluster: ApiUnderTest) -> None:
    await storage_class(cluster, "WaitForFirstConsumer")
    await create(cluster, CLAIMS, claim("data", "disks", mode="ReadWriteMany"))
    on_node_0 = {"nodeSelector": {"kubernetes.io/hostname": "node-0"}}

    await create(cluster, PODS, pod("first", "data", **on_node_0))
    await create(cluster, PODS, pod("second", "data", **ON_NODE_1))

    await until(lambda: at_path(found(cluster, "pods", "first"), "spec.nodeName") == "node-0")
    await until(lambda: at_path(found(cluster, "pods", "second"), "spec.nodeName") == "node-1")
    volume = found(cluster, "persistentvolumes", await bound_volume(cluster, "data"))
    assert "nodeAffinity" not in volume["spec"]


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


async def test_the_smallest_free_volume_that_fits_is_bound_without_a_provisioner(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "Immediate", provisioner="kubernetes.io/no-provisioner")
    for name, size in (("large", "9Gi"), ("fits", "2Gi"), ("small", "1Mi")):
        await create(cluster, VOLUMES, static_volume(name, size, "node-0"))
    await until(lambda: at_path(found(cluster, "persistentvolumes", "fits"), PHASE) == "Available")
    await create(cluster, CLAIMS, claim("data", "disks"))

    assert await bound_volume(cluster, "data") == "fits"


async def test_a_local_volume_waits_for_a_pod_and_is_the_one_of_its_node(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "WaitForFirstConsumer", provisioner="kubernetes.io/no-provisioner")
    await create(cluster, VOLUMES, static_volume("small", "1Gi", "node-0"))
    await create(cluster, VOLUMES, static_volume("large", "9Gi", "node-1"))
    await create(cluster, CLAIMS, claim("data", "disks"))
    await until(lambda: "WaitForFirstConsumer" in events_about(cluster, "data"))
    await create(cluster, PODS, pod("first", "data", **ON_NODE_1))

    assert await bound_volume(cluster, "data") == "large"
    await until(lambda: at_path(found(cluster, "pods", "first"), "spec.nodeName") == "node-1")


async def test_claims_and_volumes_that_name_each_other_wait_for_each_other(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "WaitForFirstConsumer")
    reserved = {"namespace": "default", "name": "data"}
    await create(cluster, VOLUMES, static_volume("reserved", "1Gi", "node-0", claimRef=reserved))
    await create(cluster, VOLUMES, static_volume("named", "1Gi", "node-0"))
    names_a_volume = claim("other", "disks")
    names_a_volume["spec"]["volumeName"] = "named"
    await create(cluster, CLAIMS, claim("data", "disks"))
    await create(cluster, CLAIMS, names_a_volume)

    assert await bound_volume(cluster, "data") == "reserved"
    assert await bound_volume(cluster, "other") == "named"
    assert at_path(found(cluster, "persistentvolumes", "reserved"), "spec.claimRef.uid")


async def test_a_provisioner_that_fails_for_a_node_has_another_one_selected(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "WaitForFirstConsumer", parameters={"fails-on": "node-1"})
    await create(cluster, CLAIMS, claim("data", "disks"))
    path = f"{CLAIMS}/data"
    merge = {"Content-Type": "application/merge-patch+json"}
    key = "volume.kubernetes.io/selected-node"
    async with cluster.client() as client:
        for node in ("node-1", "node-0"):
            body = {"metadata": {"annotations": {key: node}}}
            await client.patch(path, json=body, headers=merge)
            if node == "node-1":
                await until(lambda: "ProvisioningFailed" in events_about(cluster, "data"))
                failed = found(cluster, "persistentvolumeclaims", "data")
                assert key not in failed["metadata"]["annotations"]

    volume = await bound_volume(cluster, "data")
    reach = at_path(found(cluster, "persistentvolumes", volume), "spec.nodeAffinity.required")
    assert reach["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == ["node-0"]


async def test_a_volume_is_provisioned_in_an_allowed_topology_alone(cluster: ApiUnderTest) -> None:
    expression = {"key": "kubernetes.io/hostname", "values": ["node-1"]}
    await storage_class(
        cluster,
        "WaitForFirstConsumer",
        allowedTopologies=[{"matchLabelExpressions": [expression]}],
    )
    await create(cluster, CLAIMS, claim("data", "disks"))
    await create(cluster, PODS, pod("first", "data"))

    await until(lambda: at_path(found(cluster, "pods", "first"), "spec.nodeName") == "node-1")


async def test_a_claim_in_use_is_deleted_after_its_pod_and_a_retained_volume_stays(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "Immediate", reclaimPolicy="Retain")
    await create(cluster, CLAIMS, claim("data", "disks"))
    await create(cluster, PODS, pod("first", "data"))
    volume = await bound_volume(cluster, "data")
    await until(lambda: at_path(found(cluster, "pods", "first"), PHASE) == "Running")
    async with cluster.client() as client:
        await client.delete(f"{CLAIMS}/data")
        await client.delete(f"{VOLUMES}/{volume}")
        await until(
            lambda: "deletionTimestamp" in found(cluster, "persistentvolumes", volume)["metadata"]
        )
        assert found(cluster, "persistentvolumeclaims", "data")["metadata"]["deletionTimestamp"]
        await client.delete(f"{PODS}/first")
    await until(lambda: not cluster.store.list("persistentvolumeclaims"))
    await until(lambda: not cluster.store.list("persistentvolumes"))

    await create(cluster, CLAIMS, claim("data", "disks"))
    volume = await bound_volume(cluster, "data")
    async with cluster.client() as client:
        await client.delete(f"{CLAIMS}/data")
    await until(lambda: at_path(found(cluster, "persistentvolumes", volume), PHASE) == "Released")


async def test_an_ephemeral_volume_has_a_claim_that_ends_with_its_pod(
    cluster: ApiUnderTest,
) -> None:
    await storage_class(cluster, "WaitForFirstConsumer")
    template = {"metadata": {"labels": {"app": "scratch"}}, "spec": claim("", "disks")["spec"]}
    scratch = pod("first", "")
    scratch["spec"]["volumes"] = [{"name": "data", "ephemeral": {"volumeClaimTemplate": template}}]
    await create(cluster, PODS, scratch)

    await until(lambda: at_path(found(cluster, "pods", "first"), PHASE) == "Running")
    own = found(cluster, "persistentvolumeclaims", "first-data")
    assert own["metadata"]["labels"] == {"app": "scratch"}
    async with cluster.client() as client:
        await client.delete(f"{PODS}/first")
    await until(lambda: not cluster.store.list("persistentvolumeclaims"))
    await until(lambda: not cluster.store.list("persistentvolumes"))


async def test_containers_start_after_their_claims_are_bound(cluster: ApiUnderTest) -> None:
    await storage_class(cluster, "Immediate", parameters={"delay": "1000"})
    await create(cluster, CLAIMS, claim("data", "disks"))
    await create(cluster, PODS, pod("first", "data", nodeName="node-0"))

    await until(lambda: "FailedMount" in events_about(cluster, "first"))
    assert at_path(found(cluster, "pods", "first"), PHASE) == "Pending"
    reserved = {"namespace": "default", "name": "data"}
    await create(cluster, VOLUMES, static_volume("reserved", "1Gi", "node-0", claimRef=reserved))
    await until(lambda: at_path(found(cluster, "pods", "first"), PHASE) == "Running")


async def test_storage_has_the_kinds_of_drivers_and_their_capacity(cluster: ApiUnderTest) -> None:
    group = "/apis/storage.k8s.io/v1"
    driver = {"name": "disks.example", "nodeID": "a", "topologyKeys": []}
    capacity = {"metadata": {"name": "a"}, "storageClassName": "disks", "capacity": "1Gi"}
    attached = {
        "attacher": "disks.example",
        "nodeName": "node-0",
        "source": {"persistentVolumeName": "a"},
    }
    await create(
        cluster, f"{group}/csinodes", {"metadata": {"name": "x"}, "spec": {"drivers": [driver]}}
    )
    await create(
        cluster,
        f"{group}/csidrivers",
        {"metadata": {"name": "disks.example"}, "spec": {"storageCapacity": True}},
    )
    await create(cluster, f"{group}/namespaces/default/csistoragecapacities", capacity)
    await create(
        cluster, f"{group}/volumeattachments", {"metadata": {"name": "a"}, "spec": attached}
    )
    status = {"status": {"attached": True}}
    async with cluster.client() as client:
        answer = await client.patch(
            f"{group}/volumeattachments/a/status",
            json=status,
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert (await answer.json())["status"] == {"attached": True}
        unknown = {"metadata": {"name": "y"}, "spec": {"driver": []}}
        strict = await client.post(f"{group}/csinodes?fieldValidation=Strict", json=unknown)
        assert strict.status == 400
