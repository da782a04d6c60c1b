"""The Kubernetes client's TLS side, with a certificate authority made for the test."""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.model.errors import UnavailableError
from tests.support.kubernetes.scripted_apiserver import ScriptedApiserver, answers


@dataclass(frozen=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def cert_pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def key_pem(self) -> str:
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()


def issue(
    name: str, *, by: Issued | None = None, sans: tuple[x509.GeneralName, ...] = ()
) -> Issued:
    """Make a certificate; without `by` it is a certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    )
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
    return Issued(builder.sign(by.key if by else key, hashes.SHA256()), key)


LOCAL = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@pytest.fixture(scope="module")
def authority() -> Issued:
    return issue("test authority")


def serving(tmp_path: Path, server: Issued, *, clients_of: Issued | None = None) -> ssl.SSLContext:
    """TLS for the server; with `clients_of`, only that authority's clients may connect."""
    file = tmp_path / "server.pem"
    file.write_text(server.cert_pem + server.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if clients_of is not None:
        context.load_verify_locations(cadata=clients_of.cert_pem)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize(
    ("ours", "sans", "options"),
    [
        (True, (LOCAL,), {}),
        (False, (), {"ca_pem": None, "insecure_skip_tls_verify": True}),
        (True, (x509.DNSName("inner"),), {"tls_server_name": "inner"}),
    ],
    ids=["of the named authority", "unverified", "of another name than the address"],
)
async def test_a_server_is_trusted(
    tmp_path: Path,
    authority: Issued,
    sans: tuple[x509.GeneralName, ...],
    options: dict[str, Any],
    *,
    ours: bool,
) -> None:
    tls = serving(tmp_path, issue("api", by=authority if ours else issue("stranger"), sans=sans))
    async with ScriptedApiserver(answers(200), tls=tls) as server:
        given = {"ca_pem": authority.cert_pem} | options
        async with KubernetesClient(ClusterCredentials(server=server.url, **given)) as kube:
            await kube.read("/x")

    assert len(server.requests) == 1


async def test_a_server_of_another_authority_is_refused_and_the_error_names_the_setting(
    tmp_path: Path, authority: Issued
) -> None:
    tls = serving(tmp_path, issue("api", by=issue("stranger"), sans=(LOCAL,)))
    async with (
        ScriptedApiserver(answers(200), tls=tls) as server,
        KubernetesClient(ClusterCredentials(server=server.url, ca_pem=authority.cert_pem)) as kube,
    ):
        with pytest.raises(KubeconfigError, match=r"not trusted.*certificate-authority"):
            await kube.read("/x")

    assert server.requests == []


async def test_a_client_certificate_is_sent(tmp_path: Path, authority: Issued) -> None:
    client = issue("system:scheduler", by=authority)
    tls = serving(tmp_path, issue("api", by=authority, sans=(LOCAL,)), clients_of=authority)
    async with ScriptedApiserver(answers(200), tls=tls) as server:
        credentials = ClusterCredentials(
            server=server.url,
            ca_pem=authority.cert_pem,
            client_cert_pem=client.cert_pem,
            client_key_pem=client.key_pem,
        )
        async with KubernetesClient(credentials) as kube:
            await kube.read("/x")
        async with KubernetesClient(
            ClusterCredentials(server=server.url, ca_pem=authority.cert_pem)
        ) as anonymous:
            with pytest.raises(UnavailableError):
                await anonymous.read("/x")

    assert len(server.requests) == 1


async def test_an_unusable_certificate_is_a_request_error(authority: Issued) -> None:
    credentials = ClusterCredentials(
        server="https://127.0.0.1:1",
        ca_pem=authority.cert_pem,
        client_cert_pem=authority.cert_pem,
        client_key_pem="no key",
    )

    with pytest.raises(KubeconfigError, match="unusable"):
        async with KubernetesClient(credentials):
            pass
