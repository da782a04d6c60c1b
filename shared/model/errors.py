"""Errors by what the caller does: give up, retry at once, or retry later; pure."""

import msgspec

from shared.model.change import Change

UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Raised when JSON or MessagePack of others is decoded; deep nesting ends the recursion."""


class LeaseholdError(Exception):
    """The message states facts and numbers."""


class RequestError(LeaseholdError):
    """The request can never be granted as it is; a retry cannot help."""

    def __init__(self, text: object = "", *changes: Change) -> None:
        super().__init__(text)
        self.changes = changes
        """The first way out that the text names; none if only a person can choose."""


class ConflictError(LeaseholdError):
    """Another writer was first: reload, decide again, at once."""


class UnavailableError(LeaseholdError):
    """A dependency did not respond: the same call may succeed later."""


class PermissionDeniedError(UnavailableError):
    """Our credentials do not permit this operation."""
