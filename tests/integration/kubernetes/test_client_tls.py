"""The Kubernetes client's TLS side, with a certificate authority made for the test."""

import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.model.errors import UnavailableError
from tests.support.kubernetes.scripted_apiserver import ScriptedApiserver, answers
from tests.support.servers.tls import Made


@pytest.fixture
def ours(tmp_path: Path) -> Made:
    return Made(tmp_path)


def serving(by: Made, *names: str, clients_of: Made | None = None) -> ssl.SSLContext:
    """TLS for the server; with `clients_of`, only that authority's clients may connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*by.issue("server", *names))
    if clients_of is not None:
        context.load_verify_locations(clients_of.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize(
    ("by_us", "names", "options"),
    [
        (True, (), {}),
        (False, (), {"ca_pem": None, "insecure_skip_tls_verify": True}),
        (True, ("inner",), {"tls_server_name": "inner"}),
    ],
    ids=["of the named authority", "unverified", "of another name than the address"],
)
async def test_a_server_is_trusted(
    tmp_path: Path, ours: Made, names: tuple[str, ...], options: dict[str, Any], *, by_us: bool
) -> None:
    tls = serving(ours if by_us else Made(tmp_path, "stranger"), *names)
    async with ScriptedApiserver(answers(200), tls=tls) as server:
        given = {"ca_pem": ours.ca.read_text()} | options
        async with KubernetesClient(ClusterCredentials(server=server.url, **given)) as kube:
            await kube.read("/x")

    assert len(server.requests) == 1


async def test_a_server_of_another_authority_is_refused_and_the_error_names_the_setting(
    tmp_path: Path, ours: Made
) -> None:
    tls, trusted = serving(Made(tmp_path, "stranger")), ours.ca.read_text()
    async with (
        ScriptedApiserver(answers(200), tls=tls) as server,
        KubernetesClient(ClusterCredentials(server=server.url, ca_pem=trusted)) as kube,
    ):
        with pytest.raises(KubeconfigError, match=r"not trusted.*certificate-authority"):
            await kube.read("/x")

    assert server.requests == []


async def test_a_client_certificate_is_sent(ours: Made) -> None:
    certificate, key = ours.issue("client", "system:scheduler")
    shown: dict[str, Any] = {
        "client_cert_pem": certificate.read_text(),
        "client_key_pem": key.read_text(),
    }
    async with ScriptedApiserver(answers(200), tls=serving(ours, clients_of=ours)) as server:
        anonymous = ClusterCredentials(server=server.url, ca_pem=ours.ca.read_text())
        async with KubernetesClient(replace(anonymous, **shown)) as kube:
            await kube.read("/x")
        async with KubernetesClient(anonymous) as kube:
            with pytest.raises(UnavailableError):
                await kube.read("/x")

    assert len(server.requests) == 1


async def test_an_unusable_certificate_is_a_request_error(ours: Made) -> None:
    ca_pem = ours.ca.read_text()
    credentials = ClusterCredentials(
        server="https://127.0.0.1:1", ca_pem=ca_pem, client_cert_pem=ca_pem, client_key_pem="no key"
    )

    with pytest.raises(KubeconfigError, match="unusable"):
        async with KubernetesClient(credentials):
            pass
