"""Why something is not allowed or not possible; pure."""

import msgspec

from shared.model.change import Change


class Denial(msgspec.Struct, frozen=True, gc=False):
    """The result of a check that fails; a check that passes returns None.

    Parsers of what comes from outside raise RequestError instead.
    """

    code: str
    """Like a reason in a condition of Kubernetes."""
    text: str
    changes: tuple[Change, ...] = ()
    """Empty if only a person can choose."""
