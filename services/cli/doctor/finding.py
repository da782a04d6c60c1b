"""What the doctor says of one thing: how it is, why, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum

from shared.model.errors import LeaseholdError


class Outcome(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    outcome: Outcome
    text: str
    """What is, or why it was skipped."""
    fix: str = ""
    """The command, or what to do, that puts it right."""
    check: str = ""
    subject: str = ""
    """The node; empty: the cluster."""


class SkipError(LeaseholdError):
    """A check cannot be made here, for the reason that it says."""


def ok(text: str) -> Finding:
    """Return that all is well."""
    return Finding(outcome=Outcome.OK, text=text)


def warn(text: str, fix: str) -> Finding:
    """Return that something should be different."""
    return Finding(outcome=Outcome.WARN, text=text, fix=fix)


def fail(text: str, fix: str) -> Finding:
    """Return that something is wrong."""
    return Finding(outcome=Outcome.FAIL, text=text, fix=fix)
