"""No statement fills a process's log, and no line is long, whatever it is about."""

import json
import logging

from shared.runtime.log_limits import MOST_LINES, WINDOW_S, StatementLimit
from shared.runtime.telemetry import JsonLines
from tests.support.clock import FakeClock


class Written(logging.Handler):
    """Keeps the lines as they are written."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.setFormatter(JsonLines("binder"))
        self.addFilter(StatementLimit(clock.ticks))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logger_of(handler: Written) -> logging.Logger:
    logger = logging.getLogger("limited")
    logger.setLevel(logging.DEBUG)
    logger.handlers = [handler]
    logger.propagate = False
    return logger


def test_a_statement_writes_so_many_lines_and_then_how_many_it_has_left_out() -> None:
    clock = FakeClock()
    written = Written(clock)
    logger = logger_of(written)

    for number in range(500):
        logger.error("of one cause: %d", number)
    logger.error("of another one")
    for _ in range(2):
        clock.advance(WINDOW_S)
        logger.handle(logger.makeRecord("n", logging.ERROR, __file__, 1, "x", (), None))
    assert len(written.lines) == MOST_LINES + 3

    clock.advance(WINDOW_S)
    for number in range(MOST_LINES + 7):
        logger.handle(logger.makeRecord("n", logging.ERROR, __file__, 1, f"{number}", (), None))
    clock.advance(WINDOW_S)
    logger.handle(logger.makeRecord("n", logging.ERROR, __file__, 1, "later", (), None))

    last = json.loads(written.lines[-1])
    assert (last["text"], last["left_out"]) == ("later", 7)
    assert "left_out" not in json.loads(written.lines[0])


def test_lines_for_debugging_are_all_written() -> None:
    written = Written(FakeClock())
    logger = logger_of(written)

    for _ in range(10 * MOST_LINES):
        logger.debug("an event")

    assert len(written.lines) == 10 * MOST_LINES


def test_a_line_is_short_however_long_its_text_and_its_traceback_are() -> None:
    written = Written(FakeClock())
    logger = logger_of(written)

    text = "x" * 1_000_000
    logger.error("%s", text, exc_info=ValueError(text))

    (line,) = written.lines
    assert len(line) < 30_000
    assert json.loads(line)["text"].startswith("xxx")
    assert "995904 characters" in json.loads(line)["text"]
    assert json.loads(line)["traceback"].startswith("ValueError: xxx")
