"""What containers that share a GPU's time may use now."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.compute_time.time_layouts import TimeUse
from services.node_agent.compute_time.time_shares import (
    ALL,
    POLICIES,
    S,
    TimeShare,
    allowed_percents,
)

NOW = 5 * S
IDLE = TimeUse()
BUSY = TimeUse(asked_at=NOW)


@st.composite
def shares(draw: st.DrawFn) -> list[TimeShare]:
    """Return shares that the ledger can have leased of one GPU."""
    left = ALL
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        percent = draw(st.integers(0, left))
        left -= percent
        drawn.append(
            TimeShare(
                percent=percent,
                use=draw(st.sampled_from([IDLE, BUSY])),
                priority=draw(st.integers(0, 2)),
            )
        )
    return drawn


@given(shares(), st.sampled_from(POLICIES))
def test_nobody_gets_less_than_its_limit_and_those_that_compute_not_more_than_the_gpu(
    of_gpu: list[TimeShare], policy: str
) -> None:
    allowed = allowed_percents(of_gpu, policy, NOW)

    assert all(percent >= share.percent for percent, share in zip(allowed, of_gpu, strict=True))
    used = [percent for percent, share in zip(allowed, of_gpu, strict=True) if share.is_active(NOW)]
    assert sum(used) <= ALL


@given(shares())
def test_only_the_first_priority_that_computes_gets_more_than_its_limit(
    of_gpu: list[TimeShare],
) -> None:
    allowed = allowed_percents(of_gpu, "default", NOW)

    computing = [share.priority for share in of_gpu if share.is_active(NOW)]
    for percent, share in zip(allowed, of_gpu, strict=True):
        if percent > share.percent:
            assert share.is_active(NOW)
            assert share.priority == min(computing)


@pytest.mark.parametrize(
    ("priorities", "allowed"),
    [((1, 1), [50, 50]), ((0, 1), [75, 25]), ((2, 1), [25, 75])],
)
def test_what_is_unused_is_divided_by_priority_and_limit(
    priorities: tuple[int, int], allowed: list[int]
) -> None:
    of_gpu = [TimeShare(percent=25, use=BUSY, priority=priority) for priority in priorities]

    assert allowed_percents(of_gpu, "default", NOW) == allowed
    assert allowed_percents(of_gpu, "force", NOW) == [25, 25]
