"""When loops of one interval wake up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.clock import until_next

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
