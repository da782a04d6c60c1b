"""Lists are split into their items wherever the network cuts them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shared.kubernetes import list_items
from shared.kubernetes.errors import UnexpectedResponseError
from shared.kubernetes.list_items import ListItems
from shared.model.errors import UnavailableError

TEXTS = some.text('\\"{}[],: aé\n\0', max_size=8)
VALUES = some.recursive(
    some.none() | some.integers() | TEXTS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXTS, inner, max_size=3),
)
OBJECTS = some.lists(some.dictionaries(TEXTS, VALUES, max_size=3), max_size=4)
SEPARATORS = some.sampled_from([None, (",", ":")])


def split(body: bytes, size: int) -> Iterator[Any]:
    items = ListItems()
    for at in range(0, len(body), size):
        yield from map(json.loads, items.add(body[at : at + size]))
    yield from map(json.loads, items.end())


@given(OBJECTS, SEPARATORS, some.integers(1, 40), some.booleans())
def test_any_objects_are_split_in_any_parts(
    objects: list[Any], separators: tuple[str, str] | None, size: int, ascii_only: bool
) -> None:
    listed = {"kind": "PodList", "metadata": {}, "items": objects, "last": {"a": "}]"}}
    body = json.dumps(listed, separators=separators, ensure_ascii=ascii_only).encode()

    assert list(split(body, size)) == objects


@pytest.mark.parametrize("body", [b'{"items":[', b'{"items":[{}', b'{"items":[{"a":"}]'])
def test_a_list_that_ends_early_is_incomplete(body: bytes) -> None:
    with pytest.raises(UnavailableError, match="ends within its list"):
        list(split(body, 4))


def test_an_item_that_is_no_object_is_refused() -> None:
    with pytest.raises(UnexpectedResponseError, match="no object"):
        list(split(b'{"items":[{}, 5]}', 100))


def test_an_endless_item_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_items, "MOST_ITEM_BYTES", 1000)

    with pytest.raises(UnexpectedResponseError, match="an item of more than"):
        list(split(b'{"items":[{"a":"' + b"x" * 3000, 10))
