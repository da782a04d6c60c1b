"""Stores of the certificate that replicas share: a Secret or a directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from shared.credentials import certificates
from shared.credentials.logins import write_private
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError
from shared.kubernetes.paths import objects_path
from shared.kubernetes.types import ApiSecret
from shared.model.errors import RequestError, UnavailableError

LIFE_DAYS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateBundle:
    """PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    previous: bytes = b""

    @property
    def trusted(self) -> bytes:
        return self.authority + self.previous


def make(
    names: Sequence[str], now: datetime, *, after: CertificateBundle | None = None
) -> CertificateBundle:
    authority = certificates.authority("leasehold-ca", now, days=LIFE_DAYS)
    shown = certificates.issue(authority, names, now, days=LIFE_DAYS)
    return CertificateBundle(
        certificate=shown.certificate,
        key=shown.key,
        authority=authority.certificate,
        previous=after.authority if after else b"",
    )


def is_valid(bundle: CertificateBundle, now: datetime) -> bool:
    """Raises RequestError."""
    certificate = certificates.load(bundle.certificate)
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def ends_at(bundle: CertificateBundle) -> float:
    """Return Unix seconds."""
    return certificates.load(bundle.certificate).not_valid_after_utc.timestamp()


FILES = {
    "certificate": "tls.crt",
    "key": "tls.key",
    "authority": "ca.crt",
    "previous": "previous-ca.crt",
}
"""As in a `kubernetes.io/tls` Secret."""


class CertificateStore(Protocol):
    @property
    def place(self) -> str:
        """As messages name it."""
        ...

    async def load(self) -> CertificateBundle | None:
        """Return None if there is no bundle yet. Raises RequestError if it cannot be read."""
        ...

    async def save(self, bundle: CertificateBundle, *, after: CertificateBundle | None) -> bool:
        """Return False, with nothing written, if `after` is not stored any more."""
        ...


class DirectoryStore:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def place(self) -> str:
        return str(self.directory)

    async def load(self) -> CertificateBundle | None:
        paths = {part: self.directory / name for part, name in FILES.items()}
        if not paths["certificate"].exists():
            return None
        try:
            return CertificateBundle(**{part: path.read_bytes() for part, path in paths.items()})
        except OSError as error:
            raise RequestError(f"{error.filename} cannot be read: {error.strerror}") from error

    async def save(self, bundle: CertificateBundle, *, after: CertificateBundle | None) -> bool:
        """Write the certificate last, since it marks the files as complete.

        Raises UnavailableError if the disk is full or read-only.
        """
        if await self.load() != after:
            return False
        try:
            for part in ("previous", "authority", "key", "certificate"):
                write_private(self.directory / FILES[part], getattr(bundle, part))
        except OSError as error:
            raise UnavailableError(
                f"{self.directory} cannot be written ({error.strerror}): let this user write there"
            ) from error
        return True


class SecretStore:
    """A write fails if another replica changed the Secret after it was read."""

    def __init__(self, kube: KubernetesClient, namespace: str, name: str) -> None:
        self.kube = kube
        self.namespace = namespace
        self.name = name
        self._version: str | None = None

    @property
    def place(self) -> str:
        return f"Secret {self.namespace}/{self.name}"

    async def load(self) -> CertificateBundle | None:
        """A Secret without a certificate counts as missing."""
        path = objects_path(self.namespace, "secrets", self.name)
        try:
            secret = await self.kube.read(path, ApiSecret)
        except NotFoundError:
            self._version = None
            return None
        self._version = secret.metadata.resource_version
        data = secret.data or {}
        if not data.get(FILES["certificate"]):
            return None
        return CertificateBundle(**{part: data.get(name, b"") for part, name in FILES.items()})

    async def save(self, bundle: CertificateBundle, *, after: CertificateBundle | None) -> bool:
        data = {name: getattr(bundle, part) for part, name in FILES.items()}
        try:
            if self._version is None:
                body = {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "type": "Opaque",
                    "metadata": {"name": self.name, "namespace": self.namespace},
                    "data": data,
                }
                await self.kube.create(objects_path(self.namespace, "secrets"), body)
            else:
                body = {"metadata": {"resourceVersion": self._version}, "data": data}
                path = objects_path(self.namespace, "secrets", self.name)
                await self.kube.patch_merge(path, body)
        except KubernetesConflictError:
            return False
        return True
