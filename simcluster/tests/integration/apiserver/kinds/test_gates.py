"""Scheduling gates: set at creation only, taken away one by one, and shown as a condition.

https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/
"""

from typing import Any

import pytest

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.apiserver import MERGE, PODS, Client, a_pod, body_of, create, refusal

STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
JSON_PATCH = {"Content-Type": "application/json-patch+json"}


def gated(*gates: str, **spec: Any) -> Json:
    return a_pod(schedulingGates=[{"name": gate} for gate in gates], **spec)


async def remove_gate(client: Client, gate: str, *, code: int = 200, **meta: str) -> Any:
    deleted = [{"$patch": "delete", "name": gate}]
    patch = {"metadata": meta, "spec": {"schedulingGates": deleted}}
    return await body_of(await client.patch(f"{PODS}/web", json=patch, headers=STRATEGIC), code)


async def test_a_gated_pod_has_its_condition_from_the_beginning(client: Client) -> None:
    made = await create(client, PODS, gated("example.com/a"))

    assert made["status"]["conditions"] == [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        }
    ]


async def test_gates_are_removed_one_by_one_and_the_condition_stays(client: Client) -> None:
    await create(client, PODS, gated("example.com/a", "example.com/b"))

    first = await remove_gate(client, "example.com/a")
    second = await remove_gate(client, "example.com/b")

    assert first["spec"]["schedulingGates"] == [{"name": "example.com/b"}]
    assert not second["spec"].get("schedulingGates")
    assert second["status"]["conditions"][0]["reason"] == "SchedulingGated"


async def test_a_gate_is_removed_from_the_pod_with_that_uid_only(client: Client) -> None:
    await create(client, PODS, gated("example.com/a"))

    await remove_gate(client, "example.com/a", uid="another", code=409)


async def test_no_gate_may_be_added_or_renamed_later(client: Client) -> None:
    await create(client, PODS, gated("example.com/a"))

    for operation in (
        {"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": "example.com/b"}},
        {"op": "replace", "path": "/spec/schedulingGates/0/name", "value": "example.com/b"},
    ):
        answer = await client.patch(f"{PODS}/web", json=[operation], headers=JSON_PATCH)

        message = (await body_of(answer, 422))["message"]
        assert "only deletion is allowed, but found new scheduling gate 'example.com/b'" in message


def affinity(*terms: Json) -> Json:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return {"nodeAffinity": required}


def term(*keys: str) -> Json:
    return {"matchExpressions": [{"key": key, "operator": "Exists"} for key in keys]}


async def change(client: Client, spec: Json, *, code: int = 200) -> Any:
    answer = await client.patch(f"{PODS}/web", json={"spec": spec}, headers=MERGE)
    return await body_of(answer, code)


async def test_a_gated_pod_may_be_restricted_to_fewer_nodes_also_as_its_gate_goes(
    client: Client,
) -> None:
    await create(client, PODS, gated("example.com/a", nodeSelector={"a": "1"}))

    await change(client, {"affinity": affinity(term("x"))})
    await change(client, {"affinity": affinity(term("x", "y"))})
    done = await change(client, {"nodeSelector": {"b": "2"}, "schedulingGates": None})

    assert done["spec"]["nodeSelector"] == {"a": "1", "b": "2"}
    assert done["spec"]["affinity"] == affinity(term("x", "y"))
    late = await change(client, {"nodeSelector": {"c": "3"}}, code=422)
    assert "pod updates may not change fields other than" in late["message"]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"nodeSelector": {"a": "2"}}, "spec.nodeSelector: Invalid value"),
        ({"nodeSelector": {"a": None}}, "spec.nodeSelector: Invalid value"),
        ({"affinity": affinity(term("y"))}, "nodeSelectorTerms[0]: Invalid value"),
        ({"affinity": affinity(term("x"), term("y"))}, "no additions/deletions to non-empty"),
        ({"affinity": None}, "no additions/deletions to non-empty NodeSelectorTerms list"),
        ({"affinity": {"podAffinity": {}}, "hostNetwork": True}, "pod updates may not change"),
    ],
)
async def test_a_gated_pod_may_not_be_released_to_more_nodes(
    client: Client, spec: Json, text: str
) -> None:
    fields = {"nodeSelector": {"a": "1"}, "affinity": affinity(term("x"))}
    await create(client, PODS, gated("example.com/a", **fields))

    assert text in (await change(client, spec, code=422))["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (gated("example.com/a", nodeName="n"), "cannot be set until all schedulingGates have been"),
        (gated("example.com/a", "example.com/a"), 'Duplicate value: "example.com/a"'),
        (gated("not a name!"), 'Invalid value: "not a name!"'),
    ],
)
async def test_invalid_gates_are_refused(client: Client, fields: Json, text: str) -> None:
    assert text in await refusal(client, PODS, fields, code=422)


async def test_a_gated_pod_cannot_be_bound(client: Client) -> None:
    await create(client, PODS, gated("example.com/a"))
    binding = {
        "metadata": {"name": "web"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node-0"},
    }

    message = await refusal(client, f"{PODS}/web/binding", binding, code=409)

    assert "has non-empty .spec.schedulingGates" in message
