"""A server's CA and certificate: creation and renewal; pure.

A certificate is replaced halfway through its life, together with its CA. The previous CA is trusted
for as long as another replica may still use its certificate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from shared.credentials import certificates

LIFE_DAYS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateBundle:
    """A serving certificate, its key and its CA, PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    """CA of this certificate."""
    previous: bytes = b""
    """CA of the previous certificate, which another replica may still use."""

    @property
    def trusted(self) -> bytes:
        """CA certificates that clients must trust."""
        return self.authority + self.previous


def make(
    names: Sequence[str], now: datetime, *, after: CertificateBundle | None = None
) -> CertificateBundle:
    """Create a new bundle for these DNS names and addresses."""
    authority = certificates.authority("leasehold-ca", now, days=LIFE_DAYS)
    shown = certificates.issue(authority, names, now, days=LIFE_DAYS)
    return CertificateBundle(
        certificate=shown.certificate,
        key=shown.key,
        authority=authority.certificate,
        previous=after.authority if after else b"",
    )


def is_due(bundle: CertificateBundle, names: Sequence[str], now: datetime) -> bool:
    """Return whether to renew a bundle: past half its life, or for other names.

    Raises RequestError for an invalid bundle.
    """
    return certificates.is_due(bundle.certificate, names, now)


def is_valid(bundle: CertificateBundle, now: datetime) -> bool:
    """Return whether the certificate is valid now. Raises RequestError if it is invalid data."""
    certificate = certificates.load(bundle.certificate)
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def ends_at(bundle: CertificateBundle) -> float:
    """Return the expiry of the certificate, Unix seconds."""
    return certificates.load(bundle.certificate).not_valid_after_utc.timestamp()
