"""How promised starts have ended, as the API returns it; pure."""

from shared.model.names import Namespace
from shared.model.views.view import View


class PromiseSums(View, frozen=True, kw_only=True):
    """Of a namespace, or of all."""

    namespace: Namespace = Namespace("")
    kept: int
    withdrawn: int
    not_needed: int
    kept_percent: float | None
    """Of those that were kept or withdrawn, rounded down to tenths; None: there were none."""
    half_known_s: float | None
    """How long before their pods got GPUs half of the kept promises had been made."""
    most_known_s: float | None
    """The same for nine of ten."""


class PromisesView(View, frozen=True, kw_only=True):
    """Promised starts that have ended in a period."""

    start: float
    """Later than requested where older ones are not recorded any more."""
    end: float
    namespaces: tuple[PromiseSums, ...]
    total: PromiseSums
