"""The wire form of every event, pinned: what version 1 wrote must always be readable.

After adding a field with a default: `python -m tests.contract.test_wire`; review the difference.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from shared.model.errors import RequestError
from shared.model.events.event import EVENTS, Event
from shared.model.events.pod_events import PodTerminated
from shared.model.names import Namespace
from shared.nats import wire
from tests.support.samples import NODE, POD, SAMPLES

PINNED = Path(__file__).with_name("wire_v1.json")


def written() -> dict[str, Any]:
    return {sample.subject: msgpack.unpackb(wire.encode([sample])) for sample in SAMPLES}


def pinned() -> dict[str, Any]:
    forms: dict[str, Any] = json.loads(PINNED.read_text())
    return forms


def test_every_event_is_pinned() -> None:
    ours = (kind for kind in EVENTS.values() if kind.__module__.startswith("shared."))
    kinds = {kind.subject for kind in ours}

    assert kinds == {sample.subject for sample in SAMPLES} == set(pinned())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
def test_events_are_written_in_the_pinned_form(sample: Event) -> None:
    assert written()[sample.subject] == pinned()[sample.subject]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
def test_the_pinned_form_is_read_and_unknown_fields_are_ignored(sample: Event) -> None:
    form = pinned()[sample.subject]
    form["events"][0]["a_field_of_tomorrow"] = 1

    assert wire.decode(msgpack.packb(form), type(sample)) == [sample]


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb({"v": 2}), msgpack.packb([1])])
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        wire.decode(data, PodTerminated)


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


if __name__ == "__main__":
    PINNED.write_text(json.dumps(written(), indent=1, sort_keys=True) + "\n")
