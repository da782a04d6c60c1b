"""JSON whose objects have each key once; pure."""

import json
from collections.abc import Iterable
from typing import Any


def load_json(text: str) -> Any:
    """Decode a document. Raises ValueError, also for a key that is there twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found
