"""The certificate authority (CA), and its replacement while all stay connected; pure.

`ca.crt` and `ca.key` issue certificates; `ca.trusted` is what servers and clients trust. An
administrator removes the first two to replace the CA, also during a replacement:

1. A new CA is created, and trusted beside the one before.

2. Once the servers have loaded that, the new CA issues all certificates.

3. Once a connection succeeds that trusts the new CA alone, the one before is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from shared.credentials import certificates
from shared.credentials.certificates import IssuedCertificate
from shared.model.errors import RequestError

CERTIFICATE = "ca.crt"
KEY = "ca.key"
TRUSTED = "ca.trusted"
AUTHORITY_DAYS = 3650
ISSUED_DAYS = 365
SERVER = "server"
EXTENDER = "extender"
KUBE_SCHEDULER = "kube-scheduler"
API = "api"
HOLDERS = (SERVER, EXTENDER, KUBE_SCHEDULER, API)


class Rotation(StrEnum):
    TRUSTING = "trusting"
    REPLACING = "replacing"
    """All are issued by the new CA; both are trusted."""
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationProgress:
    loaded: bytes = b""
    """The `ca.trusted` that servers and clients have loaded."""
    verified: bytes = b""
    """The `ca.crt` with which alone each server's certificate was verified."""


NOTHING_OBSERVED = RotationProgress()


def create_missing(data: dict[str, bytes], now: datetime) -> None:
    """Trust the CA beside those whose certificates may be in use.

    Raises RequestError for a stored CA that cannot be parsed.
    """
    trusted = _parsed(data.get(TRUSTED, b"") or data.get(CERTIFICATE, b""))
    if not (data.get(CERTIFICATE) and data.get(KEY)):
        if len(trusted) > 1 and not _issued(trusted[0], data):
            trusted = trusted[1:]  # its replacement began anew before it issued anything
        created = certificates.authority("leasehold", now, days=AUTHORITY_DAYS)
        data |= {CERTIFICATE: created.certificate, KEY: created.key}
    current = _load(data, CERTIFICATE)
    others = [certificate for certificate in trusted if certificate != current]
    data[TRUSTED] = b"".join(
        certificate.public_bytes(Encoding.PEM) for certificate in (current, *others)
    )


def issue(
    data: dict[str, bytes],
    name: str,
    names: Sequence[str],
    now: datetime,
    observed: RotationProgress,
    *,
    client: bool = True,
) -> None:
    """Issue a certificate if it is missing, due, or of an earlier CA and the new one is trusted."""
    if data.get(f"{name}.crt"):
        certificate = _load(data, f"{name}.crt")
        if _is_by(certificate, _load(data, CERTIFICATE)):
            if not certificates.is_due(data[f"{name}.crt"], names, now):
                return
        elif observed.loaded != data[TRUSTED] and any(
            _is_by(certificate, authority) for authority in _parsed(data[TRUSTED])
        ):
            return
    authority = IssuedCertificate(certificate=data[CERTIFICATE], key=data[KEY])
    issued = certificates.issue(authority, names, now, days=ISSUED_DAYS, client=client)
    data |= {f"{name}.crt": issued.certificate, f"{name}.key": issued.key}


def drop_replaced(data: dict[str, bytes], observed: RotationProgress) -> None:
    if rotation(data) is Rotation.REPLACING and observed.verified == data[CERTIFICATE]:
        data[TRUSTED] = data[CERTIFICATE]


def rotation(data: Mapping[str, bytes]) -> Rotation:
    current, *others = _parsed(data[TRUSTED])
    if not others:
        return Rotation.COMPLETE
    issued = [_load(data, name) for name in _names_of_issued(data)]
    is_replaced = all(_is_by(certificate, current) for certificate in issued)
    return Rotation.REPLACING if is_replaced else Rotation.TRUSTING


def _issued(authority: x509.Certificate, data: Mapping[str, bytes]) -> bool:
    return any(_is_by(_load(data, name), authority) for name in _names_of_issued(data))


def _names_of_issued(data: Mapping[str, bytes]) -> list[str]:
    return [name for holder in HOLDERS if data.get(name := f"{holder}.crt")]


def _is_by(issued: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        issued.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _load(data: Mapping[str, bytes], name: str) -> x509.Certificate:
    try:
        return certificates.load(data[name])
    except RequestError as error:
        raise RequestError(f"{name} is invalid: {error}") from error


def _parsed(pem: bytes) -> list[x509.Certificate]:
    if not pem:
        return []
    try:
        return certificates.load_all(pem)
    except RequestError as error:
        raise RequestError(f"{TRUSTED} or {CERTIFICATE} is invalid: {error}") from error
