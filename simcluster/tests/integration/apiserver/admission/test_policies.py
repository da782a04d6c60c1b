"""ValidatingAdmissionPolicies: what expressions refuse, in which words, and where they apply."""

from typing import Any

import pytest

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.apiserver import (
    PODS,
    Client,
    a_pod,
    create,
    refusal,
)

CONFIGS = "/apis/admissionregistration.k8s.io/v1"
LIMIT = "object.spec.containers.all(c, has(c.resources.limits))"


async def assert_installed(
    client: Client,
    *validations: Json,
    actions: tuple[str, ...] = ("Deny",),
    binding: Json | None = None,
    **spec: Any,
) -> None:
    rule = {"operations": ["CREATE", "UPDATE"], "apiGroups": [""], "apiVersions": ["v1"],
            "resources": ["pods"]}  # fmt: skip
    rules = {"resourceRules": [rule]}
    wanted = {"matchConstraints": rules, "validations": validations, **spec}
    policy = {"metadata": {"name": "limits"}, "spec": wanted}
    where = {"policyName": "limits", "validationActions": actions, **(binding or {})}
    bound = {"metadata": {"name": "here"}, "spec": where}
    for plural, body in (("policies", policy), ("policybindings", bound)):
        await create(client, f"{CONFIGS}/validatingadmission{plural}", body)


async def test_a_bound_policy_denies_with_kubernetes_texts(client: Client) -> None:
    await assert_installed(client, {"expression": LIMIT})

    assert await refusal(client, PODS, a_pod(), code=422) == (
        "pods \"web\" is forbidden: ValidatingAdmissionPolicy 'limits' with binding 'here' denied "
        f"request: failed expression: {LIMIT}"
    )
    assert (await client.post(PODS, json=a_pod(limits={"cpu": "1"}))).status == 201
    await client.delete(f"{CONFIGS}/validatingadmissionpolicybindings/here")
    assert (await client.post(PODS, json=a_pod("free"))).status == 201


@pytest.mark.parametrize(
    ("validation", "message", "code"),
    [
        ({"message": "say your limits"}, "denied request: say your limits", 422),
        ({"messageExpression": "'pod ' + object.metadata.name + ' of ' + request.namespace"},
         "denied request: pod web of default", 422),
        ({"messageExpression": "object.nothing", "message": "plain"}, "request: plain", 422),
        ({"message": "no", "reason": "Forbidden"}, "denied request: no", 403),
    ],
)  # fmt: skip
async def test_a_denial_has_the_message_of_its_validation(
    client: Client, validation: Json, message: str, code: int
) -> None:
    await assert_installed(client, {"expression": LIMIT, **validation})

    assert (await refusal(client, PODS, a_pod(), code=code)).endswith(message)


async def test_a_binding_may_only_warn(client: Client) -> None:
    await assert_installed(
        client, {"expression": LIMIT, "message": "mind"}, actions=("Warn", "Audit")
    )

    created = await client.post(PODS, json=a_pod())

    assert created.status == 201
    assert created.headers["Warning"] == (
        "299 - \"Validation failed for ValidatingAdmissionPolicy 'limits' with binding 'here': "
        'mind"'
    )


async def test_expressions_use_variables_conditions_and_namespaces(client: Client) -> None:
    await assert_installed(
        client,
        {"expression": "variables.memory.all(m, quantity(m).isLessThan(quantity('1Gi')))"},
        {"expression": "namespaceObject.metadata.name == 'default'"},
        variables=[
            {"name": "limits", "expression": "object.spec.containers.map(c, c.resources.limits)"},
            {"name": "memory", "expression": "variables.limits.map(l, l.memory)"},
        ],
        matchConditions=[{"name": "memory",
                          "expression": "object.metadata.name.startsWith('m')"}],
    )  # fmt: skip

    assert (await client.post(PODS, json=a_pod("other"))).status == 201
    assert (await client.post(PODS, json=a_pod("m1", {"memory": "512Mi"}))).status == 201
    message = await refusal(client, PODS, a_pod("m2", {"memory": "2Gi"}), code=422)
    assert "failed expression: variables.memory" in message


@pytest.mark.parametrize(("policy", "code"), [("Fail", 422), ("Ignore", 201)])
async def test_an_error_in_an_expression_follows_the_failure_policy(
    client: Client, policy: str, code: int
) -> None:
    await assert_installed(client, {"expression": "object.nothing.here == 1"}, failurePolicy=policy)

    answer = await create(client, PODS, a_pod(), code=code)

    assert code == 201 or "resulted in error: no such key: nothing" in answer["message"]


async def test_params_are_the_object_that_the_binding_names(client: Client) -> None:
    maps = "/api/v1/namespaces/default/configmaps"
    ref = {"name": "settings", "parameterNotFoundAction": "Deny"}
    await assert_installed(
        client,
        {"expression": "object.metadata.name != params.data.forbidden"},
        paramKind={"apiVersion": "v1", "kind": "ConfigMap"},
        binding={"paramRef": ref},
    )
    assert "no params found" in await refusal(client, PODS, a_pod(), code=422)

    await client.post(maps, json={"metadata": {"name": "settings"}, "data": {"forbidden": "web"}})

    assert "failed expression" in await refusal(client, PODS, a_pod(), code=422)
    assert (await client.post(PODS, json=a_pod("other"))).status == 201


async def test_bindings_and_exclusions_narrow_a_policy(client: Client) -> None:
    elsewhere = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn",
                                       "values": ["default"]}]}  # fmt: skip
    await assert_installed(client, {"expression": "false"},
                  binding={"matchResources": {"namespaceSelector": elsewhere}})  # fmt: skip

    assert (await client.post(PODS, json=a_pod())).status == 201
    there = "/api/v1/namespaces/kube-system/pods"
    assert "failed expression: false" in await refusal(
        client, there, a_pod() | {"metadata": {"name": "web"}}, code=422
    )


async def test_expressions_that_do_not_compile_are_refused(client: Client) -> None:
    policy = {"metadata": {"name": "bad"}, "spec": {"validations": [{"expression": "1 +"}]}}

    answer = await client.post(f"{CONFIGS}/validatingadmissionpolicies", json=policy)

    body = await answer.json()
    assert answer.status == 422
    assert {cause["field"] for cause in body["details"]["causes"]} == {
        "spec.matchConstraints.resourceRules", "spec.validations[0].expression"}  # fmt: skip
