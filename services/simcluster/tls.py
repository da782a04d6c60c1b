"""The cluster's own certificate authority and the server's certificate, made at the first start."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID_FOR = timedelta(days=3650)
_ADDRESSES = ("127.0.0.1", "::1")
_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of the files; the keys are readable by their owner only."""

    ca: Path
    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """Return the server's side of TLS."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        return context


def certificates(directory: Path, *names: str) -> Certificates:
    """Return the API server's certificates, for its usual names and these, made if missing."""
    return certificates_for(directory, *_NAMES, *names)


def certificates_for(directory: Path, *names: str) -> Certificates:
    """Return certificates for these names and this machine's own addresses, made if missing."""
    paths = Certificates(directory / "ca.crt", directory / "server.crt", directory / "server.key")
    if not all(path.exists() for path in (paths.ca, paths.certificate, paths.key)):
        directory.mkdir(parents=True, exist_ok=True)
        _make(paths, names)
    return paths


def _make(paths: Certificates, dns_names: Sequence[str]) -> None:
    now = datetime.now(UTC)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("leasehold-simcluster-ca")
    ca = (
        _builder(ca_name, ca_name, now)
        .public_key(ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in dns_names]
    names += [x509.IPAddress(ip_address(address)) for address in _ADDRESSES]
    certificate = (
        _builder(_name("leasehold-simcluster"), ca_name, now)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .sign(ca_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_private(paths.key, private)
    paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, now: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + _VALID_FOR)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    partial.write_bytes(content)
    partial.replace(path)


def kept_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the text in `path`, made and written there first if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, make().encode())
    return path.read_text()
