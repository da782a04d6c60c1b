"""In-place resizes by the subresource `resize`, as kubectl and the kubelet do them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.settings import NodeSettings
from tests.support.simcluster.kubelet import Node, container, one_kubelet, pod
from tests.support.waiting import until


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with one_kubelet(NodeSettings(cpu="4", memory="8Gi")) as started:
        yield started


def with_cpu(name: str, cpu: str) -> Json:
    resources = {"requests": {"cpu": cpu, "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    return pod(name, containers=[container("main") | {"resources": resources}])


def resize(node: Node, name: str, **resources: Any) -> Json:

    def changed(obj: Json) -> Json:
        own = obj["spec"]["containers"][0]["resources"]
        for kind, amounts in resources.items():
            own[kind] = {**own.get(kind, {}), **amounts}
        return obj

    return node.store.patch("pods", "default", name, changed, subresource="resize")


def shown(node: Node, name: str) -> Json:
    status: Json = node.pod(name)["status"]["containerStatuses"][0]
    return status


def pending(node: Node, name: str) -> tuple[str, str] | None:
    conditions = {
        condition["type"]: condition for condition in node.pod(name)["status"]["conditions"]
    }
    pending = conditions.get("PodResizePending")
    return None if pending is None else (pending["reason"], pending["message"])


async def test_a_running_container_gets_its_changed_resources(node: Node) -> None:
    node.create(with_cpu("one", "1"))
    before = await node.phase("one", "Running")
    assert shown(node, "one")["resources"]["requests"]["cpu"] == "1"

    after = resize(node, "one", requests={"cpu": "2"}, limits={"cpu": "3"})
    await until(lambda: shown(node, "one")["resources"]["limits"].get("cpu") == "3")

    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    assert shown(node, "one")["allocatedResources"]["cpu"] == "2"
    assert shown(node, "one")["restartCount"] == 0
    assert pending(node, "one") is None


async def test_a_resize_waits_for_room_and_one_beyond_the_node_never_happens(node: Node) -> None:
    for name in ("one", "other"):
        node.create(with_cpu(name, "2"))
        await node.phase(name, "Running")

    resize(node, "one", requests={"cpu": "3"})
    waits = await until(lambda: pending(node, "one"))
    resize(node, "other", requests={"cpu": "5"})
    never = await until(lambda: pending(node, "other"))
    node.store.delete("pods", "default", "other", grace_s=0)
    await until(lambda: shown(node, "one")["resources"]["requests"]["cpu"] == "3")

    assert waits[0] == "Deferred"
    assert "cpu, requested: 3000, used: 2000, capacity: 4000" in waits[1]
    capacity = "Node didn't have enough capacity: cpu, requested: 5000, capacity: 4000"
    assert never == ("Infeasible", capacity)
    assert pending(node, "one") is None


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"limits": {"example.com/gpu": "1"}}, "only cpu and memory resources are mutable"),
        ({"requests": {"cpu": "1", "memory": "2Gi"}}, "must be less than or equal to memory limit"),
        ({"limits": {"cpu": "1"}}, "Pod QOS Class may not change as a result of resizing"),
    ],
)
async def test_what_cannot_be_resized_is_refused(node: Node, resources: Json, text: str) -> None:
    node.create(with_cpu("one", "1"))

    with pytest.raises(ApiError, match=text):
        resize(node, "one", **resources)


async def test_the_subresource_changes_resources_only(node: Node) -> None:
    node.create(with_cpu("one", "1"))

    def changed(obj: Json) -> Json:
        obj["spec"]["nodeName"] = "elsewhere"
        obj["metadata"]["labels"] = {"a": "b"}
        obj["spec"]["containers"][0]["image"] = "other"
        obj["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
        return obj

    after = node.store.patch("pods", "default", "one", changed, subresource="resize")

    assert after["spec"]["containers"][0]["image"] == "app"
    assert after["spec"]["nodeName"] == "node-0"
    assert "labels" not in after["metadata"]
    assert after["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "2"
