"""X.509 certificates: creating a CA and certificates that it signs; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.model.errors import RequestError

EARLY = timedelta(hours=1)
"""Certificates are valid from this time before their creation, since clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def authority(name: str, now: datetime, *, days: int) -> IssuedCertificate:
    """Create a CA for certificates of servers and clients, but not of other CAs."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(name)
    made = (
        _builder(issuer, issuer, now, days, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(made, key)


def issue(
    by: IssuedCertificate, names: Sequence[str], now: datetime, *, days: int, client: bool = False
) -> IssuedCertificate:
    """Create a certificate for DNS names and addresses; with `client` also for clients."""
    signer, signing_key = _loaded(by)
    key = ec.generate_private_key(ec.SECP256R1())
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
    if client:
        purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    made = (
        _builder(_name(names[0]), signer.subject, now, days, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_general, names))), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
            critical=False,
        )
        .sign(signing_key, hashes.SHA256())
    )
    return _pem(made, key)


def is_due(certificate: bytes, names: Sequence[str], now: datetime) -> bool:
    """Return whether it is past half its life, or for other names.

    Raises RequestError for an invalid certificate.
    """
    loaded = load(certificate)
    begins = loaded.not_valid_before_utc
    ends = loaded.not_valid_after_utc
    if now >= begins + (ends - begins) / 2:
        return True
    try:
        extension = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return True
    except ValueError as error:
        raise RequestError(f"the extensions of the certificate are invalid: {error}") from error
    return not {str(name.value) for name in extension.value}.issuperset(names)


def load(certificate: bytes) -> x509.Certificate:
    """Raises RequestError."""
    return load_all(certificate)[0]


def load_all(pem: bytes) -> list[x509.Certificate]:
    """Return one certificate at least. Raises RequestError."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        why = str(error).partition(" See ")[0]
        raise RequestError(f"it is no certificate in PEM: {why}") from error


def _loaded(by: IssuedCertificate) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        key = serialization.load_pem_private_key(by.key, password=None)
    except (ValueError, TypeError) as error:
        raise RequestError(f"the key of the CA is invalid: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RequestError("the key of the CA is not an elliptic-curve key")
    return load(by.certificate), key


def _pem(made: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> IssuedCertificate:
    return IssuedCertificate(
        certificate=made.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    now: datetime,
    days: int,
    key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - EARLY)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
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
