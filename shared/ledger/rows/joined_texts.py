"""Texts that the ledger joins with separators, escaped so that no separator occurs in them; pure.

Two texts are equal if and only if their escaped ones are.
"""

from collections.abc import Iterable

_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "|": "\\p"})
_EMPTY = "\\e"


def escaped(text: str) -> str:
    return text.translate(_ESCAPES) or _EMPTY


def unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    if text == _EMPTY:
        return ""
    first, *others = text.split("\\\\")
    parts = [_unescaped_part(first), *map(_unescaped_part, others)]
    return "\\".join(parts)


def _unescaped_part(part: str) -> str:
    return part.replace("\\n", "\n").replace("\\p", "|")


def joined_texts(texts: Iterable[str]) -> str:
    return "\n".join(map(escaped, texts))


def split_texts(text: str) -> list[str]:
    return list(map(unescaped, text.split("\n"))) if text else []
