"""Errors by what the caller does: give up, retry at once, or retry later; pure."""

import msgspec

from shared.model.change import Change

UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Of data from outside; deep nesting ends the recursion."""


class LeaseholdError(Exception):
    pass


class RequestError(LeaseholdError):
    """A retry cannot help."""

    def __init__(self, text: object = "", *changes: Change) -> None:
        super().__init__(text)
        self.changes = changes


class ConflictError(LeaseholdError):
    """Another writer was first: reload and decide again, at once."""


class UnavailableError(LeaseholdError):
    """The same call may succeed later."""


class PermissionDeniedError(UnavailableError):
    pass
