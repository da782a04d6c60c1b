"""The webhook's own certificate authority and certificate: made, judged, replaced; no I/O.

Half way through its life a certificate is replaced, with an authority of its own; the one before is
trusted for as long as some replica may still show its certificate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.model.errors import RequestError

LIFE_DAYS = 90
EARLY = timedelta(hours=1)
"""Certificates are valid from so long before they are made: clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a webhook shows, and what the API server must trust to believe it; all PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    """Of this certificate."""
    previous: bytes = b""
    """Authority of the certificate before, which another replica may still show."""

    @property
    def trusted(self) -> bytes:
        """The `caBundle` of the webhook's registration."""
        return self.authority + self.previous


def make(names: Sequence[str], now: datetime, *, after: Bundle | None = None) -> Bundle:
    """Make a new bundle for these DNS names and addresses."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    issuer = _name("leasehold-webhook-ca")
    authority = (
        _builder(issuer, issuer, now, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(names[0]), issuer, now, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_general, names))), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Bundle(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=private,
        authority=authority.public_bytes(serialization.Encoding.PEM),
        previous=after.authority if after else b"",
    )


def is_due(bundle: Bundle, names: Sequence[str], now: datetime) -> bool:
    """Say whether a bundle is to be replaced: past half its life, or for other names.

    Raises RequestError for a bundle that is none.
    """
    certificate = _loaded(bundle)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= begins + (ends - begins) / 2:
        return True
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    covered = {str(name.value) for name in extension.value}
    return not covered.issuperset(names)


def is_valid(bundle: Bundle, now: datetime) -> bool:
    """Say whether the certificate may be shown now. Raises RequestError for no bundle."""
    certificate = _loaded(bundle)
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def ends_at(bundle: Bundle) -> float:
    """Return when the certificate ends, Unix seconds."""
    return _loaded(bundle).not_valid_after_utc.timestamp()


def _loaded(bundle: Bundle) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(bundle.certificate)
    except ValueError as error:
        raise RequestError(f"the stored certificate is none: {error}") from error


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, now: datetime, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - EARLY)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=LIFE_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
