"""What vendors' own webhooks do to a pod, and the messages they refuse it with; pure."""

from collections.abc import Collection, Mapping

from shared.dialects import DIALECTS
from shared.dialects.dialect import PodAsks
from shared.model.errors import RequestError


def amount_changes(amounts: Mapping[str, int]) -> dict[str, int | None]:
    """Return what admission changes in a container's amounts; None: the amount is removed."""
    changes: dict[str, int | None] = {}
    for dialect in DIALECTS.values():
        changes |= dialect.amount_changes(amounts)
    return changes


def added_annotations(pod: PodAsks) -> dict[str, str]:
    """Return the annotations that admission adds to a pod that requests GPUs."""
    added: dict[str, str] = {}
    for dialect in DIALECTS.values():
        added |= dialect.added_annotations(pod)
    return {key: value for key, value in added.items() if key not in pod.annotations}


def vendor_denial(pod: PodAsks, names: Collection[str], *, refused: bool) -> str:
    """Return the first message of these dialects' own webhooks; empty: none of them has one.

    `refused` says whether the pod is refused by our own rules.
    """
    messages = (DIALECTS[name].vendor_denial(pod, refused) for name in DIALECTS if name in names)
    return next(filter(None, messages), "")


def check_vendor_messages(names: Collection[str]) -> None:
    """Raise RequestError naming a dialect that there is not."""
    for name in names:
        if name not in DIALECTS:
            raise RequestError(f"there is no dialect {name!r}; there are {', '.join(DIALECTS)}")
