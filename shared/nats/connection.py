"""Connecting to NATS as a user, reconnecting, and the reasons of failures as text."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from prometheus_client import Counter

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import tls_fault
from shared.model.clock import end
from shared.model.errors import RequestError, UnavailableError
from shared.nats.client import NO_TLS, NatsClient
from shared.nats.limited_log import LimitedLog
from shared.nats.subjects import inbox_of

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

LATE_S = 2.0
"""The reason is logged if the first connection takes longer than this."""
DROPPED = Counter(
    "leasehold_nats_dropped_messages",
    "Received messages that were dropped: too many waited for the same handler.",
)

_ENDED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""The server closes a connection before its reason was read."""


async def connected(
    url: str,
    *,
    name: str,
    credentials: ClientCredentials,
    patience_s: float,
    on_failure: Callable[[str], None] | None = None,
) -> NatsClient:
    """`on_failure` is called with the reason of each failed attempt.

    Raises UnavailableError if no server accepts the login within `patience_s`, RequestError if a
    file cannot be read.
    """
    where = url.rpartition("@")[2]
    errors = _ConnectionErrors(
        lambda met: on_failure(_failure_text(where, credentials, met)) if on_failure else None
    )
    parts = urlsplit(url)
    requires_tls = bool(credentials.tls) or parts.scheme == "tls"
    if requires_tls:
        credentials.tls.context()
    client = NatsClient(credentials, requires_tls=requires_tls)
    connecting = asyncio.create_task(
        client.connect(
            url,
            name=name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,
            # A server that does not reply is noticed within 9 s.
            ping_interval=3,
            max_outstanding_pings=2,
            pending_size=16 * 1024 * 1024,
            error_cb=errors.note,
            disconnected_cb=_logged_event("lost the connection to NATS; reconnecting"),
            reconnected_cb=errors.back,
            # A cluster announces servers by address; their certificates are for its name.
            **({"tls_hostname": parts.hostname} if requires_tls else {}),
            **_options(client, name, credentials, requires_tls=requires_tls),
        )
    )
    try:
        await _within(connecting, patience_s)
    except (TimeoutError, OSError, nats.errors.Error) as error:
        errors.sort(error)
        raise UnavailableError(_failure_text(where, credentials, errors)) from error
    finally:
        if not client.is_connected:
            await client.close()
    errors.is_connected = True
    return client


async def _within(connecting: "asyncio.Task[None]", patience_s: float) -> None:
    """Cancel the task after the timeout; the library would retry for ever."""
    try:
        if not (await asyncio.wait({connecting}, timeout=patience_s))[0]:
            raise TimeoutError
        connecting.result()
    finally:
        if not connecting.done():
            with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
                await end(connecting)


def _options(
    client: NatsClient, name: str, credentials: ClientCredentials, *, requires_tls: bool
) -> dict[str, Any]:
    login = credentials.login()
    if login is not None:
        inbox = inbox_of(login.user)
        login_callbacks = {"user": client.user_name, "password": client.password}
        return {**login_callbacks, "inbox_prefix": inbox}
    # A server without users: receivers check the form of the inbox all the same.
    options: dict[str, Any] = {"inbox_prefix": inbox_of(name)}
    return {**options, "token": client.empty_token} if requires_tls else options


class ConnectWait:
    """Each reason is logged once, after `LATE_S`."""

    def __init__(self) -> None:
        self.reason = ""
        self._began = time.monotonic()
        self._logged: set[str] = set()

    def note(self, why: str) -> None:
        self.reason = why
        if time.monotonic() - self._began >= LATE_S and why not in self._logged:
            self._logged.add(why)
            logger.warning("waiting for NATS: %s", why)

    def over(self) -> None:
        if self._logged:
            logger.info("connected to NATS after %.0f s", time.monotonic() - self._began)


class _ConnectionErrors:
    """Each is logged once until the connection is up again."""

    def __init__(self, on_failure: "Callable[[_ConnectionErrors], None]") -> None:
        self.is_connected = False
        self.is_refused = False
        self.fault = ""
        self.failure = "no response"
        self._on_failure = on_failure
        self._logged = ""

    async def note(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            DROPPED.inc()
            subject = error.sub.subject
            text = f"dropped a message on {subject}: too many wait for its handler"
            _limited.write(logging.ERROR, f"dropped {subject}", text)
            return
        if not isinstance(error, nats.errors.Error | OSError | TimeoutError):
            _limited.write(logging.ERROR, f"bug {error!r:.100}", "a handler has a bug", error)
            return
        if "permissions violation" in str(error).lower():
            text = f"{error}: our NATS user lacks a permission, see `leasehold credentials --nats`"
            _limited.write(logging.ERROR, f"{error}", text)
            return
        logger.debug("NATS: %r", error)
        fault = self.sort(error)
        if not self.is_connected:
            self._on_failure(self)
        elif fault and fault != self._logged:
            self._logged = fault
            logger.warning("cannot reconnect to NATS: %s", fault)

    async def back(self) -> None:
        self._logged = ""
        logger.info("reconnected to NATS")

    def sort(self, error: BaseException) -> str:
        """Return the text of an error about authentication."""
        if "authorization" in repr(error).lower():
            self.is_refused = True
            self.fault = ""
            return "the server rejects the login"
        fault = tls_fault(error, flag="--nats")
        if fault is None and isinstance(error.__cause__, RequestError):
            fault = str(error)
        if fault is None and NO_TLS in str(error):
            fault = f"{NO_TLS}; enable TLS on the server, or remove --nats-ca-file"
        if fault:
            self.fault = fault
        elif isinstance(error, OSError) and not isinstance(error, TimeoutError):
            self.failure = _os_error_text(error)
            if not isinstance(error, _ENDED):
                self.is_refused = False
                self.fault = ""
        return fault or ""


def _os_error_text(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its host name does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error.strerror or str(error) or type(error).__name__


def _failure_text(where: str, credentials: ClientCredentials, met: _ConnectionErrors) -> str:
    if met.fault:
        return f"NATS at {where}: {met.fault}"
    if met.is_refused and credentials.secret_file is None:
        return f"NATS at {where} requires a user: set --nats-credentials FILE"
    if met.is_refused and credentials.login_file is None:
        return (
            f"NATS at {where} rejects the token in {credentials.token_file}: is the auth service "
            "running, does the token have its audience, and does the pod have a service account of "
            "Leasehold?"
        )
    if met.is_refused:
        return (
            f"NATS at {where} rejects the user in {credentials.login_file}: compare the file with "
            "the server's configuration; `leasehold credentials --out DIR` writes both"
        )
    return (
        f"NATS at {where} does not respond ({met.failure}): is nats-server running, and is "
        "LEASEHOLD_NATS_URL right?"
    )


def _logged_event(text: str) -> Callable[[], Any]:
    async def log() -> None:
        logger.info(text)

    return log
