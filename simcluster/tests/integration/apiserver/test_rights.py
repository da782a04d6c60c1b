"""What roles allow, by requests with the tokens of accounts and as other users."""

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from services.cli.up.installation import ACCOUNTS, CLAIMS, KUBE_SCHEDULER, installation
from shared.model.names import SYSTEM_NAMESPACE
from simcluster.apimachinery.objects import Json
from simcluster.installation import Installation
from tests.support.simcluster.apiserver import (
    MERGE,
    ApiUnderTest,
    Client,
    body_of,
    create,
    merge,
    read,
)

RBAC = "/apis/rbac.authorization.k8s.io/v1"
PODS = "/api/v1/namespaces/default/pods"
NAMESPACES = "/api/v1/namespaces"
BINDINGS = f"{RBAC}/namespaces/default/rolebindings"
CLAIMS_PATH = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
APPLY = {"Content-Type": "application/apply-patch+yaml"}
ALICE = {"Impersonate-User": "alice"}


def binding(name: str, role: str, *, kind: str = "ClusterRole") -> Json:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role}
    subjects = [{"kind": "User", "name": "alice"}]
    return {"metadata": {"name": name}, "roleRef": reference, "subjects": subjects}


def role(name: str, *rules: Json, labels: Json | None = None) -> Json:
    return {"metadata": {"name": name, "labels": labels or {}}, "rules": list(rules)}


async def as_alice(client: Client, path: str, *, code: int, **more: Any) -> Any:
    return await read(client, path, code=code, headers=ALICE, **more)


async def test_a_role_counts_from_its_binding_until_either_is_gone(client: Client) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    await create(client, f"{RBAC}/namespaces/default/roles", role("lists", rule))

    before = await as_alice(client, PODS, code=403)
    await create(client, BINDINGS, binding("alice", "lists", kind="Role"))
    await as_alice(client, PODS, code=200)
    elsewhere = await as_alice(client, "/api/v1/namespaces/kube-system/pods", code=403)
    everywhere = await as_alice(client, "/api/v1/pods", code=403)
    await merge(client, f"{RBAC}/namespaces/default/roles/lists", {"rules": []})
    await as_alice(client, PODS, code=403)

    words = 'pods is forbidden: User "alice" cannot list resource "pods" in API group "" '
    assert before["message"] == f'{words}in the namespace "default"'
    assert elsewhere["message"] == f'{words}in the namespace "kube-system"'
    assert everywhere["message"] == f"{words}at the cluster scope"


async def test_the_roles_of_users_have_what_others_add_to_them(client: Client) -> None:
    await create(client, BINDINGS, binding("alice", "view"))
    await as_alice(client, PODS, code=200)
    await as_alice(client, "/api/v1/namespaces/default/secrets", code=403)
    await body_of(await client.post(PODS, json={}, headers=ALICE), 403)

    added = role(
        "more",
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]},
        labels={"rbac.authorization.k8s.io/aggregate-to-view": "true"},
    )
    await create(client, f"{RBAC}/clusterroles", added)

    await as_alice(client, "/api/v1/namespaces/default/secrets", code=200)


async def test_editors_of_a_namespace_review_its_access_only(client: Client) -> None:
    await create(client, BINDINGS, binding("alice", "admin"))
    group = "/apis/authorization.k8s.io/v1"
    of_bob: Json = {"verb": "get", "resource": "pods", "namespace": "default"}
    review = {"kind": "LocalSubjectAccessReview", "spec": {"user": "alice",
              "resourceAttributes": of_bob}}  # fmt: skip

    path = f"{group}/namespaces/default/localsubjectaccessreviews"
    answer = await create(client, path, review, headers=ALICE)
    elsewhere = path.replace("default", "kube-system")
    await create(client, elsewhere, review, code=403, headers=ALICE)
    of_bob["namespace"] = "kube-system"
    other = await create(client, path, review, code=422, headers=ALICE)

    assert answer["status"] == {"allowed": True}
    assert "must match metadata.namespace: default" in other["message"]


async def test_nobody_grants_more_than_they_have(client: Client) -> None:
    await create(client, BINDINGS, binding("alice", "admin"))
    roles = f"{RBAC}/namespaces/default/roles"
    reads = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    signs = {"apiGroups": ["certificates.k8s.io"], "resources": ["certificatesigningrequests"],
             "verbs": ["get", "list"]}  # fmt: skip

    async def as_alice_creates(path: str, body: Json, code: int) -> str:
        return str((await create(client, path, body, code=code, headers=ALICE)).get("message"))

    await as_alice_creates(roles, role("reads", reads), 201)
    await as_alice_creates(BINDINGS, binding("bob", "view"), 201)
    refused = await as_alice_creates(roles, role("signs", reads, signs), 403)
    bound = await as_alice_creates(BINDINGS, binding("carol", "cluster-admin"), 403)
    patched = await client.patch(
        f"{roles}/reads", json={"rules": [signs]}, headers={**ALICE, **MERGE}
    )
    await body_of(patched, 403)
    escalate = {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles"],
                "verbs": ["escalate"]}  # fmt: skip
    await create(client, roles, role("escalates", escalate))
    await create(client, BINDINGS, binding("escalates", "escalates", kind="Role"))
    await as_alice_creates(roles, role("signs", signs), 201)

    assert refused == (
        'roles.rbac.authorization.k8s.io "signs" is forbidden: user "alice" '
        '(groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently '
        'held:\n{APIGroups:["certificates.k8s.io"], Resources:["certificatesigningrequests"], '
        'Verbs:["get"]}\n{APIGroups:["certificates.k8s.io"], '
        'Resources:["certificatesigningrequests"], Verbs:["list"]}'
    )
    assert '{APIGroups:["*"], Resources:["*"], Verbs:["*"]}' in bound


async def test_an_apply_that_creates_needs_the_right_to_create(client: Client) -> None:
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["patch"]}
    await create(client, f"{RBAC}/clusterroles", role("patches", rule))
    await create(client, BINDINGS, binding("alice", "patches"))
    path = "/api/v1/namespaces/default/configmaps/one"
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}}

    async def apply() -> aiohttp.ClientResponse:
        query = {"fieldManager": "alice"}
        return await client.patch(path, json=body, params=query, headers=ALICE | APPLY)

    refused = await body_of(await apply(), 403)
    await create(client, "/api/v1/namespaces/default/configmaps", body)
    await body_of(await apply(), 200)

    assert 'cannot create resource "configmaps"' in refused["message"]


async def test_a_path_that_is_no_resource_needs_a_right_too(client: Client) -> None:
    refused = await as_alice(client, "/metrics", code=403)
    await as_alice(client, "/apis", code=200)

    rules = role("metrics", {"nonResourceURLs": ["/metrics"], "verbs": ["get"]})
    await create(client, f"{RBAC}/clusterroles", rules)
    await create(client, f"{RBAC}/clusterrolebindings", binding("alice", "metrics"))

    assert refused["message"] == 'forbidden: User "alice" cannot get path "/metrics"'
    assert (await client.get("/metrics", headers=ALICE)).status == 200


@pytest.mark.parametrize(("path", "kind"), [(CLAIMS_PATH, "ResourceClaim"),
                                            (TEMPLATES, "ResourceClaimTemplate")])  # fmt: skip
async def test_admin_access_needs_the_label_of_the_namespace(
    client: Client, path: str, kind: str
) -> None:
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu", "adminAccess": True}}
    spec: Json = {"devices": {"requests": [request]}}
    body = {
        "metadata": {"name": "one"},
        "spec": spec if kind == "ResourceClaim" else {"spec": spec},
    }

    refused = await create(client, path, body, code=422)
    labels = {"resource.kubernetes.io/admin-access": "true"}
    await merge(client, f"{NAMESPACES}/default", {"metadata": {"labels": labels}})
    await create(client, path, body)

    assert refused["message"] == (
        f'{kind}.resource.k8s.io "one" is invalid: : Forbidden: admin access to devices requires '
        "the `resource.kubernetes.io/admin-access: true` label on the containing namespace"
    )


async def test_each_part_of_a_claims_status_needs_a_right(client: Client) -> None:
    claims = f"{CLAIMS_PATH}/one"
    group = "resource.k8s.io"
    await create(client, CLAIMS_PATH, {"metadata": {"name": "one"}, "spec": {"devices": {}}})
    rules: list[Json] = [
        {"apiGroups": [group], "resources": ["resourceclaims/status"], "verbs": ["patch"]}
    ]
    await create(client, f"{RBAC}/clusterroles", role("claims", *rules))
    await create(client, f"{RBAC}/clusterrolebindings", binding("alice", "claims"))
    device = {"driver": "gpu.example.com", "pool": "node-0", "device": "gpu-0"}
    allocation = {"devices": {"results": [{**device, "request": "gpu"}]}}

    async def patch(status: Json, *, code: int) -> str:
        answer = await client.patch(
            f"{claims}/status", json={"status": status}, headers={**ALICE, **MERGE}
        )
        return str((await body_of(answer, code)).get("message"))

    async def allow(subresource: str, verb: str, **more: Any) -> None:
        resources = [f"resourceclaims/{subresource}"]
        rules.append({"apiGroups": [group], "resources": resources, "verbs": [verb], **more})
        await merge(client, f"{RBAC}/clusterroles/claims", {"rules": rules})

    unbound = await patch({"allocation": allocation}, code=403)
    await allow("binding", "patch")
    await patch({"allocation": allocation}, code=200)
    unanswered = await patch({"devices": [device]}, code=403)
    await allow("driver", "arbitrary-node:patch", resourceNames=["other.example.com"])
    await patch({"devices": [device]}, code=403)
    await allow("driver", "arbitrary-node:patch", resourceNames=["gpu.example.com"])
    await patch({"devices": [device]}, code=200)

    assert 'cannot patch resource "resourceclaims/binding"' in unbound
    assert 'cannot arbitrary-node:patch resource "resourceclaims/driver"' in unanswered


@pytest.mark.parametrize("components", [(), (CLAIMS, KUBE_SCHEDULER)])
async def test_services_of_one_machine_have_the_rights_of_the_manifests_only(
    api: ApiUnderTest, client: Client, tmp_path: Path, components: tuple[str, ...]
) -> None:
    described = installation(
        str(tmp_path),
        ("node-0",),
        policies=True,
        aggregated="127.0.0.1:8443",
        components=components,
    )
    msgspec.convert(described, Installation).create_objects(api.store)
    allowed: dict[str, dict[str, bool]] = {}
    tried = {
        "bind": ("create", "", "pods", "binding"),
        "evict": ("create", "", "pods", "eviction"),
        "read secrets": ("list", "", "secrets", ""),
        "delete pods": ("delete", "", "pods", ""),
        "answer claims": ("patch", "resource.k8s.io", "resourceclaims", "status"),
    }
    for account in ACCOUNTS:
        user = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{account}"
        for what, (verb, group, resource, subresource) in tried.items():
            asked = {"verb": verb, "group": group, "resource": resource, "namespace": "default",
                     "subresource": subresource}  # fmt: skip
            review = {"kind": "SubjectAccessReview",
                      "spec": {"user": user, "resourceAttributes": asked}}  # fmt: skip
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            answer = await create(client, path, review)
            allowed.setdefault(what, {})[account] = answer["status"]["allowed"]

    permitted = {what: [name for name, may in row.items() if may] for what, row in allowed.items()}
    assert permitted == {
        "bind": ["binder"],
        "evict": ["binder"],
        "read secrets": [],
        "delete pods": [],
        "answer claims": ["binder"] if components else [],
    }
