"""YAML in which each key is there once."""

import pytest

from shared.kubernetes.strict_yaml import load_document, load_documents


def test_a_key_that_is_there_twice_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 3: the key 'c' is there twice"):
        load_documents("a: 1\nb:\n  - {c: 1, c: 2}")


def test_a_key_may_be_in_several_mappings_and_overrides_that_of_a_merge() -> None:
    assert load_documents("x: &x {a: 1}\ny: {<<: *x, a: 2}\n---\nx: {<<: {a: 1, b: 2}}") == [
        {"x": {"a": 1}, "y": {"a": 2}},
        {"x": {"a": 1, "b": 2}},
    ]


def test_of_several_documents_none_is_chosen() -> None:
    assert load_document("---\n") is None
    assert load_document("a: 1\n---\n") == {"a": 1}
    with pytest.raises(ValueError, match="2 documents; write one"):
        load_document("a: 1\n---\na: 2\n")


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, "? [a]\n: 1", "a: 2024-99-99", "!!int ''", "!!bool x", "!!timestamp x", "\x01"],
)
def test_whatever_cannot_be_read_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        load_documents(text)
