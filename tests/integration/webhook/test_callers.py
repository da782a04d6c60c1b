"""Who may call the webhook, and what it does for a caller whom it does not know."""

import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from services.cli.doctor.cluster_probes import ClusterProbes, ClusterServers
from services.webhook.registration import ALLOCATIONS_PATH, CLAIMS_PATH, CLAIMS_WEBHOOK, PATH
from shared.credentials import certificates
from shared.kubernetes.client import KubernetesClient
from shared.model.events.request_reply import ClaimLeaseReply
from shared.model.findings import Outcome
from shared.model.requests.claim import DRIVER, LEASED, REFUSED
from shared.runtime import client_certificates
from simcluster.credentials import WEBHOOK_CLIENT
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.waiting import until
from tests.support.webhook.replica import Replica, cluster, pod, replica

LEASED_REPLY = ClaimLeaseReply(devices=('{"driver":"gpu.leasehold.dev"}',))


def allocation_review(namespace: str = "team-a") -> dict[str, Any]:
    """The review of a claim that nobody has created."""
    result = {
        "request": "gpu",
        "driver": DRIVER,
        "pool": "a",
        "device": "gpu",
        "bindingConditions": [LEASED],
        "bindingFailureConditions": [REFUSED],
    }
    claim: dict[str, Any] = {
        "metadata": {"name": "c", "namespace": namespace, "uid": "u", "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "gpu"}]}},
    }
    allocated = claim | {"status": {"allocation": {"devices": {"results": [result]}}}}
    request = {
        "uid": "r",
        "operation": "UPDATE",
        "resource": {"group": "resource.k8s.io", "version": "v1", "resource": "resourceclaims"},
        "subResource": "status",
        "namespace": namespace,
        "object": allocated,
        "oldObject": claim,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def pod_review(namespace: str = "team-a") -> dict[str, Any]:
    request = {
        "uid": "r",
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": namespace,
        "object": pod(),
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def trusting(webhook: Replica, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """A caller's TLS: it trusts the webhook, and may present a certificate."""
    assert webhook.certificate.bundle is not None
    context = ssl.create_default_context(cadata=webhook.certificate.bundle.trusted.decode())
    if client:
        context.load_cert_chain(*client)
    return context


def of_api_server(api: ApiUnderTest) -> tuple[Path, Path]:
    directory = api.ca.with_name(WEBHOOK_CLIENT)
    return directory / "server.crt", directory / "server.key"


def opened(webhook: Replica, client: tuple[Path, Path] | None = None) -> aiohttp.ClientSession:
    """A caller that keeps its connection."""
    connector = aiohttp.TCPConnector(ssl=trusting(webhook, client))
    return aiohttp.ClientSession(webhook.url, connector=connector)


async def status_of(session: aiohttp.ClientSession) -> int:
    async with session.post(PATH, json=pod_review()) as response:
        await response.read()
        return response.status


async def post(
    webhook: Replica,
    path: str,
    review: dict[str, Any],
    client: tuple[Path, Path] | None = None,
) -> tuple[int, Any]:
    async with (
        opened(webhook, client) as session,
        session.post(path, json=review) as response,
    ):
        answer = await response.read()
        return response.status, msgspec.json.decode(answer) if response.status == 200 else answer


@asynccontextmanager
async def open_webhook(directory: Path, **more: Any) -> AsyncIterator[tuple[ApiUnderTest, Replica]]:
    async with cluster() as (api, kube, _), replica(api, kube, directory, **more) as webhook:
        yield api, webhook


async def test_nothing_is_leased_for_a_caller_that_is_not_known(tmp_path: Path) -> None:
    async with open_webhook(tmp_path, knows_callers=False) as (_, webhook):
        webhook.binders.replies.append(LEASED_REPLY)

        status, reply = await post(webhook, ALLOCATIONS_PATH, allocation_review())

    assert (status, reply["response"]) == (200, {"uid": "r", "allowed": True})
    assert webhook.binders.requests == []


async def test_an_allocation_of_the_api_server_is_answered(tmp_path: Path) -> None:
    async with open_webhook(tmp_path) as (api, webhook):
        webhook.binders.replies.append(LEASED_REPLY)
        client = of_api_server(api)

        status, reply = await post(webhook, ALLOCATIONS_PATH, allocation_review(), client)

    assert status == 200
    assert reply["response"]["patch"]


def issued(
    directory: Path, authority: certificates.IssuedCertificate, *, valid_s: float = 3600.0
) -> tuple[Path, Path]:
    """A client's certificate of an authority, and its key."""
    began = datetime.now(UTC) + timedelta(seconds=valid_s) - timedelta(days=1)
    made = certificates.issue(authority, (WEBHOOK_CLIENT,), began, days=1, client=True)
    files = directory / "cert", directory / "key"
    files[0].write_bytes(made.certificate)
    files[1].write_bytes(made.key)
    return files


def authority_in(file: Path) -> certificates.IssuedCertificate:
    """A new authority of clients, in a PEM file."""
    made = certificates.authority("clients", datetime.now(UTC), days=2)
    file.write_bytes(made.certificate)
    return made


@pytest.mark.parametrize(
    ("presents", "reason"),
    [
        ("nothing", "it has presented no certificate"),
        ("another", "its certificate is not accepted: unable to get local issuer certificate"),
        ("expired", "its certificate is not accepted: certificate has expired"),
    ],
)
async def test_where_callers_are_known_others_get_no_connection_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, presents: str, reason: str
) -> None:
    authority = authority_in(tmp_path / "ca.crt")
    other = certificates.authority("somebody", datetime.now(UTC), days=1)
    files = issued(
        tmp_path,
        other if presents == "another" else authority,
        valid_s=-60.0 if presents == "expired" else 3600.0,
    )
    async with open_webhook(tmp_path / "tls") as (_, webhook):
        webhook.certificate.client_ca = tmp_path / "ca.crt"
        await webhook.certificate.refresh()
        with pytest.raises(aiohttp.ClientError):
            await post(webhook, PATH, pod_review(), None if presents == "nothing" else files)
        await until(lambda: reason in caplog.text)


async def test_a_certificate_that_expires_while_its_connection_is_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = issued(tmp_path, authority_in(tmp_path / "ca.crt"))
    async with open_webhook(tmp_path / "tls") as (_, webhook):
        webhook.certificate.client_ca = tmp_path / "ca.crt"
        await webhook.certificate.refresh()
        async with opened(webhook, files) as session:
            before = await status_of(session)
            tomorrow = SimpleNamespace(time=lambda: time.time() + 86_400)
            monkeypatch.setattr(client_certificates, "time", tomorrow)
            after = await status_of(session)

    assert (before, after) == (200, 403)


async def test_only_certificates_for_the_configured_name_are_accepted(tmp_path: Path) -> None:
    async with open_webhook(tmp_path, client_name="kube-apiserver") as (api, webhook):
        refused, _ = await post(webhook, PATH, pod_review(), of_api_server(api))
    async with open_webhook(tmp_path, client_name=WEBHOOK_CLIENT) as (api, webhook):
        accepted, _ = await post(webhook, PATH, pod_review(), of_api_server(api))

    assert (refused, accepted) == (403, 200)


async def unregister(kube: KubernetesClient, webhook: Replica, *names: str) -> None:
    """Remove webhooks, as an installation without the component `dra` has it."""
    webhook.registration.url = ""
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/leasehold"
    found = await kube.read(path, dict)
    kept = [each for each in found["webhooks"] if each["name"] not in names]
    await kube.patch_merge(path, {"webhooks": kept})
    await webhook.certificate.refresh()


async def test_paths_of_webhooks_that_are_not_registered_do_not_exist(tmp_path: Path) -> None:
    async with cluster() as (api, kube, _), replica(api, kube, tmp_path) as webhook:
        client = of_api_server(api)
        await unregister(kube, webhook, CLAIMS_WEBHOOK, "allocations.claims.leasehold.dev")
        webhook.binders.replies.append(LEASED_REPLY)
        statuses = {
            path: (await post(webhook, path, review, client))[0]
            for path, review in (
                (PATH, pod_review()),
                (CLAIMS_PATH, pod_review()),
                (ALLOCATIONS_PATH, allocation_review()),
            )
        }

    assert statuses == {PATH: 200, CLAIMS_PATH: 404, ALLOCATIONS_PATH: 404}
    assert webhook.binders.requests == []


@pytest.mark.parametrize("knows", [True, False])
async def test_doctor_says_whether_the_webhook_knows_its_callers(
    tmp_path: Path, *, knows: bool
) -> None:
    async with cluster() as (api, kube, _), replica(api, kube, tmp_path, knows_callers=knows):
        found = await ClusterProbes(ClusterServers(), kube).webhook()

    assert found.outcome is Outcome.OK
    assert ("only API servers with a client certificate" in found.text) is knows
    assert ("it does not know its callers" in found.text) is not knows


async def test_an_authority_that_leaves_the_file_is_no_longer_accepted(tmp_path: Path) -> None:
    """And one that joins it is, without a restart."""
    async with open_webhook(tmp_path / "tls") as (api, webhook):
        client = of_api_server(api)
        file = tmp_path / "ca.crt"
        file.write_bytes(api.ca.with_name(WEBHOOK_CLIENT).joinpath("ca.crt").read_bytes())
        webhook.certificate.client_ca = file
        await webhook.certificate.refresh()
        async with opened(webhook, client) as session:
            before = await status_of(session)
            authority_in(file)
            await webhook.certificate.refresh()

            with pytest.raises(aiohttp.ClientError):
                await post(webhook, PATH, pod_review(), client)
            last = await status_of(session)  # of the open connection, which ends with it
            with pytest.raises(aiohttp.ClientError):
                await status_of(session)

    assert (before, last) == (200, 200)
