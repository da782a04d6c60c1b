"""Errors by what the caller does: give up, retry at once, or retry later; pure."""

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Raised when JSON or MessagePack of others is decoded; deep nesting ends the recursion."""


class LeaseholdError(Exception):
    """The message states facts and numbers."""


class RequestError(LeaseholdError):
    """The request can never be granted as it is; a retry cannot help."""


class ConflictError(LeaseholdError):
    """Another writer was first: reload, decide again, at once."""


class UnavailableError(LeaseholdError):
    """A dependency did not respond: the same call may succeed later."""


class PermissionDeniedError(UnavailableError):
    """Our credentials do not permit this operation."""
