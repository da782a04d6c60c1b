"""How a namespace's budget went down in its open window: points for one small picture."""

from collections.abc import Iterable
from typing import Any

from shared.model.budget import UNITS_PER_GPU_MINUTE, BudgetWindow, ChargeEntry

POINTS = 60


def burn_down(
    window: BudgetWindow, entries: Iterable[ChargeEntry], *, at_ms: int
) -> list[dict[str, Any]]:
    """Return what was left at up to `POINTS` instants of the window until `at_ms`.

    Amounts are GPU-minutes; charges count at the end of the time they are for. Without a limit,
    what was used.
    """
    allowed = window.allowed_units
    charges = sorted(
        (max(entry.to_ms, window.start_ms), entry.units)
        for entry in entries
        if entry.kind == "charge" and entry.window == window.id
    )
    span = max(at_ms - window.start_ms, 1)
    points, used, following = [], 0, iter(charges)
    ahead = next(following, None)
    for number in range(POINTS + 1):
        until = window.start_ms + span * number // POINTS
        while ahead is not None and ahead[0] <= until:
            used += ahead[1]
            ahead = next(following, None)
        left = used if allowed is None else allowed - used
        points.append({"at": until / 1000, "minutes": left / UNITS_PER_GPU_MINUTE})
    return points
