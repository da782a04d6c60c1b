"""The outcome of a check, and what to do about it; pure."""

from dataclasses import dataclass
from enum import StrEnum

from shared.model.errors import LeaseholdError

DIAGNOSIS_TIMEOUT_S = 8.0
"""How long a diagnosis waits for a server, which may not respond at all."""


class Outcome(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str = ""
    subject: str = ""
    outcome: Outcome
    text: str
    fix: str = ""


class SkipError(LeaseholdError):
    """A check cannot run here; the message is the reason."""


def ok(text: str) -> Finding:
    return Finding(outcome=Outcome.OK, text=text)


def warn(text: str, fix: str) -> Finding:
    return Finding(outcome=Outcome.WARN, text=text, fix=fix)


def fail(text: str, fix: str) -> Finding:
    return Finding(outcome=Outcome.FAIL, text=text, fix=fix)
