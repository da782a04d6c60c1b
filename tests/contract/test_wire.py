"""What messages may be: every event has a sample and bounds, and odd messages are refused.

`test_recorded` has the form that versions wrote.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgpack
import msgspec.inspect as types
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from services.topology import roles
from shared.model.errors import RequestError
from shared.model.events.event import EVENTS, Event
from shared.model.events.pod_events import PodTerminated
from shared.model.names import Namespace
from shared.nats import wire
from shared.runtime.settings import ServiceSettings
from shared.runtime.span_attributes import holder_of
from shared.runtime.telemetry import open_tracing
from tests.support.samples import KINDS, NODE, POD, SAMPLES


def test_every_event_has_a_sample() -> None:
    ours = (kind for kind in EVENTS.values() if kind.__module__.startswith("shared."))

    assert {kind.subject for kind in ours} == {sample.subject for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
def test_unknown_fields_are_ignored(sample: Event) -> None:
    form = msgpack.unpackb(wire.encode([sample]))
    form["events"][0]["a_field_of_tomorrow"] = 1

    assert wire.decode(msgpack.packb(form), type(sample)) == [sample]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
def test_the_handling_of_every_event_is_traced_under_the_pod_that_it_names(
    sample: Event, tmp_path: Path
) -> None:
    tracing = open_tracing("test", ServiceSettings(trace_dir=tmp_path))

    _, spans = tracing.start("handle", [sample], kind=SpanKind.CONSUMER)

    pods = [cast("ReadableSpan", span).attributes for span in spans]
    if hasattr(sample, "pod") and hasattr(sample, "trace"):
        assert [holder_of(attributes or {}) for attributes in pods] == [sample.pod]


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb({"v": 2}), msgpack.packb([1])])
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        wire.decode(data, PodTerminated)


@pytest.mark.parametrize(("count", "reasons"), [(256, 256), (257, 1), (1_000_000, 1)])
def test_a_message_with_more_events_than_any_sender_puts_into_one_is_refused_as_a_whole(
    count: int, reasons: int
) -> None:
    events, errors = wire.decode_each(
        msgpack.packb({"v": 1, "events": [None] * count}), PodTerminated
    )

    assert (events, len(errors)) == ([], reasons)


def test_a_confirmation_with_more_numbers_than_any_receiver_holds_is_refused() -> None:
    most = wire.Confirmation(held=[1] * wire.MOST_CONFIRMED)

    assert wire.decode_confirmation(wire.encode_confirmation(most)) == most
    for name in ("handled", "held", "returned"):
        with pytest.raises(RequestError, match="length <= 65536"):
            wire.decode_confirmation(msgpack.packb({name: [1] * (wire.MOST_CONFIRMED + 1)}))


def test_a_message_with_more_valid_events_than_any_sender_puts_into_one_is_refused() -> None:
    gone = PodTerminated(
        pod=POD, namespace=Namespace("default"), name="train", node=NODE, phase="Failed"
    )

    assert wire.decode(wire.encode([gone] * 256), PodTerminated) == [gone] * 256
    with pytest.raises(RequestError, match="length <= 256"):
        wire.decode(wire.encode([gone] * 257), PodTerminated)


def test_of_a_message_with_an_invalid_event_the_others_are_read() -> None:
    gone = PodTerminated(
        pod=POD, namespace=Namespace("default"), name="train", node=NODE, phase="Failed"
    )
    too_long = replace(gone, name="x" * 254)

    events, errors = wire.decode_each(wire.encode([gone, too_long, gone]), PodTerminated)

    assert events == [gone, gone]
    assert [str(error).rpartition(": ")[2] for error in errors] == [
        "Expected `str` of length <= 253 - at `$.name`"
    ]


def unbounded(found: types.Type, path: str) -> Iterator[str]:
    """Yield the paths of texts and numbers without a bound."""
    match found:
        case types.StrType(max_length=None) | types.BytesType(max_length=None) | types.AnyType():
            yield path
        case types.IntType() | types.FloatType():
            has_least = (found.ge, found.gt) != (None, None)
            if not (has_least and (found.le, found.lt) != (None, None)):
                yield path
    for name, part in parts(found):
        yield from unbounded(part, path + name)


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


def unlimited(found: types.Type, path: str) -> Iterator[str]:
    """Yield the paths of lists and maps without a limit."""
    match found:
        case types.VarTupleType(max_length=None) | types.ListType(max_length=None):
            yield path
        case types.FrozenSetType(max_length=None) | types.DictType(max_length=None):
            yield path
    for name, part in parts(found):
        yield from unlimited(part, path + name)


OF_NODES = {event for role in roles()["node-agent"] for event in role.publishes}


@pytest.mark.parametrize("kind", sorted(OF_NODES, key=str))
def test_every_list_and_map_of_a_nodes_message_has_a_limit(kind: type[Event]) -> None:
    assert list(unlimited(types.type_info(kind), kind.__name__)) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.subject)
def test_every_text_and_number_of_an_event_has_a_bound(kind: type[Event]) -> None:
    assert list(unbounded(types.type_info(kind), kind.__name__)) == []
