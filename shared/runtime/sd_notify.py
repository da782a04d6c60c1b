"""Notifies systemd that a service has started (sd_notify(3))."""

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""For systemd units of `Type=notify`: the path of a socket, or @ and an abstract name."""


def notify_ready(status: str, environ: Mapping[str, str] = os.environ) -> None:
    """Notify systemd that the service is ready, with a status text.

    Does nothing without `NOTIFY_SOCKET`. An unreachable socket is logged and ignored.
    """
    address = environ.get(NOTIFY_SOCKET, "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(f"READY=1\nSTATUS={status}".encode(), address)
    except OSError as error:
        logger.warning("%s: %s", environ[NOTIFY_SOCKET], error.strerror)
