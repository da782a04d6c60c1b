"""Log lines about what others send are bounded in length and number, per cause and in total."""

import logging

import pytest

from shared.model.bounds import LONGEST_MESSAGE
from shared.nats.limited_log import EVERY_S, MOST_KEYS, LimitedLog
from tests.support.clock import FakeClock

logger = logging.getLogger("limited")


def test_one_cause_has_a_line_in_a_while_with_the_number_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    log = LimitedLog(logger, clock.ticks)

    for number in range(430):
        log.write(logging.ERROR, "node-a", f"line {number}")
    log.write(logging.ERROR, "node-b", "of another node")
    clock.advance(EVERY_S)
    log.write(logging.ERROR, "node-a", "later")

    assert caplog.messages == [
        "line 0",
        "of another node",
        "later (429 more since the last line)",
    ]


def test_a_line_is_short_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    LimitedLog(logger).write(logging.ERROR, "node-a", "\x1b[2J\n" + "x" * 100_000)

    (text,) = caplog.messages
    assert text.isprintable()
    assert len(text) == LONGEST_MESSAGE


def test_invented_causes_share_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = LimitedLog(logger, clock.ticks)

    for number in range(10 * MOST_KEYS):
        log.write(logging.ERROR, f"node-{number}", "line")
    assert len(caplog.messages) == MOST_KEYS + 1
    clock.advance(EVERY_S)
    log.write(logging.ERROR, "node-x", "line")

    assert len(log._series) == 1
