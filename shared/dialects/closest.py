"""The word that was probably meant; pure."""

import difflib
from collections.abc import Iterable

MOST_COMPARED = 128
"""Characters. A comparison takes time by the square of them, and annotations have up to 256 KiB."""


def closest(text: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the word that a text is most like, or "".

    >>> closest("memroy", ["cores", "memory"]), closest("memory" * 50_000, ["memory"])
    ('memory', '')
    """
    if len(text) > MOST_COMPARED:
        return ""
    return next(iter(difflib.get_close_matches(text, [*words], n=1, cutoff=cutoff)), "")
