"""The errors of a Redis or Valkey server, translated into ours by what the caller can do.

Whatever the server cannot do now is an UnavailableError. Only an error in a function of ours is a
bug.
"""

import re

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from shared.credentials.tls import tls_fault
from shared.ledger.function_library import Library
from shared.model.errors import ConflictError, PermissionDeniedError, RequestError, UnavailableError

_BUG_CODES = frozenset({"CROSSSLOT", "NOPROTO"})
_NOT_SERVED = ("NOTREADY", "FORMAT", "LOSTWRITES", "LOSTRECORDS", "WRONGTYPE")
"""Of functions while the server responds but its ledger cannot be used."""


KEEPS_KEYS = "noeviction"
"""The only `maxmemory-policy` that evicts no lease."""
SET_POLICY = f"redis-cli config set maxmemory-policy {KEEPS_KEYS}, and in its configuration"


class RebuildPendingError(UnavailableError):
    pass


def is_served(error: Exception, translated: Exception) -> bool:
    return str(error).startswith(_NOT_SERVED) or not isinstance(translated, UnavailableError)


def lacks_functions(error: Exception) -> bool:
    return isinstance(error, ResponseError) and "Function not found" in str(error)


def translate(error: Exception, *, where: str, hint: str, library: Library) -> Exception:
    """A bug of ours gets the files of its lines."""
    text = str(error) or type(error).__name__
    if reason := _unavailability(error, text):
        return UnavailableError(f"the ledger at {where}{reason}")
    if _lacks_permission(error, text):
        return PermissionDeniedError(
            f"the ledger at {where} denies access: {text}; compare --redis-credentials with the "
            "server's users; `leasehold credentials --out DIR` writes both"
        )
    if isinstance(error, ResponseError):
        if _code(error, text) == "WRONGTYPE":
            text = "WRONGTYPE"
        if text.startswith(_NOT_SERVED):
            fault = UnavailableError if text.startswith("FORMAT") else RebuildPendingError
            return fault(f"the ledger at {where} {_unready_reason(text)}")
        if text.startswith("STALETOKEN"):
            return ConflictError("another rebuild of the ledger has begun since")
        if _is_bug(error, text):
            bug: Exception = ResponseError(library.located(text))
            return bug
    return UnavailableError(
        f"the call to the ledger at {where} failed: {text.rstrip('.')}; "
        f"check that the server runs, is the primary, has memory and can write to disk{hint}"
    )


def _code(error: ResponseError, text: str) -> str:
    return error.status_code or (re.match(r"[A-Z]{2,}(?= |$)", text) or ["ERR"])[0]


def _is_bug(error: ResponseError, text: str) -> bool:
    """Return whether a function of ours is wrong, as opposed to a state of the server.

    The library moves a code that it knows from the text to `status_code`. Servers use `ERR` for all
    other errors; those of functions contain `user_function`.
    """
    code = _code(error, text)
    if code == "ERR":
        return "user_function" in text and "FUNCTION KILL" not in text
    return code in _BUG_CODES


def _unready_reason(text: str) -> str:
    word, *numbers = text.split()
    key = f"{word} {len(numbers)}" if word == "NOTREADY" else word
    return _UNREADY[key].format(*numbers)


_UNREADY = {
    "LOSTWRITES": "has lost writes that it had confirmed (a replica that was behind took over, or "
    "an older file was loaded); it rejects calls until a binder has rebuilt it",
    "LOSTRECORDS": "has {} of its {} records (others were evicted or deleted); it rejects calls "
    "until a binder has rebuilt it",
    "WRONGTYPE": "has a key of a type that no function of ours gives it (something else has "
    "written to Redis): delete that key, then a binder rebuilds the ledger",
    "FORMAT": "has format {}, which a newer version writes; this program uses format {} and does "
    "not change it: run the newer version, or see docs/upgrade.md",
    "NOTREADY 2": "has format {} and is being rebuilt in format {}; a binder of this version does "
    "it as soon as it has the list of pods, then the same call succeeds",
    "NOTREADY 0": "is being rebuilt; a binder does it as soon as it has the list of pods, then the "
    "same call succeeds",
}


def _unavailability(error: Exception, text: str) -> str:
    if lacks_functions(error):
        return (
            " does not have the functions of this version: a binder of this version loads them; "
            "check that one runs"
        )
    if fault := tls_fault(error, flag="--redis"):
        return f": {fault}"
    if isinstance(error.__cause__, RequestError):
        return f" was not called: {text}"
    if text.startswith("EVICTS"):
        policy = text.removeprefix("EVICTS ")
        return f" may lose leases: maxmemory-policy is {policy}; {SET_POLICY}"
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
