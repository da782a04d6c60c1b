"""NATS' nkeys and signed claims: Ed25519 keys in base 32, JSON web tokens signed by them; pure."""

import base64
import binascii
import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.model.errors import RequestError

ACCOUNT = 0 << 3
"""The text begins with A."""
SERVER = 13 << 3
"""The text begins with N."""
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
SEED_BYTES = 32


class TokenIssuer:
    """An account's key pair, which signs authorization responses."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise RequestError(f"an issuer's seed must have {SEED_BYTES} bytes, not {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        public = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.public = encode_key(ACCOUNT, public)

    def sign(self, claims: dict[str, Any]) -> str:
        signed = f"{_encode_part(_HEADER)}.{_encode_part(claims)}"
        return f"{signed}.{_encode_base64(self._key.sign(signed.encode()))}"


def encode_key(prefix: int, key: bytes) -> str:
    """Encode a public key: prefix, key, checksum, in base 32.

    >>> encode_key(ACCOUNT, bytes(32))[:4]
    'AAAA'
    """
    body = bytes([prefix]) + key
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def decode_key(prefix: int, text: str) -> bytes:
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError as error:
        raise RequestError(f"{text:.60} is not an nkey") from error
    body = raw[:-2]
    checksum = raw[-2:]
    if not body or body[0] != prefix or len(body) != 33 or _checksum(body) != checksum:
        raise RequestError(f"{text:.60} is not an nkey of the expected type")
    return body[1:]


def verify_claims(token: str, *, kind: int) -> dict[str, Any]:
    """Raises RequestError unless a key of this kind, the issuer, has signed the token."""
    try:
        head, body, signature = token.split(".")
        claims: dict[str, Any] = json.loads(_decode_base64(body))
        key = Ed25519PublicKey.from_public_bytes(decode_key(kind, str(claims["iss"])))
        key.verify(_decode_base64(signature), f"{head}.{body}".encode())
    except (ValueError, KeyError, TypeError, InvalidSignature) as error:
        raise RequestError(f"not a valid token signed by its issuer: {error!r}") from error
    return claims


def _encode_part(value: dict[str, Any]) -> str:
    return _encode_base64(json.dumps(value, separators=(",", ":")).encode())


def _encode_base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decode_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _checksum(body: bytes) -> bytes:
    """CRC-16 of the XMODEM kind, low byte first."""
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")
