"""Every field of every event has a bound that its type declares."""

from collections.abc import Iterator

import msgspec.inspect as types
import pytest

from shared.model.events.event import Event
from tests.support.samples import KINDS


def unbounded(found: types.Type, path: str) -> Iterator[str]:
    """Yield the paths of texts and numbers without a bound."""
    match found:
        case types.StrType(max_length=None) | types.BytesType(max_length=None) | types.AnyType():
            yield path
        case types.IntType() | types.FloatType() if not is_between(found):
            yield path
    for name, part in parts(found):
        yield from unbounded(part, path + name)


def is_between(number: types.IntType | types.FloatType) -> bool:
    has_least = (number.ge, number.gt) != (None, None)
    return has_least and (number.le, number.lt) != (None, None)


def parts(found: types.Type) -> list[tuple[str, types.Type]]:
    match found:
        case types.DataclassType() | types.StructType():
            return [(f".{field.name}", field.type) for field in found.fields]
        case types.UnionType():
            return [("", each) for each in found.types]
        case types.VarTupleType() | types.ListType() | types.FrozenSetType():
            return [("[]", found.item_type)]
        case types.TupleType():
            return [("[]", each) for each in found.item_types]
        case types.DictType():
            return [(" key", found.key_type), ("[]", found.value_type)]
    return []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.subject)
def test_every_text_and_number_of_an_event_has_a_bound(kind: type[Event]) -> None:
    assert list(unbounded(types.type_info(kind), kind.__name__)) == []
