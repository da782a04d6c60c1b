"""The errors of a Redis or Valkey server, translated into ours by what the caller can do."""

from redis.exceptions import (
    AuthenticationError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from shared.credentials.tls import tls_fault
from shared.model.errors import ConflictError, PermissionDeniedError, RequestError, UnavailableError

_TEMPORARY = (MasterDownError, OutOfMemoryError, ReadOnlyError)
"""Answers after which the same call may succeed later."""
_NOT_SERVED = ("NOTREADY", "FORMAT", "LOSTWRITES")
"""The scripts' errors where the server answers, and its ledger cannot be used."""


def is_served(error: Exception, translated: Exception) -> bool:
    """Whether the server did answer, though with an error."""
    return str(error).startswith(_NOT_SERVED) or not isinstance(translated, UnavailableError)


def translate(error: Exception, *, where: str, hint: str) -> Exception:
    """Return our error for one of the server `where`; bugs of ours are returned as they are."""
    text, untranslated = str(error) or type(error).__name__, error
    if reason := _connection_refusal(error, text):
        return UnavailableError(f"the ledger at {where}{reason}")
    if _lacks_permission(error, text):
        return PermissionDeniedError(
            f"the ledger at {where} refuses us: {text}; compare --redis-credentials with "
            "the server's users, both of which `leasehold credentials --out DIR` writes"
        )
    if isinstance(error, ResponseError):
        if text.startswith(_NOT_SERVED):
            return UnavailableError(f"the ledger at {where} {_unready_reason(text)}")
        if text.startswith("STALETOKEN"):
            return ConflictError("another rebuild of the ledger has begun since")
        if not isinstance(error, _TEMPORARY) and not text.startswith("NOREPLICAS"):
            return untranslated
    return UnavailableError(
        f"the ledger at {where} did not take the call: {text}; "
        f"check that the server runs, is the primary and has memory{hint}"
    )


def _unready_reason(text: str) -> str:
    """Explain a script's error: its word, the stored format and ours."""
    word, *formats = text.split()
    if word == "LOSTWRITES":
        return (
            f"has lost writes: {formats[0]} versions that it had confirmed are missing (a replica "
            "that was behind took over, or an older file was loaded); it is closed, and being "
            "rebuilt by a binder"
        )
    if word == "FORMAT":
        stored, ours = formats
        return (
            f"has format {stored}, which a newer version writes; this program writes format {ours} "
            "and leaves it alone: run the newer version, or see Upgrades in docs/operations.md"
        )
    if formats:
        stored, ours = formats
        return (
            f"has format {stored} and is being rebuilt in format {ours}; a binder of this version "
            "does it as soon as it has the list of pods, then the same call succeeds"
        )
    return (
        "is being rebuilt; a binder does it as soon as it has the list of pods, then the same call "
        "succeeds"
    )


def _connection_refusal(error: Exception, text: str) -> str:
    """Explain why no connection is possible; empty: one is."""
    if fault := tls_fault(error, flag="--redis"):
        return f": {fault}"
    if isinstance(error.__cause__, RequestError):
        return f" was not called: {text}"
    if text.startswith("DENIED"):
        return (
            " refuses connections from other machines, with or without a secret, because it runs "
            "in protected mode: start it with --protected-mode no; users and secrets protect it"
        )
    return ""


def _lacks_permission(error: Exception, text: str) -> bool:
    refused = AuthenticationError | NoPermissionError
    is_refusal = isinstance(error, refused) or isinstance(error.__cause__, refused)
    return is_refusal or "ACL failure" in text
