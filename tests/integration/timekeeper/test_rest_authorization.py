"""The timekeeper's REST interface in a cluster: authorization of callers, and its certificate."""

import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.timekeeper.rest.api import BudgetApi
from services.timekeeper.settings import TimekeeperSettings
from services.timekeeper.wiring import AuthorityConfigMap
from shared.credentials.authorization import AnonymousAuthenticator, Authenticator
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import LIFE_DAYS, DirectoryStore, SecretStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.runtime import health
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.servers.valkey import ValkeyServer
from tests.support.simcluster.apiserver import api_server
from tests.support.timekeeper.accounts import (
    MINUTE_MS,
    T0,
    AccountLedger,
    account_ledger,
    budget,
    lease,
)

OWN, OTHER = Namespace("default"), Namespace("team-b")
NAMES = ("127.0.0.1", "localhost")


@asynccontextmanager
async def served(
    server: ValkeyServer, authenticator: Authenticator, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve two namespaces that have used GPUs."""
    async with account_ledger(server.url, budget(10, OWN), budget(20, OTHER)) as found:
        keeper = await counted(found)
        pages = BudgetApi(
            keeper,
            authenticator,
            client=None,
            old_reports="answer",
        )
        async with health.served(pages.application(), "127.0.0.1:0", tls=tls) as address:
            yield f"{'https' if tls else 'http'}://{address}"


async def counted(found: AccountLedger) -> Any:
    keeper = found.timekeeper(charge_every_s=0)
    leases = (lease("own", namespace=OWN), lease("other", namespace=OTHER))
    await found.journal("held", T0, *leases)
    await found.count(T0 + MINUTE_MS, keeper=keeper)
    await found.journal("ended", T0 + 2 * MINUTE_MS, *leases)
    await found.count(T0 + 3 * MINUTE_MS, keeper=keeper)
    return keeper


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer token-of-{name}"}


async def test_the_api_server_decides_which_budgets_a_caller_reads_and_grants(
    server: ValkeyServer,
) -> None:
    reviews = Reviews()
    seen: dict[str, Any] = {}
    async with (
        reviewed(reviews, FakeClock()) as authenticator,
        served(server, authenticator) as url,
        aiohttp.ClientSession(url) as http,
    ):

        async def status(caller: str, path: str) -> int:
            async with http.get(path, headers=bearer(caller)) as answer:
                return answer.status

        for caller in ("root", "member", "stranger"):
            seen[caller] = [await status(caller, f"/budget/{where}") for where in (OWN, OTHER)]
        unknown = await status("nobody", f"/budget/{OWN}")
        body = {"minutes": 5, "reason": "because"}
        granted = {}
        for caller in ("member", "root"):
            path = f"/budget/{OWN}/increase"
            async with http.post(path, json=body, headers=bearer(caller)) as answer:
                granted[caller] = answer.status, await answer.text()

    assert seen == {"root": [200, 200], "member": [200, 403], "stranger": [403, 403]}
    assert unknown == 401
    assert granted["member"][0] == 403
    assert "gpubudgets/grants" in granted["member"][1]
    assert granted["root"][0] == 200


async def test_the_interface_is_served_over_tls_and_no_call_fails_while_the_certificate_is_replaced(
    server: ValkeyServer, tmp_path: Path
) -> None:
    today = datetime.now(UTC)
    now = today - timedelta(days=LIFE_DAYS / 2 + 1)
    shown = ServingCertificate(DirectoryStore(tmp_path), None, NAMES, lambda: now)
    assert shown.unready_reason() is not None
    await shown.refresh()
    trusted = ssl.create_default_context(cadata=(tmp_path / "ca.crt").read_text())
    async with (
        served(server, AnonymousAuthenticator(), shown.context) as url,
        aiohttp.ClientSession() as http,
    ):

        async def request_status(context: ssl.SSLContext) -> int:
            async with http.get(f"{url}/budget/{OWN}", ssl=context) as answer:
                return answer.status

        assert await request_status(trusted) == 200
        with pytest.raises(aiohttp.ClientError):
            await request_status(ssl.create_default_context())
        with pytest.raises(aiohttp.ClientError):
            async with http.get(f"{url.replace('https', 'http')}/budget/{OWN}"):
                pass

        first = shown.bundle
        now = today
        await shown.refresh()
        assert shown.bundle == first, "clients trust it before it is served"
        await shown.refresh()
        authorities = (tmp_path / "ca.crt").read_text() + (tmp_path / "previous-ca.crt").read_text()
        assert shown.bundle != first
        assert await request_status(ssl.create_default_context(cadata=authorities)) == 200


async def test_replicas_share_one_certificate_and_clients_find_its_authority() -> None:
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig, environ={})) as kube,
    ):
        await kube.create("/api/v1/namespaces", {"metadata": {"name": "lh"}})
        for kind, name in (("secrets", "shared"), ("configmaps", "for-clients")):
            await kube.create(f"/api/v1/namespaces/lh/{kind}", {"metadata": {"name": name}})
        replicas = [
            ServingCertificate(
                SecretStore(kube, "lh", "shared"),
                AuthorityConfigMap(kube, "lh", "for-clients").trust,
                NAMES,
                lambda: datetime.now(UTC),
            )
            for _ in range(2)
        ]

        for replica in replicas:
            await replica.refresh()
        found = json.loads(await kube.read("/api/v1/namespaces/lh/configmaps/for-clients"))
        secret = json.loads(await kube.read("/api/v1/namespaces/lh/secrets/shared"))

    one, other = (replica.bundle for replica in replicas)
    assert one is not None
    assert one == other
    assert found["data"]["ca.crt"].encode() == one.trusted
    assert base64.b64decode(secret["data"]["tls.crt"]) == one.certificate


async def test_the_address_for_sidecars_serves_reports_only(server: ValkeyServer) -> None:
    async with account_ledger(server.url, budget(10, OWN)) as found:
        keeper = found.timekeeper()
        pages = BudgetApi(
            keeper,
            AnonymousAuthenticator(),
            client=None,
            old_reports="gone",
        )
        async with (
            health.served(pages.reports(), "127.0.0.1:0") as address,
            aiohttp.ClientSession(f"http://{address}") as http,
        ):
            answers = [
                (await http.post(f"/budget/{OWN}/report", json={})).status,
                (await http.post(f"/budget/{OWN}/increase", json={})).status,
                (await http.get(f"/budget/{OWN}")).status,
            ]

    assert answers == [410, 404, 404]


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
