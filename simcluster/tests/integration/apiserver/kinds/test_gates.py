"""Scheduling gates: set at creation only, taken away one by one, and shown as a condition.

https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/
"""

from typing import Any

import pytest

from tests.support.simcluster.apiserver import Client

PODS = "/api/v1/namespaces/default/pods"
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
JSON_PATCH = {"Content-Type": "application/json-patch+json"}


def pod(*gates: str, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "web"},
        "spec": {
            "containers": [{"name": "main", "image": "app"}],
            "schedulingGates": [{"name": gate} for gate in gates],
            **spec,
        },
    }


async def create(client: Client, obj: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(PODS, json=obj) as answer:
        return answer.status, await answer.json()


async def remove_gate(client: Client, gate: str, **meta: str) -> tuple[int, Any]:
    deleted = [{"$patch": "delete", "name": gate}]
    patch = {"metadata": meta, "spec": {"schedulingGates": deleted}}
    async with client.patch(f"{PODS}/web", json=patch, headers=STRATEGIC) as answer:
        return answer.status, await answer.json()


async def test_a_gated_pod_has_its_condition_from_the_beginning(client: Client) -> None:
    status, made = await create(client, pod("example.com/a"))

    assert status == 201
    assert made["status"]["conditions"] == [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        }
    ]


async def test_gates_are_removed_one_by_one_and_the_condition_stays(client: Client) -> None:
    await create(client, pod("example.com/a", "example.com/b"))

    _, first = await remove_gate(client, "example.com/a")
    _, second = await remove_gate(client, "example.com/b")

    assert first["spec"]["schedulingGates"] == [{"name": "example.com/b"}]
    assert not second["spec"].get("schedulingGates")
    assert second["status"]["conditions"][0]["reason"] == "SchedulingGated"


async def test_a_gate_is_removed_from_the_pod_with_that_uid_only(client: Client) -> None:
    await create(client, pod("example.com/a"))

    status, body = await remove_gate(client, "example.com/a", uid="another")

    assert status == 409, body


async def test_no_gate_may_be_added_or_renamed_later(client: Client) -> None:
    await create(client, pod("example.com/a"))

    for operation in (
        {"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": "example.com/b"}},
        {"op": "replace", "path": "/spec/schedulingGates/0/name", "value": "example.com/b"},
    ):
        async with client.patch(f"{PODS}/web", json=[operation], headers=JSON_PATCH) as answer:
            body = await answer.json()

        assert answer.status == 422
        assert (
            "only deletion is allowed, but found new scheduling gate 'example.com/b'"
            in (body["message"])
        )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (pod("example.com/a", nodeName="n"), "cannot be set until all schedulingGates have been"),
        (pod("example.com/a", "example.com/a"), 'Duplicate value: "example.com/a"'),
        (pod("not a name!"), 'Invalid value: "not a name!"'),
    ],
)
async def test_invalid_gates_are_refused(client: Client, fields: dict[str, Any], text: str) -> None:
    status, body = await create(client, fields)

    assert status == 422
    assert text in body["message"]


async def test_a_gated_pod_cannot_be_bound(client: Client) -> None:
    await create(client, pod("example.com/a"))
    binding = {
        "metadata": {"name": "web"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node-0"},
    }

    async with client.post(f"{PODS}/web/binding", json=binding) as answer:
        body = await answer.json()

    assert answer.status == 409
    assert "has non-empty .spec.schedulingGates" in body["message"]
