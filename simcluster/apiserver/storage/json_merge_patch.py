"""JSON merge patch, RFC 7396."""

from typing import Any

from simcluster.apiserver.storage.objects import Json


def apply_merge_patch(target: Json, patch: Json) -> Json:
    """Apply a merge patch: maps are merged, null removes, anything else replaces."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below: Any = result.get(key)
            result[key] = apply_merge_patch(below if isinstance(below, dict) else {}, value)
        else:
            result[key] = value
    return result
