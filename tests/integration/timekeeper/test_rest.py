"""The timekeeper's HTTP interface, that of GPUSharing included: callers, grants, certificates."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.timekeeper import rest_api
from services.timekeeper.rest_api import AT_ONCE_OF_ONE, MOST_WAITING, BudgetApi
from services.timekeeper.service import Timekeeper
from services.timekeeper.settings import TimekeeperSettings
from services.timekeeper.wiring import AuthorityConfigMap
from shared.credentials.authorization import (
    AnonymousAuthenticator,
    Authenticator,
    load_tokens,
)
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import SecretStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ErrorResponse, NotFoundError
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import Namespace
from shared.runtime import health
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.timekeeper.accounts import MINUTE_MS, T0, TEAM, AccountLedger, lease
from tests.support.waiting import until

ADMIN = {"Authorization": "Bearer of-admins"}
MEMBER = {"Authorization": "Bearer of-team-a"}
OTHER = Namespace("team-b")


@asynccontextmanager
async def served(
    timekeeper: Timekeeper,
    authenticator: Authenticator | None = None,
    *,
    kube: KubernetesClient | None = None,
    old_reports: str = "answer",
    tls: ssl.SSLContext | None = None,
    for_sidecars: bool = False,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve the interface, by default to anybody."""
    api = BudgetApi(
        timekeeper,
        authenticator or AnonymousAuthenticator(),
        client=kube,
        old_reports=old_reports,
    )
    pages = api.reports() if for_sidecars else api.application()
    async with (
        health.served(pages, "127.0.0.1:0", tls=(lambda: tls) if tls else None) as address,
        aiohttp.ClientSession(f"http{'s' if tls else ''}://{address}") as session,
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
    async with served(timekeeper) as http:
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
        served(timekeeper, kube=kube) as http,
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
        served(opened.timekeeper(), kube=kube) as http,
    ):
        reply = await http.post(
            "/budget/team-a/report", json={"pod_name": "job", "usage_factor": 1}
        )
        unknown_pod = await http.post(
            "/budget/team-a/report", json={"pod_name": "no", "usage_factor": 1}
        )
        assert await answer(reply) == {"terminate": over}
        assert await answer(unknown_pod) == {"terminate": True}


async def test_tokens_decide_which_caller_reads_and_grants(
    opened: AccountLedger, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who may what\nof-admins *\nof-team-a team-a\n")
    timekeeper = opened.timekeeper()
    await opened.count(T0, keeper=timekeeper)
    grants = "/budget/team-a/increase"
    body = {"minutes": 30, "reason": "deadline"}
    async with served(timekeeper, load_tokens(file)) as http:
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
        long = body | {"reason": "x" * 40_000}
        await answer(await http.post(grants, headers=ADMIN, json=long), 400)
        keyed = ADMIN | {"Idempotency-Key": "k" * 64}
        await answer(await http.post(grants, headers=keyed, json=body), 400)
    async with served(timekeeper) as http:
        await answer(await http.post(grants, json=body), 401)

    assert granted["budget_remaining"] == 40


def test_a_malformed_line_of_the_token_file_is_named_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret-without-a-namespace\n")

    with pytest.raises(Exception, match="line 1") as refused:
        load_tokens(file)

    assert "secret" not in str(refused.value)


async def test_the_api_server_decides_which_budgets_a_caller_reads_and_grants(
    opened: AccountLedger,
) -> None:
    reviews = Reviews()
    timekeeper = opened.timekeeper(charge_every_s=0)
    reviews.rights["member"] = {TEAM}
    await opened.journal("held", T0, lease("own"), lease("other", namespace=OTHER))
    await opened.count(T0 + MINUTE_MS, keeper=timekeeper)
    seen: dict[str, Any] = {}
    async with (
        reviewed(reviews, FakeClock()) as authenticator,
        served(timekeeper, authenticator) as http,
    ):

        async def status(caller: str, path: str) -> int:
            headers = {"Authorization": f"Bearer token-of-{caller}"}
            async with http.get(path, headers=headers) as response:
                return response.status

        for caller in ("root", "member", "stranger"):
            seen[caller] = [await status(caller, f"/budget/{where}") for where in (TEAM, OTHER)]
        unknown = await status("nobody", f"/budget/{TEAM}")
        body = {"minutes": 5, "reason": "because"}
        granted = {}
        for caller in ("member", "root"):
            headers = {"Authorization": f"Bearer token-of-{caller}"}
            async with http.post("/budget/team-a/increase", json=body, headers=headers) as response:
                granted[caller] = response.status, await response.text()

    assert seen == {"root": [200, 200], "member": [200, 403], "stranger": [403, 403]}
    assert unknown == 401
    assert granted["member"][0] == 403
    assert "gpubudgets/grants" in granted["member"][1]
    assert granted["root"][0] == 200


async def test_the_interface_is_served_with_the_certificate_of_a_secret_that_clients_trust(
    opened: AccountLedger, api: ApiUnderTest
) -> None:
    timekeeper = opened.timekeeper()
    maps = "/api/v1/namespaces/lh/configmaps"
    await opened.count(T0, keeper=timekeeper)
    async with KubernetesClient(load_credentials(api.kubeconfig, environ={})) as kube:
        await kube.create("/api/v1/namespaces", {"metadata": {"name": "lh"}})
        await kube.create(maps, {"metadata": {"name": "for-clients"}})
        authority = AuthorityConfigMap(kube, "lh", "for-clients")
        store = SecretStore(kube, "lh", "shared")
        now = partial(datetime.now, UTC)
        shown = ServingCertificate(store, authority.trust, ("127.0.0.1",), now)
        assert shown.unready_reason() is not None
        await shown.refresh()
        found = json.loads(await kube.read(f"{maps}/for-clients"))["data"]["ca.crt"]

    async with served(timekeeper, tls=shown.context) as http:
        trusting = ssl.create_default_context(cadata=found)
        assert (await http.get("/budget/team-a", ssl=trusting)).status == 200
        with pytest.raises(aiohttp.ClientError):
            await http.get("/budget/team-a", ssl=ssl.create_default_context())
        with pytest.raises(aiohttp.ClientError):
            await http.get(str(http._base_url).replace("https", "http"))


async def test_the_address_for_sidecars_serves_reports_only_which_may_be_gone(
    opened: AccountLedger,
) -> None:
    async with served(opened.timekeeper(), old_reports="gone", for_sidecars=True) as http:
        message = await answer(await http.post("/budget/team-a/report", json={}), 410)
        others = [await http.post("/budget/team-a/increase"), await http.get("/budget/team-a")]

    assert "gpu-sidecar" in message["error"]
    assert [each.status for each in others] == [404, 404]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"api": "0.0.0.0:8090"}, "shows every budget to every caller"),
        ({"auth": "tokens"}, "must be set together"),
        ({"auth": "kube", "tokens": Path("t")}, "must be set together"),
        ({"secret": "no-namespace"}, "NAMESPACE/NAME"),
        ({"authority": "map"}, "needs --secret"),
    ],
)
def test_open_or_contradictory_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        TimekeeperSettings(**settings).check()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"auth": "kube", "api": "0.0.0.0:8090", "secret": "ns/name", "authority": "map"},
        {"tokens": Path("t"), "api": "0.0.0.0:8090", "tls_dir": Path("d")},
    ],
)
def test_settings_for_one_machine_and_for_a_cluster_are_valid(settings: dict[str, Any]) -> None:
    TimekeeperSettings(**settings).check()


class SlowCluster:
    """A client of an API server that answers nothing until it is released."""

    def __init__(self) -> None:
        self.reads = list[str]()
        self.released = asyncio.Event()

    async def read(self, path: str, _: object) -> object:
        self.reads.append(path)
        await self.released.wait()
        raise UnavailableError("it is stopping")


async def test_reports_of_one_address_wait_for_each_other_and_those_of_others_do_not(
    opened: AccountLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_api, "MOST_READS", 1_000)
    cluster = SlowCluster()

    async def report(http: aiohttp.ClientSession, pod: str) -> int:
        async with http.post("/budget/team-a/report", json={"pod_name": pod}) as response:
            return response.status

    async with (
        served(opened.timekeeper(), kube=cluster) as http,  # type: ignore[arg-type]
        aiohttp.ClientSession(
            f"http://127.0.0.1:{http._base_url.port}",  # type: ignore[union-attr]
            connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)),
        ) as other,
        asyncio.TaskGroup() as tasks,
    ):
        count = AT_ONCE_OF_ONE + MOST_WAITING + 3
        busy = [tasks.create_task(report(http, f"busy-{number}")) for number in range(count)]
        await until(lambda: sum(task.done() for task in busy) == 3)
        late = tasks.create_task(report(other, "late"))
        await until(lambda: len(cluster.reads) == AT_ONCE_OF_ONE + 1)
        cluster.released.set()

    assert sorted(task.result() for task in busy) == [429] * 3 + [503] * (count - 3)
    assert late.result() == 503
    assert cluster.reads[AT_ONCE_OF_ONE].endswith("/late")


async def test_strangers_have_few_pods_read_in_a_second_and_each_once(
    opened: AccountLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_api, "MOST_READS", 4)
    keeper = opened.timekeeper()
    kube = ReadPods()

    async with served(keeper, kube=kube) as http:  # type: ignore[arg-type]

        async def ask(name: str) -> Any:
            body = {"pod_name": name, "usage_factor": 1}
            return await answer(await http.post("/budget/team-a/report", json=body))

        replies = [await ask(f"job-{number}") for number in range(5)]
        again = await ask("job-0")
        strange = await http.post("/budget/team-a/report", json={"pod_name": "..", "usage": 1})
        assert (await answer(strange, 400))["error"].startswith("namespace and pod_name must be")

    gone = {"terminate": True}
    unread = {"terminate": False}
    assert replies == [gone] * 3 + [unread] * 2, "one address has three quarters of them"
    assert again == gone
    assert len(kube.paths) == 3


class ReadPods:
    """An API server that has no pods."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def read(self, path: str, _: Any) -> Any:
        self.paths.append(path)
        raise NotFoundError(ErrorResponse(method="GET", path=path, code=404, reason="", message=""))
