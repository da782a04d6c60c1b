"""An allocation of a ResourceClaim is answered in the scheduler's write, through an API server."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from shared.model.events.request_reply import ClaimLeaseReply
from shared.model.requests.claim import DRIVER, LEASED, REFUSED
from tests.support.webhook.replica import Replica, cluster, replica

SCHEDULERS = Path(__file__).parents[3] / "k8s/components/dra/schedulers.yaml"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
ENTRY = {
    "driver": DRIVER,
    "pool": "a",
    "device": "gpu",
    "conditions": [{"type": LEASED, "status": "True", "reason": "Leased", "message": "yes"}],
}
LEASED_REPLY = ClaimLeaseReply(devices=(json.dumps(ENTRY),))


@asynccontextmanager
async def allocations(directory: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, Replica]]:
    async with cluster() as (api, kube, client), replica(api, kube, directory) as one:
        yield client, one


async def made(client: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    requests = [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]
    claim = {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}}
    async with client.post(CLAIMS, json=claim) as response:
        assert response.status == 201
        return dict(await response.json())


async def allocate(
    client: aiohttp.ClientSession, claim: dict[str, Any], driver: str = DRIVER, query: str = ""
) -> tuple[int, dict[str, Any]]:
    """Write an allocation as kube-scheduler does."""
    result: dict[str, Any] = {"request": "gpu", "driver": driver, "pool": "a", "device": "gpu"}
    if driver == DRIVER:
        result |= {"bindingConditions": [LEASED], "bindingFailureConditions": [REFUSED]}
    status = {"allocation": {"devices": {"results": [result]}}}
    path = f"{CLAIMS}/{claim['metadata']['name']}/status{query}"
    async with client.put(path, json={**claim, "status": status}) as response:
        return response.status, dict(await response.json())


async def test_an_allocation_is_stored_with_its_answer(tmp_path: Path) -> None:
    async with allocations(tmp_path) as (client, one):
        claim = await made(client, "c")
        one.binders.replies.append(LEASED_REPLY)

        status, stored = await allocate(client, claim)

    assert (status, stored["status"]["devices"]) == (200, [ENTRY])
    [request] = one.binders.requests
    assert (request.claim.claim, request.claim.node) == (
        claim["metadata"]["uid"],
        "a",
    )


async def test_a_refused_allocation_is_not_stored(tmp_path: Path) -> None:
    async with allocations(tmp_path) as (client, one):
        claim = await made(client, "c")
        one.binders.replies.append(ClaimLeaseReply(refusal="GPU 0 has 2000 MiB free"))

        status, refused = await allocate(client, claim)
        one.binders.replies.append(LEASED_REPLY)
        again, _ = await allocate(client, claim)

    assert status == 403
    assert refused["message"].endswith("denied the request: GPU 0 has 2000 MiB free")
    assert again == 200, "the claim has not changed"


async def test_without_a_reply_the_allocation_is_stored_as_it_is(tmp_path: Path) -> None:
    async with allocations(tmp_path) as (client, one):
        status, stored = await allocate(client, await made(client, "c"))
        one.binders.replies.append(ClaimLeaseReply())
        undecided, _ = await allocate(client, await made(client, "d"))

    assert (status, undecided) == (200, 200)
    assert "devices" not in stored["status"]
    assert len(one.binders.requests) == 2


async def test_other_drivers_other_changes_and_dry_runs_ask_no_binder(tmp_path: Path) -> None:
    async with allocations(tmp_path) as (client, one):
        await allocate(client, await made(client, "other"), driver="gpu.example.com")
        claim = await made(client, "c")
        await allocate(client, claim, query="?dryRun=All")
        assert one.binders.requests == []
        one.binders.replies.append(LEASED_REPLY)
        _, stored = await allocate(client, claim)
        status = stored["status"] | {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}

        async with client.put(f"{CLAIMS}/c/status", json=stored | {"status": status}) as response:
            assert response.status == 200

    assert len(one.binders.requests) == 1


async def test_only_schedulers_that_may_write_the_answer_get_it(tmp_path: Path) -> None:
    """The simulated kube-scheduler is not an administrator."""
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path) as one:
        result = {"request": "gpu", "driver": DRIVER, "pool": "a", "device": "gpu"}
        status = {"allocation": {"devices": {"results": [result]}}}
        claims = [await made(client, name) for name in ("c", "d")]

        before = await api.server.write_status("resourceclaims", {**claims[0], "status": status})
        for role in yaml.safe_load_all(SCHEDULERS.read_text()):
            api.store.create(f"{role['kind'].lower()}s", role)
        one.binders.replies.append(LEASED_REPLY)
        after = await api.server.write_status("resourceclaims", {**claims[1], "status": status})

    assert "devices" not in before["status"]
    assert after["status"]["devices"] == [ENTRY]
    assert len(one.binders.requests) == 1
