"""What a reader of the page hears since its place, and the settings of who may read."""

from typing import Any

import pytest

from services.dashboard.change_feed import ROUNDS_KEPT, Hub
from services.dashboard.projection import TICKER
from services.dashboard.settings import DashboardSettings
from shared.credentials.authorization import is_loopback
from shared.model.errors import RequestError


def test_a_reader_hears_what_changed_since_its_place() -> None:
    hub = Hub()
    hub.publish({("device", "a")})
    place = hub.place
    hub.publish({("device", "b")})
    hub.publish({TICKER, ("device", "b")})

    assert hub.since(place) == frozenset({("device", "b"), TICKER})
    assert hub.since(hub.place) == frozenset()


@pytest.mark.parametrize("place", ["", "other-1", "x", "{life}-9", "{life}--1"])
def test_a_place_that_nobody_knows_means_to_start_anew(place: str) -> None:
    hub = Hub()
    hub.publish({TICKER})

    assert hub.since(place.format(life=hub.life)) is None


def test_a_reader_that_is_too_far_behind_starts_anew() -> None:
    hub = Hub()
    place = hub.place
    for _ in range(ROUNDS_KEPT):
        hub.publish({TICKER})

    assert hub.since(place) == frozenset({TICKER})
    hub.publish({TICKER})
    assert hub.since(place) is None


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
def test_what_is_this_machine(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"listen": "0.0.0.0:80"}, "--auth none would show everything to anybody"),
        ({"auth": "both"}, "none of none, tokens, kube"),
        ({"tokens": "t"}, "add --auth tokens"),
        ({"trace_url": "javascript:alert(1)"}, "no http://"),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(changes: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        DashboardSettings(**changes).check()
