"""Requests with each service's token: denied by its roles, by a policy, or allowed."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from shared.model.names import SYSTEM_NAMESPACE
from shared.model.requests.claim import DRIVER
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.installed import created, install_rights, token_of
from tools.generate.component_tries import COMPONENT_TRIES, tries_of
from tools.generate.security import components, manifests
from tools.generate.tries import (
    CLAIMS,
    GROUPS,
    OTHER,
    OWN,
    PODS,
    SLICES,
    TRIES,
    WEBHOOK,
    Try,
    TryOutcome,
)

K8S = Path(__file__).parents[3] / "k8s"
POD_GROUPS = Path(__file__).parents[2] / "support/crds/kubernetes_podgroup.yaml"
MERGE = {"Content-Type": "application/merge-patch+json"}


ROWS = [
    *((account, "") for account in TRIES),
    *((account, name) for name, accounts in COMPONENT_TRIES.items() for account in accounts),
]


@contextlib.asynccontextmanager
async def cluster(component: str) -> AsyncIterator[ApiUnderTest]:
    """Two nodes with a tenant's pod each, and everything that the tries aim at."""
    added = (K8S / "components" / component).glob("*.yaml") if component else ()
    async with api_server() as api, api.client() as client:
        for node in (OWN, OTHER):
            await created(client, "/api/v1/nodes", {"metadata": {"name": node}})
        await install_rights(api, *added)
        for name, node in (("own", OWN), ("other", OTHER), ("waiting", "")):
            spec: dict[str, Any] = {
                "containers": [{"name": "main", "image": "app"}],
                "nodeName": node,
            }
            await created(client, PODS, {"metadata": {"name": name}, "spec": spec})
        for kind in ("secrets", "configmaps"):
            path = f"/api/v1/namespaces/team-a/{kind}"
            await created(client, path, {"metadata": {"name": "own"}})
        for name in ("auth", "webhook-certificate"):
            path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets"
            await created(client, path, {"metadata": {"name": name}})
        await created(client, WEBHOOK, {"metadata": {"name": "leasehold"}})
        requests = [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]
        claim: dict[str, Any] = {
            "metadata": {"name": "own"},
            "spec": {"devices": {"requests": requests}},
        }
        await created(client, CLAIMS, claim)
        result = {"request": "gpu", "driver": DRIVER, "pool": OTHER, "device": "gpu"}
        status: dict[str, Any] = {"status": {"allocation": {"devices": {"results": [result]}}}}
        async with client.patch(f"{CLAIMS}/own/status", json=status, headers=MERGE) as response:
            assert response.status == 200, await response.text()
        pool = {"name": OTHER, "generation": 1, "resourceSliceCount": 1}
        definition = yaml.safe_load(POD_GROUPS.read_text())
        await created(client, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        await created(client, GROUPS, {"metadata": {"name": "own"}, "spec": {}})
        spec = {"driver": DRIVER, "nodeName": OTHER, "pool": pool}
        await created(client, SLICES, {"metadata": {"name": "other"}, "spec": spec})
        yield api


def bound_accounts(folder: str) -> set[str]:
    """Return the service accounts that a folder of manifests creates, or gives permissions."""
    found = list(manifests(folder))
    created_here = {it["metadata"]["name"] for it in found if it["kind"] == "ServiceAccount"}
    subjects = [subject for it in found for subject in it.get("subjects", ())]
    return created_here | {it["name"] for it in subjects if it["kind"] == "ServiceAccount"}


def test_each_account_of_the_manifests_and_of_each_component_has_its_row() -> None:
    added = {name: bound_accounts(f"components/{name}") for name in components()}

    assert bound_accounts("base") == TRIES.keys()
    assert {name: accounts for name, accounts in added.items() if accounts} == {
        name: set(accounts) for name, accounts in COMPONENT_TRIES.items()
    }


async def outcome_of(session: aiohttp.ClientSession, one: Try) -> TryOutcome | str:
    headers = MERGE if one.method == "PATCH" else {}
    async with session.request(one.method, one.path, json=one.body, headers=headers) as response:
        text = await response.text()
    if response.status == 403:
        if "ValidatingAdmissionPolicy 'leasehold-" in text:
            return TryOutcome.POLICY
        return TryOutcome.RBAC if "cannot " in text else text
    if response.status == 404 and "/proxy/" in one.path:
        return TryOutcome.ALLOWED  # the simulated API server has no proxy to kubelets
    return TryOutcome.ALLOWED if response.status < 400 else f"{response.status}: {text}"


@pytest.mark.parametrize(("account", "component"), ROWS)
async def test_a_stolen_token_does_only_what_the_page_says(account: str, component: str) -> None:
    async with cluster(component) as api:
        async with api.client() as client:
            token = await token_of(client, account, OWN)
        outcomes = {}
        async with aiohttp.ClientSession(
            api.url,
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(api.ca))),
        ) as session:
            tries = tries_of(account, component)
            for one in tries:
                outcomes[one.words] = await outcome_of(session, one)

    assert outcomes == {one.words: one.outcome for one in tries}
