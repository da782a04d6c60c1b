"""Node scores as Volcano's users know them, for explaining a choice and comparing policies."""

from collections.abc import Iterable

from shared.model.request import NodeOrder

FULL_SCORE = 100

Taken = tuple[int, int, int, int]
"""A taken device: its shares and MiB before, the MiB taken of it now, all of its MiB."""


def pod_score(order: NodeOrder, taken: Iterable[Taken]) -> int:
    """Score a node for the devices that a pod would take there, rounded to whole points.

    BINPACK gives each device the percentage of its memory that is then in use. SPREAD gives
    100 to each that was idle *before*: counted afterwards, no device ever would be.
    """
    if order is NodeOrder.BINPACK:
        points = sum(FULL_SCORE * (before + now) / total for _, before, now, total in taken)
    else:
        points = sum(FULL_SCORE for shares, *_ in taken if not shares)
    return int(points + 0.5)
