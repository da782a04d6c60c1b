"""Pods with claims, from admission to deletion, on a real API server with its controllers."""

import asyncio

import pytest

from shared.pods.storage import SELECTED_NODE
from tests.real.control_plane import missing
from tests.real.disks import FAILURE
from tests.real.leasehold import Leasehold, Namespace, claim_spec, pod_spec
from tests.real.node_parts import NODES
from tests.support.storage import HOSTNAME, ZONE, in_, required
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

ZONES = {name: labels[ZONE] for name, labels in NODES.items()}
PODS = 300
AT_ONCE = 16


async def removed(namespace: Namespace) -> None:
    await namespace.delete_pods()
    await namespace.delete_claims()


@pytest.mark.parametrize("storage_class", ["disks", "zonal", "files", "at-once"])
async def test_a_pod_gets_a_volume_where_it_runs(up: Leasehold, storage_class: str) -> None:
    namespace = await up.add_namespace(f"kind-{storage_class}")
    await namespace.claim("data", storage_class)

    await namespace.pod("train", "data")
    await namespace.until_running(1)

    await namespace.check("data")
    await removed(namespace)


async def test_an_ephemeral_volume_is_made_for_its_pod_and_ends_with_it(up: Leasehold) -> None:
    namespace = await up.add_namespace("ephemeral")

    await namespace.pod("train", ephemeral="disks")
    await namespace.until_running(1)

    await namespace.check("train-scratch")
    await namespace.delete_pods()
    await until(lambda: namespace.objects("persistentvolumeclaims"), lambda left: not left)


async def test_a_local_volume_leads_the_pod_to_its_node(up: Leasehold) -> None:
    namespace = await up.add_namespace("local")
    path = "/apis/storage.k8s.io/v1/storageclasses"
    await up.plane.create(
        path,
        {
            "metadata": {"name": "local"},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
    )
    spec = {
        "capacity": {"storage": "2Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "local": {"path": "/mnt/disk"},
        "nodeAffinity": required(in_(HOSTNAME, "b-1")),
    }
    await up.plane.create("/api/v1/persistentvolumes", {"metadata": {"name": "disk"}, "spec": spec})
    await namespace.claim("data", "local")

    await namespace.pod("train", "data")

    assert await namespace.until_running(1) == {"train": "b-1"}
    await namespace.check("data")
    await removed(namespace)


async def test_a_claim_of_one_pod_keeps_the_second_one_waiting(up: Leasehold) -> None:
    namespace = await up.add_namespace("one-pod")
    await namespace.claim("data", "disks", mode="ReadWriteOncePod")
    await namespace.pod("first", "data")
    await namespace.until_running(1)

    await namespace.pod("second", "data")
    await namespace.until_waits("second", "ReadWriteOncePod", "already in use")
    await up.plane.kube.delete(f"{namespace.path('pods')}/first")

    await until(namespace.nodes, lambda nodes: set(nodes) == {"second"})
    await removed(namespace)


async def test_pods_wait_with_a_reason_for_what_is_missing(up: Leasehold) -> None:
    namespace = await up.add_namespace("missing")

    await namespace.pod("train", "data")
    await namespace.claim("far", "elsewhere")
    await namespace.pod("far", "far")
    await namespace.until_waits("train", 'persistentvolumeclaim "data" not found')
    await namespace.until_waits("far", "didn't find available persistent volumes to bind")
    await namespace.claim("data", "disks")
    await namespace.until_running(1)

    assert set(await up.leases()) == {"train"}
    await removed(namespace)


async def test_each_pod_of_a_stateful_set_keeps_its_claim(up: Leasehold) -> None:
    namespace = await up.add_namespace("stateful")
    spec = pod_spec(())
    del spec["volumes"]
    template = {"metadata": {"labels": {"app": "db"}}, "spec": spec}
    await up.plane.create(
        namespace.path("statefulsets"),
        {
            "metadata": {"name": "db"},
            "spec": {
                "replicas": 2,
                "serviceName": "db",
                "selector": {"matchLabels": {"app": "db"}},
                "template": template,
                "volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": claim_spec("disks")}],
            },
        },
    )
    before = await namespace.until_running(2)
    await namespace.check("v-db-0", "v-db-1")

    await up.plane.kube.delete(f"{namespace.path('pods')}/db-0")

    await until(namespace.nodes, lambda nodes: "db-0" not in nodes)
    assert await namespace.until_running(2) == before
    await up.plane.kube.delete(f"{namespace.path('statefulsets')}/db")
    await removed(namespace)


async def test_a_gang_gets_a_volume_for_each_pod_where_it_runs(up: Leasehold) -> None:
    namespace = await up.add_namespace("own-claims")
    names = [f"train-{number}" for number in range(8)]
    for name in names:
        await namespace.claim(name, "disks")

    for name in names:
        await namespace.pod(name, name, gang=8)
    await namespace.until_running(8)

    await namespace.check(*names)
    await removed(namespace)


@pytest.mark.parametrize("storage_class", ["files", "zonal"])
async def test_a_gang_shares_a_claim_that_waits_for_its_first_pod(
    up: Leasehold, storage_class: str
) -> None:
    namespace = await up.add_namespace(f"shared-{storage_class}")
    await namespace.claim("data", storage_class, mode="ReadWriteMany")

    for number in range(8):
        await namespace.pod(f"train-{number}", "data", gang=8, gpus=1, memory=30_000)
    nodes = await namespace.until_running(8)

    assert storage_class == "files" or len({ZONES[node] for node in nodes.values()}) == 1
    await namespace.check("data")
    await removed(namespace)


async def test_pods_go_where_the_provisioner_has_space_left(up: Leasehold) -> None:
    namespace = await up.add_namespace("scarce")
    names = [f"train-{number}" for number in range(3)]
    for name in names:
        await namespace.claim(name, "scarce")
        await namespace.pod(name, name)

    nodes = await namespace.until_running(3)

    assert set(nodes.values()) == {"b-1"}
    await namespace.check(*names)
    await removed(namespace)


async def test_a_pod_whose_volume_cannot_be_made_gives_its_lease_back(up: Leasehold) -> None:
    namespace = await up.add_namespace("never")
    await namespace.claim("data", "none")

    await namespace.pod("train", "data")
    await namespace.until_waits("train", FAILURE)
    await namespace.delete_pods()

    await until(lambda: selected_nodes(namespace), lambda nodes: nodes == {"data": ""})
    await removed(namespace)


async def test_kills_leave_no_pod_without_volume_and_nothing_behind(up: Leasehold) -> None:
    namespace = await up.add_namespace("many")
    names = [f"train-{number}" for number in range(PODS)]
    slots = asyncio.Semaphore(AT_ONCE)

    async def create(name: str) -> None:
        async with slots:
            await namespace.claim(name, "disks")
            await namespace.pod(name, name)

    async def kill() -> None:
        for number, service in enumerate(["binder", "watcher"] * 3):
            await until_at_least(namespace, 40 * number)
            up.kill(service)

    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(create(name))
        tasks.create_task(kill())
    await namespace.until_running(PODS, limit_s=600.0)

    await namespace.check(*names)
    await removed(namespace)
    assert not await up.leases()


async def until_at_least(namespace: Namespace, count: int) -> None:
    await until(namespace.nodes, lambda nodes: len(nodes) >= count, limit_s=600.0)


async def selected_nodes(namespace: Namespace) -> dict[str, str]:
    """Return the node that is selected for each claim."""
    claims = await namespace.objects("persistentvolumeclaims")
    return {
        name: claim["metadata"].get("annotations", {}).get(SELECTED_NODE, "")
        for name, claim in claims.items()
    }
