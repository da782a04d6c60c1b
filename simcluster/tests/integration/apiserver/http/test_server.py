"""The simulated API server over real TLS: objects, lists, forms, refusals."""

import io
import ssl

import aiohttp
import pytest

from tests.support.simcluster.apiserver import (
    PODS,
    ApiUnderTest,
    Client,
    a_pod,
    create,
    read,
)

CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


async def test_requests_without_the_token_are_unauthorized(api: ApiUnderTest) -> None:
    context = ssl.create_default_context(cafile=str(api.ca))
    async with aiohttp.ClientSession(
        api.url, connector=aiohttp.TCPConnector(ssl=context)
    ) as anyone:
        assert (await anyone.get("/readyz")).status == 200
        assert (await anyone.get("/version")).status == 200
        refused = await anyone.get("/api/v1/pods")
        wrong = await anyone.get("/api/v1/pods", headers={"Authorization": "Bearer wrong"})

    assert (refused.status, wrong.status) == (401, 401)


@pytest.mark.parametrize("body", [b"{", b'{"metadata": {"name": "\xff"}}'])
async def test_a_malformed_json_body_is_refused(client: Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}

    refused = await client.post(PODS, data=body, headers=headers)

    assert (refused.status, (await refused.json())["reason"]) == (400, "BadRequest")


async def test_a_pod_lives_from_post_to_delete(client: Client) -> None:
    created = await client.post(PODS, json=a_pod("web"))
    assert created.status == 201
    assert (await created.json())["status"]["phase"] == "Pending"

    shown = await read(client, f"{PODS}/web")
    assert shown["metadata"]["namespace"] == "default"
    deleted = await client.delete(f"{PODS}/web")

    assert (await deleted.json())["kind"] == "Pod"
    missing = await client.get(f"{PODS}/web")
    assert missing.status == 404
    assert (await missing.json())["details"] == {"name": "web", "kind": "pods"}


async def test_refusals_are_statuses(client: Client) -> None:
    await client.post(PODS, json=a_pod("web"))

    cases = {
        "taken": await client.post(PODS, json=a_pod("web")),
        "no JSON": await client.post(PODS, data=b"{", headers={"Content-Type": "application/json"}),
        "other kind": await client.post(CONFIGMAPS, json=a_pod("x")),
        "other namespace": await client.post(
            PODS, json={**a_pod("x"), "metadata": {"name": "x", "namespace": "kube-system"}}
        ),
        "no namespace": await client.post(
            "/api/v1/namespaces/none/pods", json={**a_pod("x"), "metadata": {"name": "x"}}
        ),
        "no kind": await client.get("/api/v1/podtemplates"),
        "field": await client.get(PODS, params={"fieldSelector": "spec.volumes=x"}),
        "form": await client.get(PODS, headers={"Accept": "text/html"}),
        "patch": await client.patch(f"{PODS}/web", data=b"{}", headers={"Content-Type": "a/b"}),
        "method": await client.put(PODS, json={}),
        "shape": await client.post(PODS, json={**a_pod("x"), "spec": {"containers": 3}}),
        "list": await client.post(PODS, json={**a_pod("x"), "spec": {"containers": ["a"]}}),
        "body": await client.post(PODS, data=io.BytesIO(b"x" * (4 << 20))),
    }

    codes = {name: response.status for name, response in cases.items()}
    bodies = [await response.json() for response in cases.values()]
    assert codes == {
        "taken": 409, "no JSON": 400, "other kind": 400, "other namespace": 400,
        "no namespace": 404, "no kind": 404, "field": 400, "form": 406, "patch": 415,
        "method": 405, "shape": 400, "list": 400, "body": 413,
    }  # fmt: skip
    assert all(body["kind"] == "Status" and body["status"] == "Failure" for body in bodies)


async def test_a_list_in_pages_is_consistent(client: Client) -> None:
    for number in range(5):
        await client.post(PODS, json=a_pod(f"web-{number}"))

    first = await read(client, PODS, params={"limit": "2"})
    await client.delete(f"{PODS}/web-3")
    token = first["metadata"]["continue"]
    rest = await read(client, PODS, params={"limit": "9", "continue": token})

    names = [item["metadata"]["name"] for item in first["items"] + rest["items"]]
    assert names == [f"web-{number}" for number in range(5)]
    assert first["metadata"]["remainingItemCount"] == 3
    assert first["metadata"]["resourceVersion"] == rest["metadata"]["resourceVersion"]
    assert first["kind"] == "PodList"
    assert "kind" not in first["items"][0]


async def test_an_expired_continue_token_gets_410(api: ApiUnderTest, client: Client) -> None:
    for number in range(3):
        await client.post(PODS, json=a_pod(f"web-{number}"))
    first = await read(client, PODS, params={"limit": "2"})
    await client.delete(f"{PODS}/web-2")
    api.store.compact()

    gone = await client.get(PODS, params={"continue": first["metadata"]["continue"]})

    assert gone.status == 410
    assert (await gone.json())["reason"] == "Expired"


async def test_exact_and_future_versions_of_lists(client: Client) -> None:
    created = await create(client, PODS, a_pod("web"))
    version = created["metadata"]["resourceVersion"]
    await client.delete(f"{PODS}/web")

    exact = {"resourceVersion": version, "resourceVersionMatch": "Exact"}
    then = await read(client, PODS, params=exact)
    future = await client.get(PODS, params={"resourceVersion": "999999"})

    assert [item["metadata"]["name"] for item in then["items"]] == ["web"]
    assert future.status == 504
    assert (await future.json())["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


async def test_every_patch_type_reaches_the_object(client: Client) -> None:
    await client.post(PODS, json=a_pod("web"))
    patches = {
        "application/merge-patch+json": '{"metadata":{"labels":{"a":"1"}}}',
        "application/json-patch+json": '[{"op":"add","path":"/metadata/labels/b","value":"2"}]',
        "application/strategic-merge-patch+json": '{"metadata":{"labels":{"c":"3"}}}',
    }

    for content_type, body in patches.items():
        answer = await client.patch(
            f"{PODS}/web", data=body, headers={"Content-Type": content_type}
        )
        assert answer.status == 200

    assert (await answer.json())["metadata"]["labels"] == {"a": "1", "b": "2", "c": "3"}


async def test_a_patch_with_an_old_version_is_a_conflict(client: Client) -> None:
    await client.post(PODS, json=a_pod("web"))

    answer = await client.patch(
        f"{PODS}/web",
        data='{"metadata":{"resourceVersion":"1"}}',
        headers={"Content-Type": "application/merge-patch+json"},
    )

    assert answer.status == 409


async def test_apply_creates_and_then_merges(client: Client) -> None:
    headers = {"Content-Type": "application/apply-patch+yaml"}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {%s: '1'}\n"

    unnamed = await client.patch(f"{CONFIGMAPS}/c", data=text % "a", headers=headers)
    url = f"{CONFIGMAPS}/c?fieldManager=test"
    created = await client.patch(url, data=text % "a", headers=headers)
    merged = await client.patch(url, data=text % "b", headers=headers)

    assert (unnamed.status, created.status, merged.status) == (422, 201, 200)
    assert (await merged.json())["data"] == {"a": "1", "b": "1"}


async def test_a_dry_run_returns_the_object_and_stores_nothing(client: Client) -> None:
    created = await client.post(PODS, json=a_pod("web"), params={"dryRun": "All"})

    assert created.status == 201
    assert (await client.get(f"{PODS}/web")).status == 404
    assert (await client.post(PODS, json=a_pod("x"), params={"dryRun": "Some"})).status == 400


async def test_unknown_fields_are_refused_reported_or_dropped(client: Client) -> None:
    mistyped = a_pod("web")
    mistyped["spec"] = {**mistyped["spec"], "schedulername": "volcano"}

    strict = await client.post(PODS, json=mistyped, params={"fieldValidation": "Strict"})
    warned = await client.post(PODS, json=mistyped)

    assert strict.status == 400
    assert 'unknown field "spec.schedulername"' in (await strict.json())["message"]
    assert warned.status == 201
    assert warned.headers["Warning"] == '299 - "unknown field \\"spec.schedulername\\""'
    assert "schedulername" not in (await warned.json())["spec"]


async def test_a_collection_is_deleted_by_selector(client: Client) -> None:
    await client.post(PODS, json=a_pod("a", labels={"app": "x"}))
    await client.post(PODS, json=a_pod("b", labels={"app": "y"}))

    await client.delete(PODS, params={"labelSelector": "app=x"})

    left = await read(client, PODS)
    assert [item["metadata"]["name"] for item in left["items"]] == ["b"]


async def test_tables_and_bare_metadata_are_served(client: Client) -> None:
    await client.post(PODS, json=a_pod("web"))

    table = await read(client, PODS, headers={"Accept": TABLE})
    partial = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    bare = await read(client, PODS, headers={"Accept": partial})

    names = [column["name"] for column in table["columnDefinitions"]]
    assert names[:5] == ["Name", "Ready", "Status", "Restarts", "Age"]
    assert table["rows"][0]["cells"][:4] == ["web", "0/1", "Pending", "0"]
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    assert set(bare["items"][0]) == {"kind", "apiVersion", "metadata"}


async def test_discovery_in_both_forms_names_the_same_kinds(client: Client) -> None:
    new_form = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    old = await read(client, "/api/v1")
    answer = await client.get("/api", headers={"Accept": f"{new_form},application/json"})
    new = await answer.json()

    kinds = {entry["name"] for entry in old["resources"] if "/" not in entry["name"]}
    assert answer.headers["Content-Type"] == new_form
    assert kinds == {entry["resource"] for entry in new["items"][0]["versions"][0]["resources"]}
    groups = await read(client, "/apis")
    assert "coordination.k8s.io" in {group["name"] for group in groups["groups"]}


async def test_faults_occur_as_often_as_configured(client: Client) -> None:
    fault = {"path": PODS, "count": 1, "code": 429, "retry_after_s": 3}
    await client.post("/debug/faults", json=fault)

    first, second = await client.get(PODS), await client.get(PODS)

    assert (first.status, second.status) == (429, 200)
    assert first.headers["Retry-After"] == "3"


async def test_a_fault_can_reset_the_connection_or_delay_the_response(client: Client) -> None:
    await client.post("/debug/faults", json={"path": PODS, "code": 0, "method": "POST"})
    await client.post("/debug/faults", json={"path": PODS, "code": 200, "delay_s": 0.05})

    with pytest.raises(aiohttp.ClientConnectionError):
        await client.post(PODS, json=a_pod("web"))

    assert (await client.get(PODS)).status == 200
    assert (await client.get(f"{PODS}/web")).status == 404


async def test_an_eviction_respects_the_budget(api: ApiUnderTest, client: Client) -> None:
    budget = {"metadata": {"name": "b"},
              "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}}  # fmt: skip
    await client.post("/apis/policy/v1/namespaces/default/poddisruptionbudgets", json=budget)
    running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    for name in ("a", "b"):
        await client.post(PODS, json=a_pod(name, labels={"app": "x"}))
        api.store.patch("pods", "default", name, {"status": running}, subresource="status")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {}}

    first = await client.post(f"{PODS}/a/eviction", json=eviction)
    second = await client.post(f"{PODS}/b/eviction", json=eviction)

    assert (first.status, second.status) == (201, 429)
    cause = (await second.json())["details"]["causes"][0]
    assert cause["reason"] == "DisruptionBudget"
    assert api.store.read("poddisruptionbudgets", "default", "b")["status"]["currentHealthy"] == 1


async def test_metrics_count_requests(client: Client) -> None:
    await client.get(PODS)

    text = await (await client.get("/metrics")).text()

    wanted = 'apiserver_request_total{code="200",resource="pods",subresource="",verb="GET"} 1.0'
    assert wanted in text
