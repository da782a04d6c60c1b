"""Custom kinds over HTTP: what a definition serves, how its objects are checked and written."""

import json

import pytest

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.apiserver import (
    MERGE,
    ApiUnderTest,
    Client,
    body_of,
    create,
    merge,
    read,
)
from tests.support.simcluster.custom_kinds import (
    APPLY,
    DEFINITIONS,
    DEVICE_LIST,
    GROUPS,
    TABLE,
)
from tests.support.simcluster.definitions import definition, device, pod_group


async def test_an_object_is_completed_and_pruned(client: Client) -> None:
    made = await client.post(GROUPS, json=pod_group("gang", surprise=1))

    created = await body_of(made, 201)
    assert created["spec"] == {"minMember": 2, "queue": "default"}
    assert created["metadata"]["generation"] == 1
    assert made.headers.getall("Warning") == ['299 - "unknown field \\"spec.surprise\\""']
    strict = await client.post(
        GROUPS, json=pod_group("other", surprise=1), params={"fieldValidation": "Strict"}
    )
    assert (
        'strict decoding error: unknown field "spec.surprise"'
        in (await body_of(strict, 400))["message"]
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"minMember": "two"}, 'spec.minMember: Invalid value: "string": spec.minMember in body '
         'must be of type integer: "string"'),
        ({"minMember": 0}, "spec.minMember: Invalid value: 0: spec.minMember in body should be "
         "greater than or equal to 1"),
        ({"minMember": 1 << 40}, '<nil>: Invalid value: "": Checked value must be of type integer '
         "with format int32 in spec.minMember"),
        ({"mode": "Firm"}, 'spec.mode: Unsupported value: "Firm": supported values: "Soft", '
         '"Hard"'),
        ({"queue": "Q1"}, 'spec.queue: Invalid value: "Q1": spec.queue in body should match '
         "'^[a-z-]+$'"),
        ({"tasks": [{"size": 1}]}, "spec.tasks[0].name: Required value"),
        ({"tasks": [{"name": "a"}, {"name": "a"}]}, 'spec.tasks[1]: Duplicate value: {"name":"a"}'),
        ({"tasks": [{"name": n} for n in "abc"]}, "spec.tasks: Too many: 3: must have at most 2 "
         "items"),
        ({"minResources": {"cpu": [1]}}, 'spec.minResources.cpu: Invalid value: "array": '
         'spec.minResources.cpu in body must be of type integer,string: "array"'),
    ],
)  # fmt: skip
async def test_schema_violations_are_refused_with_kubernetes_texts(
    client: Client, spec: Json, message: str
) -> None:
    refused = await create(client, GROUPS, pod_group("gang", **spec), code=422)

    assert refused["reason"] == "Invalid"
    assert refused["message"].startswith('PodGroup.scheduling.volcano.sh "gang" is invalid: ')
    assert message in refused["message"]
    assert refused["details"]["group"] == "scheduling.volcano.sh"


async def test_status_and_spec_are_written_separately(client: Client) -> None:
    created = await create(client, GROUPS, pod_group("gang") | {"status": {"phase": "Fake"}})
    assert "status" not in created

    both = {"status": {"phase": "Running"}, "spec": {"minMember": 9}}
    labelled = both | {"metadata": {"labels": {"not": "here"}}}
    status = await merge(client, f"{GROUPS}/gang/status", labelled)
    assert (status["status"], status["spec"]["minMember"]) == ({"phase": "Running"}, 2)
    assert "labels" not in status["metadata"]
    assert status["metadata"]["generation"] == 1

    main = await merge(
        client, f"{GROUPS}/gang", {"status": {"phase": "Fake"}, "spec": {"minMember": 3}}
    )
    assert (main["status"], main["spec"]["minMember"]) == ({"phase": "Running"}, 3)
    assert main["metadata"]["generation"] == 2
    wrong = await client.patch(
        f"{GROUPS}/gang/status", json={"status": {"phase": 3}}, headers=MERGE
    )
    assert "status.phase in body must be of type string" in (await body_of(wrong, 422))["message"]


async def test_without_a_status_subresource_status_is_a_field_like_others(client: Client) -> None:
    gpu = {"id": "GPU-1", "minor": 0, "resources": {"koordinator.sh/gpu-core": 100}}
    created = await create(client, DEVICE_LIST, device("node-1", gpu, status={"a": 1}))
    assert created["status"] == {"a": 1}
    assert created["spec"]["devices"][0]["health"] is False
    assert "namespace" not in created["metadata"]

    assert (await client.get(f"{DEVICE_LIST}/node-1/status")).status == 404
    changed = await merge(client, f"{DEVICE_LIST}/node-1", {"status": {"a": 2}})
    assert (changed["status"], changed["metadata"]["generation"]) == ({"a": 2}, 2)


async def test_objects_are_patched_applied_and_replaced(client: Client) -> None:
    applied = pod_group("gang", tasks=[{"name": "a", "size": 1}])
    params = {"fieldManager": "test"}
    url = f"{GROUPS}/gang"
    await body_of(await client.patch(url, json=applied, headers=APPLY, params=params), 201)
    applied["spec"]["tasks"] = [{"name": "b"}, {"name": "a", "size": 2}]

    both = await body_of(await client.patch(url, json=applied, headers=APPLY, params=params))
    assert both["spec"]["tasks"] == [{"name": "a", "size": 2}, {"name": "b"}]
    operations = [{"op": "replace", "path": "/spec/tasks/0/size", "value": 7}]
    patched = await body_of(
        await client.patch(
            url,
            data=json.dumps(operations),
            headers={"Content-Type": "application/json-patch+json"},
        )
    )
    assert patched["spec"]["tasks"][0]["size"] == 7
    strategic = {"Content-Type": "application/strategic-merge-patch+json"}
    assert (await client.patch(url, json={}, headers=strategic)).status == 415
    stale = {**patched, "spec": {"minMember": 4}}
    replaced = await body_of(await client.put(url, json=stale))
    assert replaced["spec"] == {"minMember": 4, "queue": "default"}
    assert (await client.put(url, json=stale)).status == 409


async def test_lists_support_selectors_pages_and_printer_columns(client: Client) -> None:
    for name, queue in (("a", "x"), ("b", "y"), ("c", "x")):
        await client.post(GROUPS, json=pod_group(name, queue=queue))

    chosen = await read(client, GROUPS, params={"fieldSelector": "spec.queue=x"})
    page = await read(client, GROUPS, params={"limit": "2"})
    table = await read(client, GROUPS, headers=TABLE)
    unknown = await client.get(GROUPS, params={"fieldSelector": "spec.mode=Soft"})

    assert [item["metadata"]["name"] for item in chosen["items"]] == ["a", "c"]
    assert chosen["items"][0]["kind"] == "PodGroup"
    assert (page["kind"], len(page["items"])) == ("PodGroupList", 2)
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Status", "minMember", "Age", "Queue"]
    assert table["rows"][0]["cells"][:3] == ["a", None, 2]
    assert unknown.status == 400


async def test_values_that_violate_a_newer_rule_may_stay(api: ApiUnderTest, client: Client) -> None:
    await client.post(GROUPS, json=pod_group("gang", queue="long-name"))
    tighter = api.store.read("customresourcedefinitions", None, "podgroups.scheduling.volcano.sh")
    tighter = json.loads(json.dumps(tighter))
    schema = tighter["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["queue"]["maxLength"] = 8
    api.store.update("customresourcedefinitions", tighter)

    kept = await client.patch(f"{GROUPS}/gang", json={"spec": {"minMember": 5}}, headers=MERGE)
    changed = await client.patch(f"{GROUPS}/gang", json={"spec": {"queue": "other-one"}},
                                 headers=MERGE)  # fmt: skip

    assert kept.status == 200
    assert "Too long: may not be more than 8 bytes" in (await body_of(changed, 422))["message"]


async def test_deleting_a_namespace_deletes_its_custom_objects(
    api: ApiUnderTest, client: Client
) -> None:
    api.store.create("namespaces", {"metadata": {"name": "team"}})
    there = pod_group("gang")
    there["metadata"]["namespace"] = "team"
    api.store.create("podgroups.scheduling.volcano.sh", there)

    await client.delete("/api/v1/namespaces/team")

    assert api.store.list("podgroups.scheduling.volcano.sh") == []
    assert (await client.get("/api/v1/namespaces/team")).status == 404


async def test_cel_rules_of_a_schema_are_enforced(client: Client) -> None:
    rules = [
        {"rule": "self.used <= self.limit", "messageExpression": "'at most ' + string(self.limit)"},
        {"rule": "self.limit >= oldSelf.limit", "message": "never less", "fieldPath": ".limit"},
    ]
    numbers = {"limit": {"type": "integer"}, "used": {"type": "integer"}}
    spec = {"type": "object", "properties": numbers, "x-kubernetes-validations": rules}
    await create(client, DEFINITIONS, definition("Box", "boxes", "example.com", {"spec": spec}))
    url = "/apis/example.com/v1/namespaces/default/boxes"
    box = {"metadata": {"name": "b"}, "spec": {"limit": 5, "used": 9}}

    too_much = await create(client, url, box, code=422)
    box["spec"] = {"limit": 5, "used": 4}
    await create(client, url, box)
    less = await merge(client, f"{url}/b", {"spec": {"limit": 4}}, code=422)

    assert too_much["message"] == 'Box.example.com "b" is invalid: spec: Invalid value: at most 5'
    assert (
        less["message"] == 'Box.example.com "b" is invalid: spec.limit: Invalid value: never less'
    )


async def test_rules_are_enforced_when_the_status_is_written(client: Client) -> None:
    """As kube-apiserver 1.36 responded."""
    number = {"type": "integer"}
    status_rules = [{"rule": "self.n >= oldSelf.n", "message": "back"}]
    schema = {
        "spec": {"type": "object", "properties": {"top": number}},
        "status": {
            "type": "object",
            "properties": {"n": number | {"maximum": 10}},
            "x-kubernetes-validations": status_rules,
        },
    }
    boxes = definition("Box", "boxes", "example.com", schema, subresources={"status": {}})
    root = boxes["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rule = "!has(self.status) || self.status.n <= self.spec.top"
    root["x-kubernetes-validations"] = [{"rule": rule, "message": "over the top"}]
    await create(client, DEFINITIONS, boxes)
    url = "/apis/example.com/v1/namespaces/default/boxes"
    await create(client, url, {"metadata": {"name": "b"}, "spec": {"top": 5}})

    async def refused(n: object) -> str:
        answer = await merge(client, f"{url}/b/status", {"status": {"n": n}}, code=422)
        return str(answer["message"]).removeprefix('Box.example.com "b" is invalid: ')

    assert await refused(6) == "<nil>: Invalid value: over the top"
    assert "or equal to 10, <nil>: Invalid value: over the top]" in await refused(12)
    assert "some validation rules were not checked" in await refused("x")
    written = await merge(client, f"{url}/b/status", {"status": {"n": 4}})
    assert written["status"] == {"n": 4}
    assert await refused(3) == "status: Invalid value: back"
