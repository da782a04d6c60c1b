"""Bindings: the one write on a pod's way to its node."""

import asyncio
from typing import Any

import pytest

from tests.support.simcluster.apiserver import PODS, ApiUnderTest, Client, create, read, refusal

BINDING = f"{PODS}/web/binding"


@pytest.fixture
async def pod(client: Client) -> Any:
    meta = {"name": "web", "labels": {"app": "web"}, "annotations": {"a": "old", "b": "kept"}}
    spec = {"containers": [{"name": "main", "image": "example/image:1"}]}
    return await create(client, PODS, {"metadata": meta, "spec": spec})


def a_binding(node: str = "node-0", **meta: object) -> dict[str, object]:
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "web", **meta},
        "target": target,
    }


async def test_a_binding_is_one_write_with_node_annotations_and_labels(
    api: ApiUnderTest, client: Client, pod: Any
) -> None:
    binding = a_binding(
        uid=pod["metadata"]["uid"], annotations={"a": "new", "c": "added"}, labels={"zone": "z"}
    )

    assert (await create(client, BINDING, binding))["status"] == "Success"

    bound = api.store.read("pods", "default", "web")
    assert bound["spec"]["nodeName"] == "node-0"
    assert bound["metadata"]["annotations"] == {"a": "new", "b": "kept", "c": "added"}
    assert bound["metadata"]["labels"] == {"app": "web", "zone": "z"}
    condition = bound["status"]["conditions"][0]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
    writes = await read(client, "/debug/writes?prefix=pods/default/web")
    assert writes == {"pods/default/web": {"create": 1, "create/binding": 1}}
    assert int(bound["metadata"]["resourceVersion"]) == int(pod["metadata"]["resourceVersion"]) + 1


async def test_a_second_binding_is_a_conflict_even_to_the_same_node(
    client: Client, pod: Any
) -> None:
    await client.post(BINDING, json=a_binding())

    again = await refusal(client, BINDING, a_binding(), code=409)

    assert 'already assigned to node "node-0"' in again
    writes = await read(client, "/debug/writes?prefix=pods/default/web")
    assert writes["pods/default/web"]["POST binding refused 409"] == 1


async def test_one_of_many_concurrent_bindings_succeeds(
    api: ApiUnderTest, client: Client, pod: Any
) -> None:
    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(client.post(BINDING, json=a_binding(f"node-{number}")))
            for number in range(20)
        ]

    codes = sorted(answer.result().status for answer in answers)
    assert codes == [201] + [409] * 19
    assert api.store.writes.counts("pods", "default/web")["create/binding"] == 1


async def test_a_binding_for_another_uid_is_a_conflict(client: Client, pod: Any) -> None:
    message = await refusal(client, BINDING, a_binding(uid="another"), code=409)

    assert "Precondition failed: UID" in message


async def test_a_pod_being_deleted_or_missing_is_not_bound(
    api: ApiUnderTest, client: Client, pod: Any
) -> None:
    api.store.patch("pods", "default", "web", {"metadata": {"finalizers": ["example.com/hold"]}})
    api.store.delete("pods", "default", "web")

    deleted = await refusal(client, BINDING, a_binding(), code=409)
    await refusal(client, f"{PODS}/none/binding", a_binding(name="none"), code=404)

    assert "is being deleted" in deleted


async def test_the_bindings_collection_binds_as_well(
    api: ApiUnderTest, client: Client, pod: Any
) -> None:
    await create(client, "/api/v1/namespaces/default/bindings", a_binding())

    assert api.store.read("pods", "default", "web")["spec"]["nodeName"] == "node-0"


async def test_a_binding_without_a_node_is_invalid(client: Client, pod: Any) -> None:
    await refusal(client, BINDING, a_binding(""), code=422)


async def test_a_dry_run_binds_nothing(api: ApiUnderTest, client: Client, pod: Any) -> None:
    await create(client, f"{BINDING}?dryRun=All", a_binding())

    assert "nodeName" not in api.store.read("pods", "default", "web")["spec"]
