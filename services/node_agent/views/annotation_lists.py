"""Our entries in node annotations that others write too; pure.

Such an annotation is a list with commas. What we added is remembered in an annotation of our own
beside it, so that what an operator or another program wrote is never taken away.
"""

from collections.abc import Iterable, Mapping

OWN_PREFIX = "leasehold.dev/own-"


def merge_own_entries(
    present: Mapping[str, str], lists: Mapping[str, Iterable[str]]
) -> dict[str, str | None]:
    """Return the annotations to change so that each list holds our entries and all of others'."""
    changes: dict[str, str | None] = {}
    for key, ours in lists.items():
        own_key = OWN_PREFIX + key.rpartition("/")[2]
        shown, added_before = _entries(present.get(key)), _entries(present.get(own_key))
        others = [entry for entry in shown if entry not in added_before]
        added = [entry for entry in ours if entry not in others]
        if set(shown) != {*others, *added}:
            changes[key] = ",".join((*others, *added)) or None
        if added != added_before:
            changes[own_key] = ",".join(added) or None
    return changes


def _entries(text: str | None) -> list[str]:
    return [entry.strip() for entry in (text or "").split(",") if entry.strip()]
