"""Lists are split into their items wherever the network cuts them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from shared.kubernetes import client
from shared.kubernetes.client import ListItems
from shared.kubernetes.errors import UnexpectedResponseError

TEXTS = some.text('"{}[],:\\ aé\n\0', max_size=8)
KEYS = some.sampled_from(["metadata", "a", ',{"metadata":'])
VALUES = some.recursive(
    some.none() | TEXTS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(KEYS, inner, max_size=3),
)
OBJECTS = some.lists(some.dictionaries(KEYS, VALUES, max_size=3), max_size=4)
SEPARATORS = some.sampled_from([None, (",", ":")])


def split(body: bytes, size: int) -> Iterator[Any]:
    items = ListItems()
    for at in range(0, len(body), size):
        yield from map(json.loads, items.add(body[at : at + size]))
    yield from json.loads(items.rest)["items"]


@given(OBJECTS, SEPARATORS, some.integers(1, 40), some.booleans())
@example([{"metadata": [{"a": 1}, {"metadata": 2}]}, {"metadata": {}}], (",", ":"), 7, True)
def test_any_objects_are_split_in_any_parts(
    objects: list[Any], separators: tuple[str, str] | None, size: int, ascii_only: bool
) -> None:
    listed = {"kind": "PodList", "metadata": {}, "items": objects, "last": {"a": "}]"}}
    body = json.dumps(listed, separators=separators, ensure_ascii=ascii_only).encode()

    assert list(split(body, size)) == objects


@pytest.mark.parametrize("size", [1, 25, 100])
def test_all_items_but_the_last_are_split_as_they_arrive(size: int) -> None:
    items = ListItems()
    head = b'{"kind":"PodList","metadata":{"resourceVersion":"1234567890"},'
    body = head + b'"items":[{"metadata":{}},{"metadata":{}},{"metadata":{}}]}'
    parts = [body[at : at + size] for at in range(0, len(body), size)]

    assert [item for part in parts for item in items.add(part)] == [b'{"metadata":{}}'] * 2


def test_an_endless_item_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_ITEM_BYTES", 1000)

    with pytest.raises(UnexpectedResponseError, match="an item of more than"):
        list(split(b'{"items":[{"a":"' + b"x" * 3000, 10))
