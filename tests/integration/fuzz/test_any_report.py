"""What a stolen agent may say to hold: read at each bound, refused beyond, and bounded in texts."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.binder.report.explanations import leftovers_event
from shared.model.bounds import LONGEST_MESSAGE
from shared.model.devices.device import Held, Leftover
from shared.model.events.node_events import DeviceReported
from shared.model.names import NodeName
from shared.nats import wire
from shared.nats.inbox import decode_checked
from shared.nats.subjects import publish_subject
from tests.support.build import device
from tests.support.hostile_agent import (
    BEYOND_BOUNDS,
    EXTREMES_OF_HELD,
    LEFT_BEYOND_BOUNDS,
    MOST_HELD,
    MOST_LEFT,
)

NODE = NodeName("node-a")


def report(held: Held | None = MOST_HELD, left: tuple[Leftover, ...] = MOST_LEFT) -> DeviceReported:
    devices = (replace(device("GPU-a", 0), held=held, leftovers=left), device("GPU-b", 1))
    return DeviceReported(node=NODE, devices=devices, served=(), reported_at=1.0)


def read(data: bytes) -> tuple[list[DeviceReported], list[str]]:
    """Return what is accepted of a message of the node's agent, and what is said of the rest."""
    refused: list[str] = []
    message: Any = SimpleNamespace(data=data, subject=publish_subject(DeviceReported, NODE))
    accepted = decode_checked(DeviceReported, message, lambda _, reason: refused.append(reason))
    return accepted, refused


@pytest.mark.parametrize("held", EXTREMES_OF_HELD, ids=str)
def test_what_is_held_is_read_at_each_bound_and_named_in_an_event_of_the_node(held: Held) -> None:
    sent = report(held)

    accepted, refused = read(wire.encode([sent]))

    assert (accepted, refused) == ([sent], [])
    event = leftovers_event(NODE, accepted[0].devices[0])
    assert len(event.message) <= LONGEST_MESSAGE
    assert accepted[0].devices[0].leftovers[0].text("it")


def beyond() -> Iterator[tuple[str, str, Any]]:
    for part, bounds in (("held", BEYOND_BOUNDS), ("leftovers", LEFT_BEYOND_BOUNDS)):
        for name, values in bounds.items():
            for value in values:
                yield part, name, value
    yield "leftovers", "", len(MOST_LEFT) + 1


@pytest.mark.parametrize(("part", "name", "value"), list(beyond()))
def test_what_is_beyond_a_bound_is_refused_and_other_reports_are_read(
    part: str, name: str, value: Any
) -> None:
    good = report()
    bad = msgpack.unpackb(wire.encode([report()]))
    [event] = bad["events"]
    changed = event["devices"][0][part]
    if not name:
        changed.append(changed[0])
    else:
        (changed if part == "held" else changed[0])[name] = value

    accepted, refused = read(msgpack.packb(bad))
    kept, _ = read(wire.encode([good]))

    assert accepted == []
    assert len(refused) == 1
    assert kept == [good]


@given(st.builds(dict, **{name: st.integers() | st.text() | st.none() for name in BEYOND_BOUNDS}))
def test_whatever_is_held_is_read_or_refused(held: dict[str, Any]) -> None:
    message = msgpack.unpackb(wire.encode([report()]))
    [event] = message["events"]
    event["devices"][0]["held"] = {
        name: value
        for name, value in held.items()
        if not isinstance(value, int) or abs(value) < 2**63
    }

    accepted, refused = read(msgpack.packb(message))

    assert len(accepted) + len(refused) == 1
