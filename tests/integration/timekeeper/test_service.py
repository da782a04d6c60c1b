"""The timekeeper's interfaces: HTTP, GPUBudget objects, Events, NATS, and its own process."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from services.timekeeper.config.budget_sources import PATH, BudgetObjects, ConfiguredBudgets
from services.timekeeper.metrics import TimekeeperMetrics
from services.timekeeper.report.status_publisher import StatusPublisher
from services.timekeeper.rest.api import BudgetApi
from services.timekeeper.service import Timekeeper
from shared.credentials.authorization import AnonymousAuthenticator, TokenAuthenticator
from shared.credentials.tokens import load_access_tokens
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import BudgetChanged
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.placer.ledger import device, facts, report, reservation, reserve, share
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import ValkeyServer
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.timekeeper.accounts import (
    MINUTE_MS,
    T0,
    TEAM,
    AccountLedger,
    account_ledger,
    budget,
    lease,
    units,
)
from tests.support.waiting import until

DEFINITION = Path(__file__).parents[3] / "k8s" / "base" / "crds" / "gpubudgets.yaml"
ADMIN = {"Authorization": "Bearer of-admins"}
MEMBER = {"Authorization": "Bearer of-team-a"}


@pytest.fixture
async def opened(server: ValkeyServer) -> AsyncIterator[AccountLedger]:
    async with account_ledger(server.url, budget(10)) as found:
        yield found


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as started:
        started.store.create("customresourcedefinitions", yaml.safe_load(DEFINITION.read_text()))
        yield started


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
        found.store,
        found.config,
        TokenAuthenticator(load_access_tokens(tokens)) if tokens else AnonymousAuthenticator(),
        metrics=TimekeeperMetrics(),
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


@pytest.mark.parametrize(
    "query",
    ["cursor=1-2-3", "cursor=1-99999999999999999999", "cursor=-", f"from={'9' * 30}", "from=soon"],
)
async def test_an_invalid_ledger_cursor_is_refused(opened: AccountLedger, query: str) -> None:
    async with served(opened, opened.timekeeper()) as http:
        reply = await answer(await http.get(f"/v1/budgets/team-a/ledger?{query}"), 400)
        early = await answer(await http.get("/v1/budgets/team-a/ledger?from=0002-01-01T00:00:00Z"))

    assert query.partition("=")[2] in reply["error"]
    assert early == {"entries": [], "cursor": None}


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


async def test_gpusharing_18_a_container_named_gpu_sidecar_is_charged_like_any_other(
    opened: AccountLedger,
) -> None:
    sidecar = share("a", 0, mib=8_000, container="gpu-sidecar")
    await opened.journal("held", T0, lease("p", shares=(sidecar,)))
    await opened.count(T0 + MINUTE_MS)
    await opened.journal("ended", T0 + 2 * MINUTE_MS, lease("p", shares=(sidecar,)))
    await opened.count(T0 + 3 * MINUTE_MS)

    assert sum(entry.units for entry in await opened.charges()) == units(1)


async def test_tokens_decide_which_caller_reads_and_grants(
    opened: AccountLedger, tmp_path: Path
) -> None:
    timekeeper = opened.timekeeper()
    await opened.count(T0, keeper=timekeeper)
    grants, body = "/v1/budgets/team-a/grants", {"minutes": 30, "reason": "deadline"}
    async with served(opened, timekeeper, tokens=tokens(tmp_path)) as http:
        await answer(await http.get("/v1/budgets/team-a"), 401)
        await answer(await http.get("/v1/budgets/team-b", headers=MEMBER), 403)
        seen = await answer(await http.get("/v1/budgets", headers=MEMBER))
        await answer(await http.get("/v1/budgets"), 401)
        await answer(await http.get("/v1/budgets/team-a", headers=MEMBER))
        await answer(await http.post(grants, headers=MEMBER, json=body), 403)
        keyed = ADMIN | {"Idempotency-Key": "k1"}
        for _ in range(2):
            granted = await answer(await http.post(grants, headers=keyed, json=body), 201)
        for minutes in ("x", "nan", "1e400", 1e308, "1e999999999", 10**10, True, None):
            odd = {"minutes": minutes, "reason": "odd"}
            await answer(await http.post(grants, headers=ADMIN, json=odd), 400)
        await answer(await http.post(grants, headers=ADMIN, data=b'{"minutes": "\xff"}'), 400)
    async with served(opened, timekeeper) as http:
        await answer(await http.post(grants, json=body), 401)

    assert granted["remainingGPUMinutes"] == "40.000"
    assert [each["namespace"] for each in seen["budgets"]] == ["team-a"]


async def test_a_malformed_line_of_the_token_file_is_named_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret-without-a-namespace\n")

    with pytest.raises(Exception, match="line 1") as refused:
        load_access_tokens(file)

    assert "secret" not in str(refused.value)


async def test_the_ledger_is_read_in_pages_and_summed(opened: AccountLedger) -> None:
    timekeeper = opened.timekeeper(charge_every_s=0)
    await opened.journal("held", T0, lease("p"))
    for minute in range(1, 8):
        await opened.count(T0 + minute * MINUTE_MS, keeper=timekeeper)
    async with served(opened, timekeeper) as http:
        page = await answer(await http.get("/v1/budgets/team-a/ledger"))
        after = {"cursor": page["entries"][2]["id"]}
        rest = await answer(await http.get("/v1/budgets/team-a/ledger", params=after))
        shown = {"format": "csv", "groupBy": "namespace"}
        csv = await (await http.get("/v1/reports/showback", params=shown)).text()
        wrong = await answer(await http.get("/v1/reports/showback?groupBy=colour"), 400)

    charges = [entry for entry in page["entries"] if entry["kind"] == "charge"]
    assert list(charges[0])[:6] == ["id", "ts", "ns", "window", "kind", "lease"]
    assert sum(int(entry["units"]) for entry in charges) == units(3.5)
    assert rest["entries"] == page["entries"][3:]
    assert csv.splitlines()[1].startswith("2031-04,team-a,,,3.500,")
    assert "colour" in wrong["error"]


async def test_a_budget_object_is_applied_and_gets_a_status_and_an_event(
    opened: AccountLedger, api: ApiUnderTest
) -> None:
    async with KubernetesClient(load_credentials(api.kubeconfig)) as kube:
        objects = BudgetObjects(kube)
        configured = ConfiguredBudgets(objects=objects)
        timekeeper = opened.timekeeper(configuration=configured, statuses=StatusPublisher(objects))
        following = asyncio.create_task(configured.watch())
        try:
            await configured.wait_until_synced()
            await kube.create("/api/v1/namespaces", {"metadata": {"name": TEAM}})
            await kube.create(PATH, manifest(limitGPUMinutes=10))
            await until(lambda: configured.budget_of(TEAM).limit_units == units(10))
            await opened.journal("held", T0, lease("p"))
            await opened.count(T0 + MINUTE_MS, keeper=timekeeper)
            await opened.count(T0 + 24 * MINUTE_MS, keeper=timekeeper)
            status = json.loads(await kube.read(f"{PATH}/team-a"))["status"]
            events = [
                event
                for where in ("default", TEAM)
                for event in json.loads(await kube.read(f"/api/v1/namespaces/{where}/events"))[
                    "items"
                ]
            ]
            await until(lambda: TEAM in objects.statuses)

            bad = {"spec": {"policy": {"timeZone": "Europe/Atlantis"}}}
            await kube.patch_merge(f"{PATH}/team-a", bad)
            await until(lambda: TEAM in objects.problems)
            assert configured.budget_of(TEAM).limit_units == units(10)
            await opened.count(T0 + 26 * MINUTE_MS, keeper=timekeeper)
            wrong = json.loads(await kube.read(f"{PATH}/team-a"))["status"]
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    assert (status["state"], status["usedUnits"]) == ("exhausted", str(units(12)))
    assert status["remainingGPUMinutes"] == "-2.000"
    assert objects.statuses[TEAM].window.used_units >= units(12)
    about = [(event["reason"], event["involvedObject"]["kind"]) for event in events]
    assert about == [("BudgetExhausted", "GPUBudget"), ("BudgetExhausted", "Namespace")]
    assert {event["involvedObject"]["name"] for event in events} == {"team-a"}
    assert "Europe/Atlantis" in wrong["problem"]


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "leasehold.dev/v1alpha1",
        "kind": "GPUBudget",
        "metadata": {"name": str(TEAM)},
        "spec": spec,
    }


async def test_the_running_service_publishes_changes_on_the_bus(opened: AccountLedger) -> None:
    async with nats_server() as nats, Bus.connect(nats.url, name="timekeeper") as bus:
        inbox = await bus.subscribe([BudgetChanged], durable="test")
        timekeeper = opened.timekeeper(bus=bus)
        started = asyncio.Event()
        running = asyncio.create_task(
            Runner("timekeeper", timekeeper, bus, Tracing("timekeeper", None)).run(started)
        )
        try:
            async with asyncio.timeout(20):
                (delivered,) = await inbox.batch()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    (event,) = delivered.events
    assert isinstance(event, BudgetChanged)
    assert (event.namespace, event.state, event.remaining_units) == (TEAM, "ok", units(10))


async def test_a_killed_timekeeper_process_continues_without_losing_time(
    server: ValkeyServer, tmp_path: Path
) -> None:
    file, run_file = tmp_path / "budgets.yaml", tmp_path / "run.json"
    file.write_text(yaml.safe_dump(manifest(limitGPUMinutes=100)).replace("team-a", "'*'"))

    @asynccontextmanager
    async def started(nats: str) -> AsyncIterator[asyncio.subprocess.Process]:
        run_file.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.timekeeper", "--no-objects", "--nats-url", nats),
            *("--redis-url", server.url, "--budgets", str(file), "--run-file", str(run_file)),
            *("--tick-s", "0.1", "--charge-every-s", "0.5", "--log-level", "warning"),
        )
        try:
            await until(run_file.exists, limit_s=40)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async with nats_server() as nats, RedisLeases.connect(server.url) as leases:
        token = await leases.begin_rebuild(now=0.0)
        assert token is not None
        await leases.save_nodes([facts("a")])
        await leases.save_devices([report("a", [device("a", 0)])])
        await leases.finish_rebuild(token)
        async with started(nats.url) as first:
            (bound,) = await reserve(leases, reservation("p", share("a", 0, mib=16_000)))
            await leases.bind([bound])
            held_ms = int((await leases._connection._redis.time())[0]) * 1000
            first.send_signal(signal.SIGKILL)
            await first.wait()
        await leases.release([bound.pod], reason="a test")
        async with started(nats.url) as second:

            async def charges() -> list[Any]:
                rows = await leases._connection._redis.xrange("lh-budget:entries:default")
                entries = [json.loads(fields[b"e"]) for _, fields in rows]
                return [each for each in entries if each["kind"] == "charge"]

            entries = await until(charges)
            second.terminate()
            assert await second.wait() == 0

    assert {each["weight"] for each in entries} == {1000}
    assert all(each["units"] == 1000 * (each["to_ms"] - each["from_ms"]) for each in entries)
    assert all(each["from_ms"] >= held_ms - 1000 for each in entries)
