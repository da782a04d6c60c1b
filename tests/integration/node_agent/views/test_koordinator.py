"""The Koordinator dialect on a node: real sockets, a simulated kubelet, a kind of its own."""

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.node_agent.isolation.library import simulated_library
from shared.model.leases.lease import RequestedUnits
from shared.model.names import NodeName
from shared.model.requests.request import SharingPolicy
from simcluster.apimachinery.objects import Json
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import OneNodeCluster, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

SHARED = "koordinator.sh/gpu.shared"
ISOLATION = "koordinator.sh/gpu-isolation-provider"
CRD = Path(__file__).parents[4] / "k8s/base/crds/koordinator-device.yaml"
T4_MIB = 15360
RATE = 100
"""Of the agent's clock."""


@pytest.fixture
async def cluster() -> AsyncIterator[OneNodeCluster]:
    async with one_node_cluster("2xT4", rate=RATE) as started:
        yield started


def bind(cluster: OneNodeCluster, name: str) -> None:
    """Bind a pod with half a T4."""
    known = {
        "cores_percent": 50,
        "slots": 100,
        "device_mib": T4_MIB,
        "requested_units": RequestedUnits(memory_mib=T4_MIB // 2, memory_percent=50),
        "sharing": SharingPolicy.SHARED,
    }
    own = share(0, T4_MIB // 2, **known)
    cluster.bind(pod(name, limits={SHARED: 1}), own, dialect="koordinator")


def labels(cluster: OneNodeCluster) -> dict[str, str]:
    found: dict[str, str] = cluster.node.node()["metadata"].get("labels", {})
    return found


def define(cluster: OneNodeCluster) -> None:
    cluster.api.store.create("customresourcedefinitions", yaml.safe_load(CRD.read_text()))


def shown(cluster: OneNodeCluster) -> Json | None:
    found = cluster.api.store.find("devices.scheduling.koordinator.sh", None, NODE)
    return found.obj if found is not None else None


async def test_koordinator_29_the_label_exists_only_while_the_library_does(
    cluster: OneNodeCluster,
) -> None:
    library = simulated_library(cluster.settings.library_root).path
    async with cluster.running():
        await until(lambda: labels(cluster).get(ISOLATION) == "HAMi-core")
        library.unlink()
        await until(lambda: ISOLATION not in labels(cluster))
        library.touch()
        await until(lambda: labels(cluster).get(ISOLATION) == "HAMi-core")

    assert labels(cluster)["node.koordinator.sh/gpu-vendor"] == "nvidia"
    assert labels(cluster)["node.koordinator.sh/gpu-model"] == "Tesla-T4"


async def test_koordinator_30_a_container_that_cannot_be_limited_does_not_start(
    cluster: OneNodeCluster,
) -> None:
    library = simulated_library(cluster.settings.library_root).path
    async with cluster.running():
        library.unlink()
        library.mkdir()
        bind(cluster, "one")
        await cluster.node.phase("one", "Failed")
        text = cluster.message("one")

    assert "libvgpu.so" in text


async def test_koordinator_21_the_device_object_is_created_with_its_kind_and_recreated(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running():
        await until(lambda: labels(cluster).get("node.koordinator.sh/gpu-vendor"))
        define(cluster)
        first = await until(lambda: shown(cluster))
        cluster.api.store.delete("devices.scheduling.koordinator.sh", None, NODE)
        again = await until(lambda: shown(cluster))

    assert first["metadata"]["uid"] != again["metadata"]["uid"]
    assert first["spec"] == again["spec"]
    assert [one["id"] for one in again["spec"]["devices"]] == [
        uuid_of(NodeName(NODE), index) for index in (0, 1)
    ]
    owner = again["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("Node", cluster.node.node()["metadata"]["uid"])


async def test_koordinator_20_an_unhealthy_gpu_has_a_condition_with_its_transition_time(
    cluster: OneNodeCluster,
) -> None:
    define(cluster)

    def condition(index: int) -> Json | None:
        device = (shown(cluster) or {"spec": {"devices": [{}, {}]}})["spec"]["devices"][index]
        found: Json | None = next(iter(device.get("conditions", ())), None)
        return found

    async with cluster.running():
        await until(lambda: shown(cluster))
        cluster.inject(gpu0="unhealthy")
        first = await until(lambda: condition(0))
        cluster.inject(gpu0="unhealthy", gpu1="unhealthy")
        await until(lambda: condition(1))
        later = condition(0)
        cluster.inject()
        await until(lambda: condition(0) is None and condition(1) is None)

    assert (first["type"], first["status"]) == ("Healthy", "False")
    assert later is not None
    assert later["lastTransitionTime"] == first["lastTransitionTime"]


async def test_the_device_object_is_written_only_on_change_and_keeps_others_fields(
    cluster: OneNodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(cluster)
    paths: list[str] = []
    async with cluster.running() as agent:
        found = copy.deepcopy(await until(lambda: shown(cluster)))
        found["metadata"].setdefault("labels", {})["team"] = "a"
        found["metadata"]["annotations"] = {"note": "b"}
        cluster.api.store.update("devices.scheduling.koordinator.sh", found)
        before = await until(
            lambda: (one := shown(cluster)) and "note" in one["metadata"]["annotations"] and one
        )
        read = agent.node.kubernetes.read

        async def counted(path: str, *kind: Any) -> Any:
            paths.append(path)
            return await read(path, *kind)

        monkeypatch.setattr(agent.node.kubernetes, "read", counted)
        await until(lambda: sum("devices/" in path for path in paths) > 3)
        after = shown(cluster)
        cluster.inject(gpu0="unhealthy")
        changed = await until(
            lambda: (one := shown(cluster)) and not one["spec"]["devices"][0]["health"] and one
        )

    assert after == before
    assert changed["metadata"]["labels"]["team"] == "a"
    assert changed["metadata"]["annotations"] == {"note": "b"}
