"""Definitions of custom kinds: what they serve, when they wait, and which are refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

from simcluster.apimachinery.objects import Json
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.persistence import SqliteBackend
from tests.support.simcluster.apiserver import (
    MERGE,
    ApiUnderTest,
    Client,
    api_server,
    body_of,
    create,
    merge,
    read,
)
from tests.support.simcluster.custom_kinds import (
    DEFINITIONS,
    GROUPS,
)
from tests.support.simcluster.definitions import POD_GROUPS, definition, pod_group


async def test_a_kind_is_served_as_soon_as_it_is_defined(client: Client) -> None:
    budgets = definition("GPUBudget", "gpubudgets", "leasehold.dev", {"spec": {"type": "object"}})
    path = "/apis/leasehold.dev/v1/namespaces/default/gpubudgets"
    assert (await client.get("/apis/leasehold.dev/v1")).status == 404
    assert (await read(client, path, code=404))["message"] == (
        "the server could not find the requested resource"
    )

    created = await create(client, DEFINITIONS, budgets)

    conditions = {
        condition["type"]: condition["status"] for condition in created["status"]["conditions"]
    }
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    assert created["status"]["storedVersions"] == ["v1"]
    assert created["spec"]["names"]["listKind"] == "GPUBudgetList"
    assert (await read(client, path))["kind"] == "GPUBudgetList"
    groups = await read(client, "/apis")
    assert "leasehold.dev" in [group["name"] for group in groups["groups"]]


async def test_discovery_lists_names_scope_and_subresources(client: Client) -> None:
    listed = await read(client, "/apis/scheduling.volcano.sh/v1beta1")
    accept = {"Accept": "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"}
    aggregated = await read(client, "/apis", headers=accept)

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
    schema = await read(client, "/openapi/v3/apis/scheduling.volcano.sh/v1beta1")
    described = schema["components"]["schemas"]["sh.volcano.scheduling.v1beta1.PodGroup"]
    assert "minMember" in described["properties"]["spec"]["properties"]


async def test_a_watch_sees_changes_and_ends_with_the_kind(
    api: ApiUnderTest, client: Client
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


async def test_a_definition_waits_for_the_finalizers_of_its_objects(client: Client) -> None:
    held = pod_group("gang")
    held["metadata"]["finalizers"] = ["example.com/hold"]
    await client.post(GROUPS, json=held)
    url = f"{DEFINITIONS}/podgroups.scheduling.volcano.sh"

    going = await body_of(await client.delete(url))
    refused = await create(client, GROUPS, pod_group("late"), code=405)
    terminating = [c for c in going["status"]["conditions"] if c["type"] == "Terminating"]
    await client.patch(f"{GROUPS}/gang", json={"metadata": {"finalizers": None}}, headers=MERGE)

    assert terminating[0]["reason"] == "InstanceDeletionInProgress"
    assert refused["message"] == (
        "create not allowed while custom resource definition is terminating"
    )
    assert (await client.get(url)).status == 404


async def test_every_served_version_shows_the_same_object(client: Client) -> None:
    spec = {"type": "object", "properties": {"size": {"type": "integer"}}}
    things = definition("Thing", "things", "example.com", {"spec": spec})
    beta = {**things["spec"]["versions"][0], "name": "v1beta1", "storage": False,
            "deprecated": True}  # fmt: skip
    things["spec"]["versions"].append(beta)
    await create(client, DEFINITIONS, things)
    old, new = (f"/apis/example.com/{v}/namespaces/default/things" for v in ("v1beta1", "v1"))
    thing = {"apiVersion": "example.com/v1beta1", "kind": "Thing", "metadata": {"name": "t"},
             "spec": {"size": 1}}  # fmt: skip

    made = await client.post(old, json=thing)
    created = await body_of(made, 201)
    shown = await read(client, f"{new}/t")
    listed = await read(client, old)

    assert "example.com/v1beta1 Thing is deprecated" in made.headers["Warning"]
    assert (created["apiVersion"], shown["apiVersion"]) == (
        "example.com/v1beta1", "example.com/v1")  # fmt: skip
    assert listed["items"][0]["apiVersion"] == "example.com/v1beta1"
    patched = await merge(client, f"{old}/t", {"spec": {"size": 2}})
    assert (patched["apiVersion"], patched["spec"]) == ("example.com/v1beta1", {"size": 2})
    group = await read(client, "/apis/example.com")
    assert group["preferredVersion"]["version"] == "v1"


async def test_two_kinds_may_have_the_same_plural(api: ApiUnderTest, client: Client) -> None:
    other = definition(
        "PodGroup", "podgroups", "scheduling.x-k8s.io", {"spec": {"type": "object"}},
        version="v1alpha1", subresources={"status": {}},
    )  # fmt: skip
    api.store.create("customresourcedefinitions", other)

    await client.post(GROUPS, json=pod_group("gang"))

    theirs = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups"
    assert (await read(client, theirs))["items"] == []
    assert len((await read(client, GROUPS))["items"]) == 1


async def test_invalid_definitions_are_refused_with_their_fields(client: Client) -> None:
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
        refused = await create(client, DEFINITIONS, bad, code=422)
        assert field in [cause["field"] for cause in refused["details"]["causes"]], refused


async def test_a_definition_with_names_in_use_is_not_established(client: Client) -> None:
    rival = definition("PodGroup", "rivals", "scheduling.volcano.sh", {"spec": {"type": "object"}})

    created = await create(client, DEFINITIONS, rival)

    accepted = created["status"]["conditions"][0]
    assert (accepted["type"], accepted["status"]) == ("NamesAccepted", "False")
    path = "/apis/scheduling.volcano.sh/v1/namespaces/default/rivals"
    assert (await client.get(path)).status == 404


async def test_definitions_and_objects_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.sqlite"
    async with api_server(store=open_store(SqliteBackend(path))) as first:
        first.store.create("customresourcedefinitions", POD_GROUPS)
        first.store.create("podgroups.scheduling.volcano.sh", pod_group("gang"))
        first.store.close()

    async with (
        api_server(store=open_store(SqliteBackend(path))) as second,
        second.client() as client,
    ):
        listed = await read(client, GROUPS)
        await client.delete(f"{DEFINITIONS}/podgroups.scheduling.volcano.sh")
        assert (await client.get(GROUPS)).status == 404
        second.store.close()

    assert [item["metadata"]["name"] for item in listed["items"]] == ["gang"]
    third = open_store(SqliteBackend(path))
    assert "podgroups.scheduling.volcano.sh" not in third.kinds
    third.close()
