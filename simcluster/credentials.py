"""Credentials of a simulated cluster: certificates, tokens and the kubeconfig."""

import base64
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from shared.credentials import certificates as issuing
from simcluster.apimachinery.objects import Json

WEBHOOK_CLIENT = "webhook-client"
"""The folder and the name of the certificate that is presented to webhooks."""
_VALID_DAYS = 3650
_ADDRESSES = ("127.0.0.1", "::1")
_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of the files; only their owner can read the keys."""

    ca: Path
    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of the server."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        return context


def api_server_certificates(directory: Path, *names: str) -> CertificateFiles:
    """Return the API server's certificates, for these extra names; create missing ones."""
    return load_certificates(directory, *_NAMES, *names)


def load_certificates(directory: Path, *names: str) -> CertificateFiles:
    """Return certificates for these names and this machine; create missing ones."""
    paths = CertificateFiles(
        directory / "ca.crt", directory / "server.crt", directory / "server.key"
    )
    if not all(path.exists() for path in (paths.ca, paths.certificate, paths.key)):
        directory.mkdir(parents=True, exist_ok=True)
        _make(paths, names)
    return paths


def _make(paths: CertificateFiles, dns_names: Sequence[str]) -> None:
    now = datetime.now(UTC)
    authority = issuing.authority("leasehold-simcluster-ca", now, days=_VALID_DAYS)
    names = (*dns_names, *_ADDRESSES)
    server = issuing.issue(authority, names, now, days=_VALID_DAYS, client=True)
    write_private(paths.key, server.key)
    paths.certificate.write_bytes(server.certificate)
    paths.ca.write_bytes(authority.certificate)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically; only its owner can read it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    partial.write_bytes(content)
    partial.replace(path)


def load_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the text in `path`; create the file if it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, make().encode())
    return path.read_text()


CONTEXT = "leasehold"


def kubeconfig(url: str, ca_pem: bytes, token: str) -> Json:
    """Return a kubeconfig with one context whose namespace is `default`."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CONTEXT,
        "clusters": [
            {
                "name": CONTEXT,
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(ca_pem).decode(),
                },
            }
        ],
        "users": [{"name": CONTEXT, "user": {"token": token}}],
        "contexts": [
            {
                "name": CONTEXT,
                "context": {"cluster": CONTEXT, "user": CONTEXT, "namespace": "default"},
            }
        ],
    }


def write_kubeconfig(path: Path, url: str, ca_pem: bytes, token: str) -> None:
    """Write the kubeconfig atomically; only its owner can read it, because it has the token."""
    content = yaml.safe_dump(kubeconfig(url, ca_pem, token), sort_keys=False)
    write_private(path, content.encode())
