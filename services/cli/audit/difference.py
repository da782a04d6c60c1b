"""One thing that an audit finds."""

from dataclasses import dataclass

BIND_S = 3.0
"""How long it may last that a lease or a claim is in one reading and not in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that does not add up."""

    invariant: str
    subject: str
    text: str
    """What is wrong, with both numbers."""
    settles_s: float = 0.0
    """How long it may last while all is well."""
