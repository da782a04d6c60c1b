"""The annotation policy, as an API server enforces it without the webhook."""

from typing import Any

import aiohttp
import pytest

from services.webhook.annotation_policy import annotation_policy, writers
from services.webhook.registration import EXEMPT_LABEL
from shared.dialects.reserved import EXEMPT
from tests.support.simcluster.apiserver import api_server

PODS = "/api/v1/namespaces/default/pods"
RESOURCES = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
IDS = "volcano.sh/vgpu-ids-new"


async def install(client: aiohttp.ClientSession, *users: str) -> None:
    for obj in annotation_policy(users):
        path = f"/apis/{obj['apiVersion']}/{RESOURCES[str(obj['kind'])]}"
        async with client.post(path, json=obj) as response:
            assert response.status == 201, await response.text()


def pod(name: str, **notes: str) -> dict[str, Any]:
    main = {"name": "main", "image": "app"}
    meta: dict[str, Any] = {"name": name} | ({"annotations": notes} if notes else {})
    return {"metadata": meta, "spec": {"containers": [main]}}


async def created(client: aiohttp.ClientSession, obj: dict[str, Any]) -> tuple[int, str]:
    async with client.post(PODS, json=obj) as response:
        return response.status, str((await response.json()).get("message"))


async def annotated(
    client: aiohttp.ClientSession, name: str, notes: dict[str, str | None]
) -> tuple[int, str]:
    kind = {"Content-Type": "application/merge-patch+json"}
    body = {"metadata": {"annotations": notes}}
    async with client.patch(f"{PODS}/{name}", json=body, headers=kind) as response:
        return response.status, str((await response.json()).get("message"))


@pytest.mark.parametrize("key", [IDS, "leasehold.dev/lease", "tencent.com/predicate-gpu-idx-0"])
async def test_gpusharing_8_a_pod_that_is_created_with_an_assignment_is_denied(key: str) -> None:
    async with api_server() as api, api.client() as client:
        await install(client, *writers("leasehold-system", "leasehold-agents"))

        status, text = await created(client, pod("forged", **{key: "x"}))
        plain, _ = await created(client, pod("plain", mine="stays"))

    assert (status, plain) == (403, 201)
    assert key in text


async def test_assignments_are_neither_added_changed_nor_removed_by_others() -> None:
    async with api_server() as api, api.client() as client:
        await created(client, pod("assigned", **{IDS: "GPU-a,NVIDIA,1,1:"}))
        await created(client, pod("free"))
        await install(client, *writers("leasehold-system", "leasehold-agents"))

        answers = [
            await annotated(client, "free", {IDS: "GPU-b"}),
            await annotated(client, "assigned", {IDS: "GPU-b"}),
            await annotated(client, "assigned", {IDS: None}),
        ]
        own, _ = await annotated(client, "assigned", {"mine": "x"})

    assert [status for status, _ in answers] == [403, 403, 403]
    assert own == 200


async def test_only_a_labelled_namespace_exempts_pods_and_they_stay_exempt() -> None:
    label = {"Content-Type": "application/merge-patch+json"}
    namespace = "/api/v1/namespaces/default"
    async with api_server() as api, api.client() as client:
        await install(client, *writers("leasehold-system", "leasehold-agents"))
        new, text = await created(client, pod("forged", **{EXEMPT: "true"}))
        await created(client, pod("train"))
        later, _ = await annotated(client, "train", {EXEMPT: "true"})

        for value, wanted in (("true", 200), ("false", 200)):
            body = {"metadata": {"labels": {EXEMPT_LABEL: value}}}
            async with client.patch(namespace, json=body, headers=label) as response:
                assert response.status == 200
            status, _ = await annotated(client, "train", {EXEMPT: "true", "mine": value})
            assert status == wanted
        await created(client, pod("other"))
        again, _ = await annotated(client, "other", {EXEMPT: "true"})

    assert (new, later, again) == (403, 403, 403)
    assert EXEMPT_LABEL in text


async def test_the_services_that_write_assignments_may_change_them() -> None:
    async with api_server() as api, api.client() as client:
        await created(client, pod("assigned", **{IDS: "x"}))
        await install(client, "kubernetes-admin")  # the client's user in the simulated API server

        status, text = await annotated(client, "assigned", {IDS: "y"})

    assert status == 200, text
