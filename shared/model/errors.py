"""Errors, sorted by what the caller does about them: refuse, ask again, or back off."""


class LeaseholdError(Exception):
    """Anything Leasehold raises on purpose; the message states facts and numbers."""


class RequestError(LeaseholdError):
    """What was asked can never be granted as it stands; asking again cannot help."""


class ConflictError(LeaseholdError):
    """Somebody else was first: reload what was read, decide afresh, at once."""


class UnavailableError(LeaseholdError):
    """A part we depend on did not answer: the same call may succeed after a pause."""


class PermissionDeniedError(UnavailableError):
    """Who we are may not do this there; somebody else may."""
