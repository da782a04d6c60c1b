"""Why something is not allowed or not possible, in one form: a code and a text; pure."""

import msgspec

from shared.model.change import Change


class Denial(msgspec.Struct, frozen=True, gc=False):
    """The result of a check that fails; a check that passes returns None.

    For example, `Denial("InsufficientGpuMemory", "8000 MiB are requested, 3000 MiB are free")`.
    Parsers of what comes from outside raise RequestError instead.
    """

    code: str
    """Machine-readable, like a reason in a condition of Kubernetes."""
    text: str
    """What is wrong, with numbers, and what to do."""
    changes: tuple[Change, ...] = ()
    """The first way out that the text names; none if only a person can choose."""
