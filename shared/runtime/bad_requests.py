"""Requests that are not HTTP are logged at debug level, without a traceback.

Examples are TLS on a plain port, a port scan, or a body with a wrong encoding. aiohttp has already
responded with 400 or closed the connection.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

LOGGER = "aiohttp.server"
SHOWN = 200
"""Characters of the reason that are logged."""


class BadRequestFilter(logging.Filter):
    """A logging filter for requests that are not HTTP. Other records pass unchanged."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Turn such a record into a debug line; drop it if debug logging is off."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | RequestPayloadError):
            return True
        why = " ".join(str(error).split())[:SHOWN]
        record.msg, record.args = "%s: not HTTP: %s", (record.getMessage(), why)
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.exc_info = record.exc_text = None
        return logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)


def suppress_bad_request_tracebacks() -> None:
    """Install the filter for all servers of this process."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(one, BadRequestFilter) for one in logger.filters):
        logger.addFilter(BadRequestFilter())
