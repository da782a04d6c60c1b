"""Which connection makes room for a new one."""

import pytest

from shared.runtime.connections import (
    GRACE_S,
    STALLED_S,
    ConnectionState,
    PortBounds,
    Progress,
    to_close,
)

NOW = 100.0
ACCEPTED, OPEN, PROVEN, BUSY = Progress


def connection(
    progress: Progress, age_s: float = 0.0, address: str = "a", unsent: int = 0
) -> ConnectionState:
    return ConnectionState(address, progress, NOW - age_s, unsent_bytes=unsent)


SLOW = GRACE_S + 1
YOUNG = GRACE_S / 2


@pytest.mark.parametrize(
    ("connections", "closed"),
    [
        pytest.param([(BUSY, 9)], None, id="a request that is handled stays"),
        pytest.param([(PROVEN, 9), (OPEN, SLOW)], 1, id="nothing proved in time comes first"),
        pytest.param([(OPEN, SLOW), (ACCEPTED, 9)], 1, id="the one without progress for longest"),
        pytest.param([(PROVEN, 0), (PROVEN, 9), (OPEN, YOUNG)], 1, id="then one that rests"),
        pytest.param([(BUSY, 9), (OPEN, 0), (OPEN, YOUNG)], 2, id="unproven ones: at most half"),
        pytest.param([(BUSY, 9), (BUSY, 9), (OPEN, YOUNG)], 2, id="nothing rests"),
    ],
)
def test_the_connection_that_has_proved_least_makes_room(
    connections: list[tuple[Progress, float]], closed: int | None
) -> None:
    states = [connection(*each) for each in connections]

    assert to_close(states, NOW) is (None if closed is None else states[closed])


def test_an_address_with_many_connections_makes_room_before_one_with_few() -> None:
    few = connection(PROVEN, 9, address="few")
    many = [connection(PROVEN, age, address="many") for age in (1, 2)]

    assert to_close([few, *many], NOW) is many[1]


def test_a_response_that_is_being_taken_is_not_cut_off() -> None:
    taking = connection(PROVEN, 0.5, unsent=1)

    assert to_close([taking], NOW) is None
    assert to_close([taking], NOW + 1) is taking


def test_a_client_that_takes_nothing_of_a_response_is_gone() -> None:
    state = connection(BUSY)

    for size, at in ((10, 0.0), (9, 1.0), (9, STALLED_S)):
        state.note_unsent(size, at)
        assert not state.has_stalled(at)
    state.note_unsent(9, 1.0 + STALLED_S)
    assert state.has_stalled(1.0 + STALLED_S)
    state.note_unsent(0, 1.0 + STALLED_S)
    assert not state.has_stalled(10 * STALLED_S)


def test_only_a_connection_without_a_request_is_late() -> None:
    bounds = PortBounds(first_request_s=5)

    late = {progress for progress in Progress if connection(progress, 6).is_late(bounds, NOW)}

    assert late == {OPEN}
