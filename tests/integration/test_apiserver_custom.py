"""Custom kinds over HTTP: what a definition serves, how its objects are checked and written."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.simcluster.objects import Json
from services.simcluster.persistence import SqliteDisk
from services.simcluster.store import Store
from tests.support.apiserver import ApiUnderTest, api_server
from tests.support.definitions import DEVICES, POD_GROUPS, definition, device, pod_group

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
DEVICE_LIST = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
MERGE = {"Content-Type": "application/merge-patch+json"}
APPLY = {"Content-Type": "application/apply-patch+yaml"}
TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as started:
        started.store.create("customresourcedefinitions", POD_GROUPS)
        started.store.create("customresourcedefinitions", DEVICES)
        yield started


@pytest.fixture
async def client(api: ApiUnderTest) -> AsyncIterator[aiohttp.ClientSession]:
    async with api.client() as session:
        yield session


async def body_of(response: aiohttp.ClientResponse, code: int = 200) -> Any:
    found = await response.json()
    assert response.status == code, found
    return found


async def test_a_kind_is_served_from_its_definition_on(client: aiohttp.ClientSession) -> None:
    budgets = definition("GPUBudget", "gpubudgets", "leasehold.dev", {"spec": {"type": "object"}})
    path = "/apis/leasehold.dev/v1/namespaces/default/gpubudgets"
    assert (await client.get("/apis/leasehold.dev/v1")).status == 404
    assert (await body_of(await client.get(path), 404))["message"] == (
        "the server could not find the requested resource"
    )

    created = await body_of(await client.post(DEFINITIONS, json=budgets), 201)

    conditions = {each["type"]: each["status"] for each in created["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    assert created["status"]["storedVersions"] == ["v1"]
    assert created["spec"]["names"]["listKind"] == "GPUBudgetList"
    assert (await body_of(await client.get(path)))["kind"] == "GPUBudgetList"
    groups = await body_of(await client.get("/apis"))
    assert "leasehold.dev" in [group["name"] for group in groups["groups"]]


async def test_discovery_tells_names_scope_and_subresources(client: aiohttp.ClientSession) -> None:
    listed = await body_of(await client.get("/apis/scheduling.volcano.sh/v1beta1"))
    accept = {"Accept": "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"}
    aggregated = await body_of(await client.get("/apis", headers=accept))

    kind, status = listed["resources"]
    assert (kind["name"], kind["shortNames"], kind["categories"]) == (
        "podgroups",
        ["pg"],
        ["gangs"],
    )
    assert (kind["namespaced"], status["name"]) == (True, "podgroups/status")
    by_name = {item["metadata"]["name"]: item for item in aggregated["items"]}
    version = by_name["scheduling.koordinator.sh"]["versions"][0]
    assert (version["version"], version["resources"][0]["scope"]) == ("v1alpha1", "Cluster")
    schema = await body_of(await client.get("/openapi/v3/apis/scheduling.volcano.sh/v1beta1"))
    described = schema["components"]["schemas"]["sh.volcano.scheduling.v1beta1.PodGroup"]
    assert "minMember" in described["properties"]["spec"]["properties"]


async def test_an_object_is_completed_and_pruned(client: aiohttp.ClientSession) -> None:
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
    ("spec", "said"),
    [
        ({"minMember": "two"}, 'spec.minMember: Invalid value: "string": spec.minMember in body '
         'must be of type integer: "string"'),
        ({"minMember": 0}, "spec.minMember: Invalid value: 0: spec.minMember in body should be "
         "greater than or equal to 1"),
        ({"minMember": 1 << 40}, "must be of type int32"),
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
async def test_what_the_schema_forbids_is_refused_in_kubernetes_words(
    client: aiohttp.ClientSession, spec: Json, said: str
) -> None:
    refused = await body_of(await client.post(GROUPS, json=pod_group("gang", **spec)), 422)

    assert refused["reason"] == "Invalid"
    assert refused["message"].startswith('PodGroup.scheduling.volcano.sh "gang" is invalid: ')
    assert said in refused["message"]
    assert refused["details"]["group"] == "scheduling.volcano.sh"


async def test_status_and_spec_are_written_apart(client: aiohttp.ClientSession) -> None:
    created = await body_of(
        await client.post(GROUPS, json=pod_group("gang") | {"status": {"phase": "Fake"}}), 201
    )
    assert "status" not in created

    status = await body_of(
        await client.patch(
            f"{GROUPS}/gang/status",
            json={"status": {"phase": "Running"}, "spec": {"minMember": 9},
                  "metadata": {"labels": {"not": "here"}}},
            headers=MERGE,
        )
    )  # fmt: skip
    assert (status["status"], status["spec"]["minMember"]) == ({"phase": "Running"}, 2)
    assert "labels" not in status["metadata"]
    assert status["metadata"]["generation"] == 1

    main = await body_of(
        await client.patch(
            f"{GROUPS}/gang",
            json={"status": {"phase": "Fake"}, "spec": {"minMember": 3}},
            headers=MERGE,
        )
    )
    assert (main["status"], main["spec"]["minMember"]) == ({"phase": "Running"}, 3)
    assert main["metadata"]["generation"] == 2
    wrong = await client.patch(
        f"{GROUPS}/gang/status", json={"status": {"phase": 3}}, headers=MERGE
    )
    assert "status.phase in body must be of type string" in (await body_of(wrong, 422))["message"]


async def test_without_a_status_subresource_status_is_a_field_like_others(
    client: aiohttp.ClientSession,
) -> None:
    gpu = {"id": "GPU-1", "minor": 0, "resources": {"koordinator.sh/gpu-core": 100}}
    created = await body_of(
        await client.post(DEVICE_LIST, json=device("node-1", gpu, status={"a": 1})), 201
    )
    assert created["status"] == {"a": 1}
    assert created["spec"]["devices"][0]["health"] is False
    assert "namespace" not in created["metadata"]

    assert (await client.get(f"{DEVICE_LIST}/node-1/status")).status == 404
    changed = await body_of(
        await client.patch(f"{DEVICE_LIST}/node-1", json={"status": {"a": 2}}, headers=MERGE)
    )
    assert (changed["status"], changed["metadata"]["generation"]) == ({"a": 2}, 2)


async def test_objects_are_patched_applied_and_replaced(client: aiohttp.ClientSession) -> None:
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


async def test_lists_select_page_and_print(client: aiohttp.ClientSession) -> None:
    for name, queue in (("a", "x"), ("b", "y"), ("c", "x")):
        await client.post(GROUPS, json=pod_group(name, queue=queue))

    chosen = await body_of(await client.get(GROUPS, params={"fieldSelector": "spec.queue=x"}))
    page = await body_of(await client.get(GROUPS, params={"limit": "2"}))
    table = await body_of(await client.get(GROUPS, headers=TABLE))
    unknown = await client.get(GROUPS, params={"fieldSelector": "spec.mode=Soft"})

    assert [item["metadata"]["name"] for item in chosen["items"]] == ["a", "c"]
    assert chosen["items"][0]["kind"] == "PodGroup"
    assert (page["kind"], len(page["items"])) == ("PodGroupList", 2)
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Status", "minMember", "Age", "Queue"]
    assert table["rows"][0]["cells"][:3] == ["a", None, 2]
    assert unknown.status == 400


async def test_a_watch_sees_changes_and_ends_with_the_kind(
    api: ApiUnderTest, client: aiohttp.ClientSession
) -> None:
    async with asyncio.timeout(20), client.get(GROUPS, params={"watch": "true"}) as watch:
        for name in ("gang", "other"):
            await client.post(GROUPS, json=pod_group(name))
        await body_of(await client.delete(f"{DEFINITIONS}/podgroups.scheduling.volcano.sh"))
        lines = [json.loads(line) for line in (await watch.content.read()).splitlines()]

    assert [line["type"] for line in lines] == ["ADDED", "ADDED", "DELETED", "DELETED"]
    assert lines[0]["object"]["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert (await client.get(GROUPS)).status == 404
    assert (await client.get("/apis/scheduling.volcano.sh")).status == 404


async def test_a_definition_waits_for_the_finalizers_of_its_objects(
    client: aiohttp.ClientSession,
) -> None:
    held = pod_group("gang")
    held["metadata"]["finalizers"] = ["example.com/hold"]
    await client.post(GROUPS, json=held)
    url = f"{DEFINITIONS}/podgroups.scheduling.volcano.sh"

    going = await body_of(await client.delete(url))
    refused = await body_of(await client.post(GROUPS, json=pod_group("late")), 405)
    terminating = [c for c in going["status"]["conditions"] if c["type"] == "Terminating"]
    await client.patch(f"{GROUPS}/gang", json={"metadata": {"finalizers": None}}, headers=MERGE)

    assert terminating[0]["reason"] == "InstanceDeletionInProgress"
    assert refused["message"] == (
        "create not allowed while custom resource definition is terminating"
    )
    assert (await client.get(url)).status == 404


async def test_every_served_version_shows_the_same_object(client: aiohttp.ClientSession) -> None:
    spec = {"type": "object", "properties": {"size": {"type": "integer"}}}
    things = definition("Thing", "things", "example.com", {"spec": spec})
    beta = {**things["spec"]["versions"][0], "name": "v1beta1", "storage": False,
            "deprecated": True}  # fmt: skip
    things["spec"]["versions"].append(beta)
    await body_of(await client.post(DEFINITIONS, json=things), 201)
    old, new = (f"/apis/example.com/{v}/namespaces/default/things" for v in ("v1beta1", "v1"))
    thing = {"apiVersion": "example.com/v1beta1", "kind": "Thing", "metadata": {"name": "t"},
             "spec": {"size": 1}}  # fmt: skip

    made = await client.post(old, json=thing)
    created = await body_of(made, 201)
    shown = await body_of(await client.get(f"{new}/t"))
    listed = await body_of(await client.get(old))

    assert "example.com/v1beta1 Thing is deprecated" in made.headers["Warning"]
    assert (created["apiVersion"], shown["apiVersion"]) == (
        "example.com/v1beta1", "example.com/v1")  # fmt: skip
    assert listed["items"][0]["apiVersion"] == "example.com/v1beta1"
    patched = await body_of(
        await client.patch(f"{old}/t", json={"spec": {"size": 2}}, headers=MERGE)
    )
    assert (patched["apiVersion"], patched["spec"]) == ("example.com/v1beta1", {"size": 2})
    group = await body_of(await client.get("/apis/example.com"))
    assert group["preferredVersion"]["version"] == "v1"


async def test_two_kinds_of_one_plural_live_side_by_side(
    api: ApiUnderTest, client: aiohttp.ClientSession
) -> None:
    other = definition(
        "PodGroup", "podgroups", "scheduling.x-k8s.io", {"spec": {"type": "object"}},
        version="v1alpha1", subresources={"status": {}},
    )  # fmt: skip
    api.store.create("customresourcedefinitions", other)

    await client.post(GROUPS, json=pod_group("gang"))

    theirs = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups"
    assert (await body_of(await client.get(theirs)))["items"] == []
    assert len((await body_of(await client.get(GROUPS)))["items"]) == 1


async def test_bad_definitions_are_refused_with_their_fields(client: aiohttp.ClientSession) -> None:
    def changed(change: Any) -> Json:
        made = definition("Thing", "things", "example.com", {"spec": {"type": "object"}})
        change(made, made["spec"]["versions"][0])
        return made

    cases = {
        "metadata.name": changed(lambda d, v: d["metadata"].update(name="other.example.com")),
        "spec.versions": changed(lambda d, v: v.update(storage=False)),
        "spec.versions[0].schema.openAPIV3Schema": changed(lambda d, v: v.pop("schema")),
        "spec.versions[0].schema.openAPIV3Schema.properties[spec].type": changed(
            lambda d, v: v["schema"]["openAPIV3Schema"]["properties"]["spec"].pop("type")
        ),
        "spec.scope": changed(lambda d, v: d["spec"].update(scope="World")),
        "metadata.annotations[api-approved.kubernetes.io]": changed(
            lambda d, v: (
                d["spec"].update(group="x.k8s.io"),
                d["metadata"].update(name="things.x.k8s.io"),
            )
        ),
    }

    for field, bad in cases.items():
        refused = await body_of(await client.post(DEFINITIONS, json=bad), 422)
        assert field in [cause["field"] for cause in refused["details"]["causes"]], refused


async def test_names_that_are_taken_keep_a_definition_waiting(
    client: aiohttp.ClientSession,
) -> None:
    rival = definition("PodGroup", "rivals", "scheduling.volcano.sh", {"spec": {"type": "object"}})

    created = await body_of(await client.post(DEFINITIONS, json=rival), 201)

    accepted = created["status"]["conditions"][0]
    assert (accepted["type"], accepted["status"]) == ("NamesAccepted", "False")
    path = "/apis/scheduling.volcano.sh/v1/namespaces/default/rivals"
    assert (await client.get(path)).status == 404


async def test_what_was_wrong_before_a_new_rule_may_stay(
    api: ApiUnderTest, client: aiohttp.ClientSession
) -> None:
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


async def test_definitions_and_objects_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.sqlite"
    async with api_server(store=Store(SqliteDisk(path))) as first:
        first.store.create("customresourcedefinitions", POD_GROUPS)
        first.store.create("podgroups.scheduling.volcano.sh", pod_group("gang"))
        first.store.close()

    async with api_server(store=Store(SqliteDisk(path))) as second, second.client() as client:
        listed = await body_of(await client.get(GROUPS))
        await client.delete(f"{DEFINITIONS}/podgroups.scheduling.volcano.sh")
        assert (await client.get(GROUPS)).status == 404
        second.store.close()

    assert [item["metadata"]["name"] for item in listed["items"]] == ["gang"]
    third = Store(SqliteDisk(path))
    assert "podgroups.scheduling.volcano.sh" not in third.kinds
    third.close()


async def test_a_namespace_takes_its_custom_objects_along(
    api: ApiUnderTest, client: aiohttp.ClientSession
) -> None:
    api.store.create("namespaces", {"metadata": {"name": "team"}})
    there = pod_group("gang")
    there["metadata"]["namespace"] = "team"
    api.store.create("podgroups.scheduling.volcano.sh", there)

    await client.delete("/api/v1/namespaces/team")

    assert api.store.list("podgroups.scheduling.volcano.sh") == []
    assert (await client.get("/api/v1/namespaces/team")).status == 404


async def test_rules_of_a_schema_are_kept(client: aiohttp.ClientSession) -> None:
    rules = [
        {"rule": "self.used <= self.limit", "messageExpression": "'at most ' + string(self.limit)"},
        {"rule": "self.limit >= oldSelf.limit", "message": "never less", "fieldPath": ".limit"},
    ]
    numbers = {"limit": {"type": "integer"}, "used": {"type": "integer"}}
    spec = {"type": "object", "properties": numbers, "x-kubernetes-validations": rules}
    await body_of(
        await client.post(
            DEFINITIONS, json=definition("Box", "boxes", "example.com", {"spec": spec})
        ),
        201,
    )
    url = "/apis/example.com/v1/namespaces/default/boxes"
    box = {"metadata": {"name": "b"}, "spec": {"limit": 5, "used": 9}}

    too_much = await body_of(await client.post(url, json=box), 422)
    box["spec"] = {"limit": 5, "used": 4}
    await body_of(await client.post(url, json=box), 201)
    less = await body_of(
        await client.patch(f"{url}/b", json={"spec": {"limit": 4}}, headers=MERGE), 422
    )

    assert too_much["message"] == 'Box.example.com "b" is invalid: spec: Invalid value: at most 5'
    assert (
        less["message"] == 'Box.example.com "b" is invalid: spec.limit: Invalid value: never less'
    )


async def test_events_are_one_kind_in_two_groups(client: aiohttp.ClientSession) -> None:
    new, old = ("/apis/events.k8s.io/v1/namespaces/default/events",
                "/api/v1/namespaces/default/events")  # fmt: skip
    event = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"},
             "regarding": {"kind": "Pod", "name": "web", "namespace": "default"},
             "note": "0/3 nodes are available", "reason": "FailedScheduling", "type": "Warning",
             "action": "Scheduling", "reportingController": "leasehold",
             "reportingInstance": "leasehold-0",
             "eventTime": "2026-01-01T00:00:00.000000Z"}  # fmt: skip

    created = await body_of(await client.post(new, json=event), 201)
    shown = await body_of(await client.get(f"{old}/e"))
    chosen = await body_of(await client.get(new, params={"fieldSelector": "regarding.name=web"}))
    patched = await body_of(await client.patch(f"{new}/e", json={"note": "bound"}, headers=MERGE))

    assert (created["apiVersion"], created["note"]) == ("events.k8s.io/v1", event["note"])
    assert (shown["apiVersion"], shown["message"]) == ("v1", event["note"])
    assert (shown["involvedObject"], shown["reportingComponent"]) == (
        event["regarding"],
        "leasehold",
    )
    assert [item["regarding"]["name"] for item in chosen["items"]] == ["web"]
    assert patched["note"] == "bound"
    old_fashioned = {**event, "metadata": {"name": "f"}, "deprecatedCount": 1, "action": ""}
    refused = await body_of(await client.post(new, json=old_fashioned), 422)
    assert {cause["field"] for cause in refused["details"]["causes"]} == {"action", "count"}
    table = await body_of(await client.get(new, headers=TABLE))
    assert table["rows"][0]["cells"][1:4] == ["Warning", "FailedScheduling", "pod/web"]
