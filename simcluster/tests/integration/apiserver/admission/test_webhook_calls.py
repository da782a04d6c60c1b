"""Which requests are reviewed by which webhooks, and failed calls."""

import asyncio
import base64
import json

import pytest
from aiohttp import web

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.admission_webhook import (
    WebhookUnderTest,
    allow,
    configuration,
    deny,
    label,
)
from tests.support.simcluster.apiserver import (
    MERGE,
    PODS,
    ApiUnderTest,
    Client,
    a_pod,
    create,
    read,
    refusal,
)
from tests.support.simcluster.definitions import POD_GROUPS, pod_group
from tests.support.simcluster.reviewed import (
    CONFIGS,
    assert_installed,
    rule,
)


async def test_updates_deletions_and_bindings_are_reviewed(
    client: Client, hooks: WebhookUnderTest
) -> None:
    await assert_installed(client, "Validating", hooks.hook("all", allow, rules=[rule("*/*")]))
    await client.post(PODS, json=a_pod())
    await client.patch(f"{PODS}/web", json={"metadata": {"labels": {"a": "b"}}}, headers=MERGE)
    await client.patch(f"{PODS}/web/status", json={"status": {"reason": "R"}}, headers=MERGE)
    binding = {"metadata": {"name": "web"}, "target": {"name": "node-1"}}
    bound = await client.post(f"{PODS}/web/binding", json=binding)
    await client.delete(f"{PODS}/web", params={"gracePeriodSeconds": "0"})

    assert bound.status == 201
    seen = hooks.requests("/all")
    assert [(request["operation"], request.get("subResource", "")) for request in seen] == [
        ("CREATE", ""), ("UPDATE", ""), ("UPDATE", "status"), ("CREATE", "binding"),
        ("DELETE", ""),
    ]  # fmt: skip
    assert seen[1]["oldObject"]["metadata"].get("labels") is None
    assert seen[1]["object"]["metadata"]["labels"] == {"a": "b"}
    assert seen[3]["kind"]["kind"] == "Binding"
    assert (seen[4]["object"], seen[4]["oldObject"]["metadata"]["name"]) == (None, "web")


@pytest.mark.parametrize(
    ("more", "is_called"),
    [
        ({"rules": [rule("pods")]}, True),
        ({"rules": [rule("*")]}, True),
        ({"rules": [rule("pods/*")]}, True),
        ({"rules": [rule("pods/status")]}, False),
        ({"rules": [rule("pods", operations=["UPDATE", "DELETE"])]}, False),
        ({"rules": [rule("pods", group="apps")]}, False),
        ({"rules": [rule("pods", group="*", version="*")]}, True),
        ({"rules": [rule("pods", scope="Cluster")]}, False),
        ({"rules": [rule("pods", scope="Namespaced")]}, True),
        ({"objectSelector": {"matchLabels": {"gpu": "yes"}}}, True),
        ({"objectSelector": {"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}},
         False),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}, True),
        ({"namespaceSelector": {"matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["default"]}]}},
         False),
        ({"matchConditions": [{"name": "a", "expression": "object.metadata.labels.gpu == 'yes'"}]},
         True),
        ({"matchConditions": [{"name": "no", "expression": "request.operation == 'DELETE'"}]},
         False),
    ],
)  # fmt: skip
async def test_only_matching_webhooks_are_called(
    client: Client, hooks: WebhookUnderTest, more: Json, is_called: bool
) -> None:
    await assert_installed(client, "Validating", hooks.hook("some", allow, **more))

    created = await client.post(PODS, json=a_pod(labels={"gpu": "yes"}))

    assert created.status == 201, await created.text()
    assert bool(hooks.received) is is_called


async def test_a_failing_match_condition_follows_the_failure_policy(
    client: Client, hooks: WebhookUnderTest
) -> None:
    broken = [{"name": "x", "expression": "object.metadata.labels.gpu == 'yes'"}]
    await assert_installed(
        client, "Validating", hooks.hook("strict", allow, matchConditions=broken)
    )
    assert "resulted in error" in await refusal(client, PODS, a_pod(), code=403)

    await client.delete(f"{CONFIGS}/validatingwebhookconfigurations/a")
    lax = hooks.hook("lax", allow, matchConditions=broken, failurePolicy="Ignore")
    await assert_installed(client, "Validating", lax)
    assert (await client.post(PODS, json=a_pod())).status == 201
    assert hooks.received == []


async def test_failed_calls_follow_the_failure_policy(
    client: Client, hooks: WebhookUnderTest
) -> None:
    async def slow(_request: Json) -> Json:
        await asyncio.sleep(30)
        return {"allowed": True}

    strange = hooks.hook("strange", allow)
    strange["clientConfig"].pop("caBundle")
    unreachable = hooks.hook("unreachable", allow)
    unreachable["clientConfig"]["url"] = "https://127.0.0.1:1/x"
    cases = {
        "connect: connection refused": unreachable,
        "tls: failed to verify certificate: x509": strange,
        "context deadline exceeded": hooks.hook("slow", slow, timeoutSeconds=1),
        'expected response.uid="': hooks.hook("uid", lambda _r: {"allowed": True, "uid": "x"}),
        "the server could not find the requested resource": hooks.hook(
            "missing", lambda _r: web.Response(status=404)
        ),
        'an error on the server ("broken") has prevented': hooks.hook(
            "broken", lambda _r: web.Response(status=500, text="broken")
        ),
        "webhook response was absent": hooks.hook(
            "empty", lambda _r: web.json_response({"kind": "AdmissionReview"})
        ),
        "validating webhook may not return response.patch": hooks.hook("patch", label("a", "b")),
    }

    for text, hook in cases.items():
        await assert_installed(client, "Validating", hook)
        message = await refusal(client, PODS, a_pod("web", labels={"a": "b"}), code=500)
        name = hook["name"]
        assert message.startswith(f'Internal error occurred: failed calling webhook "{name}": '), (
            message
        )
        assert text in message
        await client.delete(f"{CONFIGS}/validatingwebhookconfigurations/a")
        await assert_installed(client, "Validating", {**hook, "failurePolicy": "Ignore"})
        dry = await client.post(
            PODS, json=a_pod("web", labels={"a": "b"}), params={"dryRun": "All"}
        )
        assert dry.status == 201, await dry.text()
        await client.delete(f"{CONFIGS}/validatingwebhookconfigurations/a")


async def test_a_service_is_resolved_to_its_endpoints(
    client: Client, hooks: WebhookUnderTest
) -> None:
    hook = hooks.hook("service", allow)
    service = {"name": "hook", "namespace": "default", "path": "/service"}
    hook["clientConfig"] = {"service": service, "caBundle": hooks.bundle}
    await assert_installed(client, "Validating", hook)
    message = await refusal(client, PODS, a_pod(), code=500)
    assert message.endswith('failed to call webhook: service "hook" not found')

    await client.post(
        "/api/v1/namespaces/default/services",
        json={"metadata": {"name": "hook"},
              "spec": {"ports": [{"name": "https", "port": 443, "targetPort": 8443}]}},
    )  # fmt: skip
    message = await refusal(client, PODS, a_pod(), code=500)
    assert message.endswith('no endpoints available for service "hook"')

    slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    endpoints = {"metadata": {"name": "hook-1", "labels": {"kubernetes.io/service-name": "hook"}},
                 "addressType": "IPv4", "endpoints": [{"addresses": ["127.0.0.1"]}],
                 "ports": [{"name": "https", "port": hooks.port}]}  # fmt: skip
    assert (await client.post(slices, json=endpoints)).status == 201
    created = await client.post(PODS, json=a_pod())
    assert created.status == 201, await created.text()
    assert len(hooks.received) == 1


async def test_configurations_are_defaulted_validated_and_exempt(
    client: Client, hooks: WebhookUnderTest
) -> None:
    everything = [rule("*/*", group="*", version="*")]
    await assert_installed(client, "Validating", hooks.hook("no", deny("no"), rules=everything))
    url = f"{CONFIGS}/validatingwebhookconfigurations"

    shown = await read(client, f"{url}/a")
    first = shown["webhooks"][0]
    assert (first["failurePolicy"], first["timeoutSeconds"], first["rules"][0]["scope"]) == (
        "Fail", 10, "*")  # fmt: skip
    assert (await client.post(PODS, json=a_pod())).status == 400
    bad = hooks.hook("bad", allow, sideEffects="Some", admissionReviewVersions=[],
                     timeoutSeconds=60, clientConfig={"url": "http://x"},
                     matchConditions=[{"name": "x", "expression": "1 +"}])  # fmt: skip
    bad["name"] = "short"
    answer = await create(client, url, configuration("Validating", "bad", bad), code=422)
    assert {cause["field"] for cause in answer["details"]["causes"]} == {
        f"webhooks[0].{field}" for field in (
            "name", "sideEffects", "admissionReviewVersions", "timeoutSeconds", "clientConfig.url",
            "matchConditions[0].expression")
    }  # fmt: skip
    assert (await client.delete(f"{url}/a")).status == 200
    assert (await client.post(PODS, json=a_pod())).status == 201


async def test_a_rule_for_one_version_matches_requests_in_another(
    api: ApiUnderTest, client: Client, hooks: WebhookUnderTest
) -> None:
    two = json.loads(json.dumps(POD_GROUPS))
    newer = {**two["spec"]["versions"][0], "name": "v1", "storage": False}
    two["spec"]["versions"].append(newer)
    api.store.create("customresourcedefinitions", two)
    rules = [rule("podgroups", group="scheduling.volcano.sh", version="v1")]
    await assert_installed(client, "Mutating", hooks.hook("equal", label("a", "b"), rules=rules),
                  hooks.hook("exact", allow, rules=rules, matchPolicy="Exact"))  # fmt: skip

    url = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
    created = await create(client, url, pod_group("gang"))

    [seen] = [request for _, request in hooks.received]
    assert (seen["kind"]["version"], seen["requestKind"]["version"]) == ("v1", "v1beta1")
    assert seen["object"]["apiVersion"] == "scheduling.volcano.sh/v1"
    assert created["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert created["metadata"]["labels"] == {"a": "b"}


async def test_a_patch_that_conflicts_with_another_write_is_retried(
    api: ApiUnderTest, client: Client, hooks: WebhookUnderTest
) -> None:
    rivals = [{"metadata": {"labels": {"rival": "was-here"}}}]

    def meddle(_request: Json) -> Json:
        if rivals:
            api.store.patch("pods", "default", "web", rivals.pop())
        return {"allowed": True}

    await client.post(PODS, json=a_pod())
    rules = [rule("pods", operations=["UPDATE"])]
    await assert_installed(client, "Validating", hooks.hook("meddle", meddle, rules=rules))

    changed = await client.patch(
        f"{PODS}/web", json={"metadata": {"labels": {"mine": "too"}}}, headers=MERGE
    )

    assert changed.status == 200
    assert (await changed.json())["metadata"]["labels"] == {"rival": "was-here", "mine": "too"}
    assert len(hooks.received) == 2


async def test_a_dry_run_with_side_effects_is_refused(
    api: ApiUnderTest, client: Client, hooks: WebhookUnderTest
) -> None:
    hook = hooks.hook("effects", allow, sideEffects="NoneOnDryRun")
    await assert_installed(client, "Validating", hook)

    assert (await client.post(PODS, json=a_pod(), params={"dryRun": "All"})).status == 201
    assert hooks.requests("/effects")[0]["dryRun"] is True
    assert api.store.find("pods", "default", "web") is None
    patched = base64.b64encode(b"not a patch").decode()
    hooks.answers["/effects"] = lambda _r: {"allowed": True, "patch": patched}
    assert (await client.post(PODS, json=a_pod())).status == 500


async def test_exec_is_reviewed_as_connect(
    api: ApiUnderTest, client: Client, hooks: WebhookUnderTest
) -> None:
    rules = [rule("pods/exec", operations=["CONNECT"])]
    await assert_installed(client, "Validating", hooks.hook("door", deny("locked"), rules=rules))
    await client.post(PODS, json=a_pod())
    api.store.patch("pods", "default", "web", {"spec": {"nodeName": "n"}}, subresource="binding")

    query = [("command", "sh"), ("command", "-c"), ("stdin", "true")]
    message = (await read(client, f"{PODS}/web/exec", params=query, code=400))["message"]

    assert message.endswith("denied the request: locked")
    [seen] = hooks.requests("/door")
    assert (seen["operation"], seen["subResource"]) == ("CONNECT", "exec")
    assert seen["object"] == {"kind": "PodExecOptions", "apiVersion": "v1", "stdin": True,
                              "command": ["sh", "-c"]}  # fmt: skip
