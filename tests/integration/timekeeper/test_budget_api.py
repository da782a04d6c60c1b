"""The timekeeper's HTTP interface, that of GPUSharing included."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.timekeeper.rest.api import BudgetApi
from services.timekeeper.service import Timekeeper
from shared.credentials.authorization import AnonymousAuthenticator, load_tokens
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.runtime import health
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.timekeeper.accounts import (
    MINUTE_MS,
    T0,
    TEAM,
    AccountLedger,
    lease,
)

ADMIN = {"Authorization": "Bearer of-admins"}
MEMBER = {"Authorization": "Bearer of-team-a"}


def tokens(folder: Path) -> Path:
    file = folder / "tokens"
    file.write_text("# who may what\nof-admins *\nof-team-a team-a\n")
    return file


@asynccontextmanager
async def served(
    found: AccountLedger,
    timekeeper: Timekeeper,
    *,
    tokens: Path | None = None,
    kube: KubernetesClient | None = None,
    old_reports: str = "answer",
) -> AsyncIterator[aiohttp.ClientSession]:
    pages = BudgetApi(
        timekeeper,
        load_tokens(tokens) if tokens else AnonymousAuthenticator(),
        client=kube,
        old_reports=old_reports,
    )
    async with (
        health.served(pages.application(), "127.0.0.1:0") as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        yield session


async def answer(response: aiohttp.ClientResponse, status: int = 200) -> Any:
    text = await response.text()
    assert response.status == status, text
    return json.loads(text)


def pod(**containers: str) -> dict[str, Any]:
    states = {
        "ended": {"terminated": {"exitCode": 0}},
        "waits": {"waiting": {}},
        "runs": {"running": {}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "job", "namespace": TEAM},
        "spec": {"containers": [{"name": n.replace("_", "-"), "image": "x"} for n in containers]},
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": n.replace("_", "-"), "image": "x", "imageID": "x", "ready": False,
                 "restartCount": 0, "state": states[state]}
                for n, state in containers.items()
            ],
        },
    }  # fmt: skip


async def test_the_request_of_the_proof_of_concept_gets_a_reply_with_more_fields(
    opened: AccountLedger,
) -> None:
    timekeeper = opened.timekeeper()
    async with served(opened, timekeeper) as http:
        await answer(await http.get("/budget/team-a"), 503)
        await opened.journal("held", T0, lease("p"))
        await opened.count(T0 + 4 * MINUTE_MS, keeper=timekeeper)
        now = await answer(await http.get("/budget/team-a"))
        await opened.count(T0 + 30 * MINUTE_MS, keeper=timekeeper)
        later = await answer(await http.get("/budget/team-a"))
        unknown = await answer(await http.get("/budget/nobody"))

    assert now == {
        "budget_available": True,
        "budget": 10.0,
        "budget_remaining": 8.0,
        "state": "ok",
        "window": "2031-04",
        "resetAt": "2031-05-01T00:00:00Z",
        "currentRateMilliGPU": 500,
    }
    assert (later["budget_available"], later["budget_remaining"]) == (False, 0.0)
    assert (unknown["budget_available"], unknown["budget"]) == (True, None)


@pytest.mark.parametrize(
    "body",
    [
        {"usage_factor": -1e9, "pod_name": "job"},
        {"usage_factor": 1e9, "pod_name": "job"},
        {"usage_factor": 1, "pod_name": "of-somebody-else"},
        {"pod_name": ["job"]},
        [],
    ],
)
async def test_gpusharing_17_no_report_changes_a_balance_or_deletes_a_pod(
    opened: AccountLedger, api: ApiUnderTest, body: Any
) -> None:
    timekeeper = opened.timekeeper()
    await opened.journal("held", T0, lease("p"))
    await opened.count(T0 + MINUTE_MS, keeper=timekeeper)
    api.store.create(
        "namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}}
    )
    api.store.create("pods", pod(main="runs", gpu_sidecar="runs"))
    before = await opened.account()

    async with (
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
        served(opened, timekeeper, kube=kube) as http,
    ):
        await http.post("/budget/team-a/report", json=body)
        await http.post("/budget/team-a/increase", json=body)

    assert await opened.account() == before
    assert [each["metadata"]["name"] for each in api.store.list("pods")] == ["job"]


@pytest.mark.parametrize(
    ("containers", "over"),
    [
        ({"main": "runs", "gpu_sidecar": "runs"}, False),
        ({"main": "waits", "gpu_sidecar": "runs"}, False),
        ({"main": "ended", "other": "waits", "gpu_sidecar": "runs"}, False),
        ({"main": "ended", "gpu_sidecar": "runs"}, True),
    ],
)
async def test_gpusharing_17_a_sidecar_may_end_when_every_other_container_has(
    opened: AccountLedger, api: ApiUnderTest, containers: dict[str, str], over: bool
) -> None:
    api.store.create(
        "namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}}
    )
    made = pod(**containers)
    api.store.create("pods", made)
    api.store.patch("pods", TEAM, "job", {"status": made["status"]}, subresource="status")

    async with (
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
        served(opened, opened.timekeeper(), kube=kube) as http,
    ):
        reply = await http.post(
            "/budget/team-a/report", json={"pod_name": "job", "usage_factor": 1}
        )
        unknown_pod = await http.post(
            "/budget/team-a/report", json={"pod_name": "no", "usage_factor": 1}
        )
        assert await answer(reply) == {"terminate": over}
        assert await answer(unknown_pod) == {"terminate": True}


async def test_old_reports_can_be_answered_with_410_gone(opened: AccountLedger) -> None:
    async with served(opened, opened.timekeeper(), old_reports="gone") as http:
        message = await answer(await http.post("/budget/team-a/report", json={}), 410)

    assert "gpu-sidecar" in message["error"]


async def test_tokens_decide_which_caller_reads_and_grants(
    opened: AccountLedger, tmp_path: Path
) -> None:
    timekeeper = opened.timekeeper()
    await opened.count(T0, keeper=timekeeper)
    grants, body = "/budget/team-a/increase", {"minutes": 30, "reason": "deadline"}
    async with served(opened, timekeeper, tokens=tokens(tmp_path)) as http:
        await answer(await http.get("/budget/team-a"), 401)
        await answer(await http.get("/budget/team-b", headers=MEMBER), 403)
        await answer(await http.get("/budget/team-a", headers=MEMBER))
        await answer(await http.post(grants, headers=MEMBER, json=body), 403)
        keyed = ADMIN | {"Idempotency-Key": "k1"}
        for _ in range(2):
            granted = await answer(await http.post(grants, headers=keyed, json=body))
        for minutes in ("x", "nan", "1e400", 1e308, "1e999999999", 10**10, True, None):
            odd = {"minutes": minutes, "reason": "odd"}
            await answer(await http.post(grants, headers=ADMIN, json=odd), 400)
        await answer(await http.post(grants, headers=ADMIN, data=b'{"minutes": "\xff"}'), 400)
    async with served(opened, timekeeper) as http:
        await answer(await http.post(grants, json=body), 401)

    assert granted["budget_remaining"] == 40


async def test_a_malformed_line_of_the_token_file_is_named_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret-without-a-namespace\n")

    with pytest.raises(Exception, match="line 1") as refused:
        load_tokens(file)

    assert "secret" not in str(refused.value)
