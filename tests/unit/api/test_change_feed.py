"""Changes after a reader's position, and the settings of authentication."""

from typing import Any

import pytest

from services.api.projection import EVENTS
from services.api.service import MAX_CHANGES, ChangeFeed
from services.api.settings import ApiSettings
from shared.credentials.authorization import is_loopback
from shared.model.errors import RequestError


def test_a_reader_receives_what_changed_after_its_position() -> None:
    feed = ChangeFeed()
    feed.publish({("device", "a")})
    position = feed.position
    feed.publish({("device", "b")})
    feed.publish({EVENTS, ("device", "b")})

    assert feed.since(position) == frozenset({("device", "b"), EVENTS})
    assert feed.since(feed.position) == frozenset()


@pytest.mark.parametrize("position", ["", "other-1", "x", "{feed_id}-9", "{feed_id}--1"])
def test_an_unknown_position_means_to_start_anew(position: str) -> None:
    feed = ChangeFeed()
    feed.publish({EVENTS})

    assert feed.since(position.format(feed_id=feed.id)) is None


def test_a_reader_that_is_too_far_behind_starts_anew() -> None:
    feed = ChangeFeed()
    position = feed.position
    for _ in range(MAX_CHANGES):
        feed.publish({EVENTS})

    assert feed.since(position) == frozenset({EVENTS})
    feed.publish({EVENTS})
    assert feed.since(position) is None


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:80", True),
        ("127.8.0.1", True),
        ("localhost:8080", True),
        ("[::1]:80", True),
        ("::1", True),
        ("0.0.0.0:80", False),
        (":80", False),
        ("[::]:80", False),
        ("10.0.0.1:80", False),
        ("localhost.example.org:80", False),
        ("127.0.0.1.example.org:80", False),
    ],
)
def test_loopback_addresses_are_recognised(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"listen": "0.0.0.0:80"}, "--auth none shows everything to any client"),
        ({"tokens": "t"}, "add --auth tokens"),
    ],
)
def test_contradictory_and_unsafe_settings_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ApiSettings(**changes).check()
