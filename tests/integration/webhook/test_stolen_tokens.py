"""Requests with each service's token: denied by its roles, by a policy, or allowed."""

import contextlib
import ssl
from collections.abc import AsyncIterator

import aiohttp
import pytest

from shared.model.names import SYSTEM_NAMESPACE
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.installed import created, install_rights, token_of
from tools.generate.tries import (
    EVERYWHERE,
    OTHER,
    OWN,
    PODS,
    TRIES,
    WEBHOOK,
    Try,
    TryOutcome,
)

MERGE = {"Content-Type": "application/merge-patch+json"}


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[ApiUnderTest]:
    """Two nodes with a tenant's pod each, and everything that the tries aim at."""
    async with api_server() as api, api.client() as client:
        for node in (OWN, OTHER):
            await created(client, "/api/v1/nodes", {"metadata": {"name": node}})
        await install_rights(api)
        for name, node in (("own", OWN), ("other", OTHER), ("waiting", "")):
            spec = {"containers": [{"name": "main", "image": "app"}], "nodeName": node}
            await created(client, PODS, {"metadata": {"name": name}, "spec": spec})
        for kind in ("secrets", "configmaps"):
            path = f"/api/v1/namespaces/team-a/{kind}"
            await created(client, path, {"metadata": {"name": "own"}})
        for name in ("auth", "webhook-certificate"):
            path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets"
            await created(client, path, {"metadata": {"name": name}})
        await created(client, WEBHOOK, {"metadata": {"name": "leasehold"}})
        yield api


async def outcome_of(session: aiohttp.ClientSession, one: Try) -> TryOutcome | str:
    headers = MERGE if one.method == "PATCH" else {}
    async with session.request(one.method, one.path, json=one.body, headers=headers) as response:
        text = await response.text()
    if response.status == 403:
        if "ValidatingAdmissionPolicy 'leasehold-" in text:
            return TryOutcome.POLICY
        return TryOutcome.RBAC if "cannot " in text else text
    return TryOutcome.ALLOWED if response.status < 400 else f"{response.status}: {text}"


@pytest.mark.parametrize("account", TRIES)
async def test_a_stolen_token_does_only_what_the_page_says(account: str) -> None:
    async with cluster() as api:
        async with api.client() as client:
            token = await token_of(client, account, OWN)
        outcomes = {}
        async with aiohttp.ClientSession(
            api.url,
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(api.ca))),
        ) as session:
            tries = (*TRIES[account], *EVERYWHERE)
            for one in tries:
                outcomes[one.words] = await outcome_of(session, one)

    assert outcomes == {one.words: one.outcome for one in tries}
