"""When loops of one interval wake up, and what expires."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.clock import ExpiringMap, until_next
from tests.support.clock import FakeClock

EVERY_S = st.sampled_from([0.2, 0.5, 1.0, 5.0])


@given(st.floats(0, 1e8), EVERY_S)
def test_loops_wake_at_multiples_of_their_interval_and_never_twice_for_one(
    now_s: float, every_s: float
) -> None:
    left_s = until_next(now_s, every_s)
    off = (now_s + left_s) / every_s

    assert 0.01 * every_s < left_s <= 1.01 * every_s
    assert abs(off - round(off)) < 1e-6


def test_a_loop_that_wakes_a_moment_early_waits_for_the_next_multiple() -> None:
    assert until_next(9.9995, 0.5) == pytest.approx(0.5005)


def test_what_expires_and_what_is_too_much_is_forgotten_the_oldest_first() -> None:
    clock = FakeClock()
    known: ExpiringMap[str, int] = ExpiringMap(clock.ticks, expires_s=10.0, most=3)
    for number, name in enumerate("abca"):
        known.set(name, number)
        clock.advance(1.0)

    known.set("d", 4)
    assert [known.get(name) for name in "abcd"] == [3, None, 2, 4]
    clock.advance(8.0)
    assert (list(known.values()), "c" in known, "a" in known) == ([3, 4], False, True)
    assert (known.pop("a"), known.pop("a"), len(known)) == (3, None, 1)
    clock.advance(100.0)
    assert len(known) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.0, 3.0)), max_size=200))
def test_it_never_holds_more_than_its_bound_or_anything_old(steps: list[tuple[int, float]]) -> None:
    clock = FakeClock()
    known: ExpiringMap[int, float] = ExpiringMap(clock.ticks, expires_s=10.0, most=8)
    for key, pause_s in steps:
        known.set(key, clock.ticks())
        clock.advance(pause_s)

        assert len(known) <= 8
        assert all(clock.ticks() - at < 10.0 for at in known.values())
