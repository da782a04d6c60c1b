"""Requests that are not HTTP are logged at debug level, without a traceback.

TLS on a plain port, a scanner's bytes, a body that is not packed as it says: all that is the
sender's doing, and aiohttp has answered it with 400 or closed the connection.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

LOGGER = "aiohttp.server"
SHOWN = 200
"""Characters shown of what is wrong with it."""


class BadRequestFilter(logging.Filter):
    """A logging filter for requests that are not HTTP. Other records pass unchanged."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make a line of it, if it is one of these; drop it where nobody debugs."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | RequestPayloadError):
            return True
        why = " ".join(str(error).split())[:SHOWN]
        record.msg, record.args = "%s: no HTTP: %s", (record.getMessage(), why)
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.exc_info = record.exc_text = None
        return logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)


def suppress_bad_request_tracebacks() -> None:
    """Install the filter for all servers of this process."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(one, BadRequestFilter) for one in logger.filters):
        logger.addFilter(BadRequestFilter())
