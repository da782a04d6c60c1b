"""A stored certificate that cannot be used is refused by the name of its place, with a remedy."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import (
    FILES,
    CertificateBundle,
    DirectoryStore,
    SecretStore,
    make,
)
from shared.model.errors import RequestError
from tests.support.webhook.replica import NAMES

NOW = datetime.now(UTC)


def bundle_without_names() -> CertificateBundle:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=90))
        .sign(key, hashes.SHA256())
    )
    return CertificateBundle(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=private(key, serialization.NoEncryption()),
        authority=b"",
    )


def private(
    key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption
) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, encryption)


def with_passphrase(bundle: CertificateBundle) -> CertificateBundle:
    key = ec.generate_private_key(ec.SECP256R1())
    return replace(bundle, key=private(key, serialization.BestAvailableEncryption(b"secret")))


def serving(directory: Path) -> ServingCertificate:
    return ServingCertificate(DirectoryStore(directory), None, NAMES, lambda: NOW)


@pytest.mark.parametrize(
    "damaged",
    [
        replace(make(NAMES, NOW), certificate=b"no PEM"),
        replace(make(NAMES, NOW), key=make(NAMES, NOW).key),
        replace(make(NAMES, NOW), key=b"no PEM"),
        replace(make(NAMES, NOW), authority=b"no PEM"),
        with_passphrase(make(NAMES, NOW)),
    ],
    ids=["certificate", "key of another", "key", "authority", "encrypted key"],
)
async def test_a_damaged_bundle_is_refused_until_its_certificate_is_removed(
    tmp_path: Path, damaged: CertificateBundle
) -> None:
    await DirectoryStore(tmp_path).save(damaged, after=None)
    certificate = serving(tmp_path)

    with pytest.raises(RequestError, match=f"in {tmp_path}, .* is invalid .* remove tls.crt"):
        await certificate.refresh()
    (tmp_path / FILES["certificate"]).unlink()
    await certificate.refresh()

    assert certificate.unready_reason() is None


async def test_a_certificate_without_names_is_replaced(tmp_path: Path) -> None:
    await DirectoryStore(tmp_path).save(bundle_without_names(), after=None)
    certificate = serving(tmp_path)

    await certificate.refresh()

    assert certificate.unready_reason() is None
    assert certificate.bundle != bundle_without_names()


async def test_readiness_has_the_reason_and_it_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await DirectoryStore(tmp_path).save(replace(make(NAMES, NOW), key=b"no PEM"), after=None)
    certificate = serving(tmp_path)
    pauses = 0

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await certificate.run(pause)

    assert f"no certificate yet: the certificate in {tmp_path}" in (
        certificate.unready_reason() or ""
    )
    assert len(caplog.records) == 1


def test_a_secret_is_named_with_its_namespace() -> None:
    assert SecretStore(None, "lh", "webhook").place == "Secret lh/webhook"  # type: ignore[arg-type]
