"""A server's own certificate authority and certificate: made, judged, replaced; no I/O.

Half way through its life a certificate is replaced, with an authority of its own; the one before is
trusted for as long as some replica may still show its certificate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from shared.credentials import certificates

LIFE_DAYS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateBundle:
    """What a server shows, and what its clients must trust to believe it; all PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    """Of this certificate."""
    previous: bytes = b""
    """Authority of the certificate before, which another replica may still show."""

    @property
    def trusted(self) -> bytes:
        """What clients are to trust."""
        return self.authority + self.previous


def make(
    names: Sequence[str], now: datetime, *, after: CertificateBundle | None = None
) -> CertificateBundle:
    """Make a new bundle for these DNS names and addresses."""
    authority = certificates.authority("leasehold-ca", now, days=LIFE_DAYS)
    shown = certificates.issue(authority, names, now, days=LIFE_DAYS)
    return CertificateBundle(
        certificate=shown.certificate,
        key=shown.key,
        authority=authority.certificate,
        previous=after.authority if after else b"",
    )


def is_due(bundle: CertificateBundle, names: Sequence[str], now: datetime) -> bool:
    """Say whether a bundle is to be replaced: past half its life, or for other names.

    Raises RequestError for a bundle that is none.
    """
    return certificates.is_due(bundle.certificate, names, now)


def is_valid(bundle: CertificateBundle, now: datetime) -> bool:
    """Say whether the certificate may be shown now. Raises RequestError for no bundle."""
    certificate = certificates.load(bundle.certificate)
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def ends_at(bundle: CertificateBundle) -> float:
    """Return when the certificate ends, Unix seconds."""
    return certificates.load(bundle.certificate).not_valid_after_utc.timestamp()
