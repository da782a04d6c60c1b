"""NATS' own keys and signed claims: Ed25519 keys in base 32, JSON web tokens signed by them."""

import base64
import binascii
import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.model.errors import RequestError

ACCOUNT = 0 << 3
SERVER = 13 << 3
"""First byte of an account's public key, whose text begins with A, and of a server's, with N."""
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
SEED_BYTES = 32


class Issuer:
    """An account's key pair, by which a NATS server lets in whom we say."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise RequestError(f"an issuer's seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        public = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.public = encode_key(ACCOUNT, public)
        """As a server's configuration names it."""

    def sign(self, claims: dict[str, Any]) -> str:
        """Return claims as a token of ours."""
        signed = f"{_part(_HEADER)}.{_part(claims)}"
        return f"{signed}.{_text(self._key.sign(signed.encode()))}"


def encode_key(prefix: int, key: bytes) -> str:
    """Write a public key as NATS does: prefix, key, checksum, in base 32."""
    body = bytes([prefix]) + key
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def decode_key(prefix: int, text: str) -> bytes:
    """Read a public key of a kind. Raises RequestError for what is none."""
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError as error:
        raise RequestError(f"{text:.60} is no key of NATS") from error
    body, checksum = raw[:-2], raw[-2:]
    if not body or body[0] != prefix or len(body) != 33 or _checksum(body) != checksum:
        raise RequestError(f"{text:.60} is no key of NATS of this kind")
    return body[1:]


def read_claims(token: str, *, kind: int) -> dict[str, Any]:
    """Return what a token claims whose issuer, a key of a kind, has signed it.

    Raises RequestError for any other.
    """
    try:
        head, body, signature = token.split(".")
        claims: dict[str, Any] = json.loads(_bytes(body))
        key = Ed25519PublicKey.from_public_bytes(decode_key(kind, str(claims["iss"])))
        key.verify(_bytes(signature), f"{head}.{body}".encode())
    except (ValueError, KeyError, TypeError, InvalidSignature) as error:
        raise RequestError(f"not a token that its issuer has signed: {error!r}") from error
    return claims


def _part(value: dict[str, Any]) -> str:
    return _text(json.dumps(value, separators=(",", ":")).encode())


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _checksum(body: bytes) -> bytes:
    """CRC-16 of the XMODEM kind, low byte first."""
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")
