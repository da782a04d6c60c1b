"""Connecting to NATS as a user, reconnecting, and the reasons of failures as text."""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from shared.credentials.logins import ClientCredentials, Login
from shared.credentials.tls import tls_fault
from shared.model.clock import end
from shared.model.errors import RequestError, UnavailableError
from shared.nats.subjects import inbox_of

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
BUFFER_BYTES = 32 * 1024
LATE_S = 2.0
"""The reason is logged if the first connection takes longer than this."""
NO_TLS = "the server does not offer TLS, which is required: no credentials were sent"


_ENDED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors of a connection that the server closes before its reason was read."""


class _Transport(TcpTransport):  # type: ignore[misc]
    """Marks the protocol as TLS after an upgrade; otherwise asyncio warns at each close."""

    async def connect_tls(self, *given: Any, **named: Any) -> None:
        """Upgrade to TLS."""
        await super().connect_tls(*given, **named)
        protocol = self._io_writer.transport.get_protocol()
        if protocol is not None:  # None: the other end is gone already
            protocol._over_ssl = True  # noqa: SLF001

    def writelines(self, payload: Iterable[bytes]) -> None:
        """Write, or raise ConnectionResetError; uvloop raises RuntimeError on a closed socket."""
        try:
            super().writelines(payload)
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error

    def close(self) -> None:
        """Close the connection; abort after `CLOSE_S` if the server does not respond."""
        super().close()
        if self._io_writer is not None:
            transport = self._io_writer.transport
            asyncio.get_running_loop().call_later(CLOSE_S, transport.abort)


class _NatsClient(Client):  # type: ignore[misc]
    """Reads credential files at each connection, and sends no secret without TLS."""

    def __init__(self, credentials: ClientCredentials, *, requires_tls: bool) -> None:
        super().__init__()
        self._credentials = credentials
        self._requires_tls = requires_tls
        self._is_encrypted = False

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The TLS context; the library reads it at each handshake."""
        try:
            context = self._credentials.tls.context()
        except RequestError as error:
            raise nats.errors.Error(str(error)) from error
        self._is_encrypted = True
        return context

    def user_name(self) -> str:
        """Return the user name, after the TLS handshake."""
        return self._login().user

    def password(self) -> str:
        """Return the current password of the credentials file."""
        return self._login().secret

    def empty_token(self) -> str:
        """Return an empty token, after the TLS handshake."""
        self._check()
        return ""

    def _login(self) -> Login:
        self._check()
        try:
            login = self._credentials.login()
        except RequestError as error:
            raise nats.errors.Error(str(error)) from error
        if login is None:
            raise nats.errors.Error("no user is configured")
        return login

    def _check(self) -> None:
        if self._requires_tls and not self._is_encrypted:
            raise nats.errors.Error(NO_TLS)

    async def close(self) -> None:
        """Close the connection, whether or not the server responds."""
        with contextlib.suppress(OSError):
            await super().close()

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after any error that ends a connection, such as expired permissions.

        The library would close the connection.
        """
        if "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)
        else:
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg.strip()}"))

    async def _connect_to_server(self, s: Any) -> None:
        self._is_encrypted = False
        s.last_attempt = time.monotonic()
        self._transport = _Transport()
        await self._transport.connect(s.uri, BUFFER_BYTES, self.options["connect_timeout"])


async def connected(
    url: str,
    *,
    name: str,
    credentials: ClientCredentials,
    patience_s: float,
    on_failure: Callable[[str], None] | None = None,
) -> Client:
    """Return a client that reconnects; `credentials` are the login and the server's CA.

    `on_failure` is called with the reason of each failed attempt. Raises UnavailableError if no
    server accepts the login within `patience_s` seconds, RequestError if a file cannot be read.
    """
    where = url.rpartition("@")[2]
    errors = _ConnectionErrors(
        lambda met: on_failure(_failure_text(where, credentials, met)) if on_failure else None
    )
    parts = urlsplit(url)
    requires_tls = bool(credentials.tls) or parts.scheme == "tls"
    if requires_tls:
        credentials.tls.context()
    client = _NatsClient(credentials, requires_tls=requires_tls)
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
            **_options(client, credentials, requires_tls=requires_tls),
        )
    )
    try:
        await _within(connecting, patience_s)
    except (TimeoutError, OSError, nats.errors.Error) as error:
        errors.sort(error)
        raise UnavailableError(_failure_text(where, credentials, errors)) from error
    errors.is_connected = True
    return client


async def _within(connecting: "asyncio.Task[None]", patience_s: float) -> None:
    """Wait for the task and cancel it after the timeout; the library would retry for ever."""
    try:
        if not (await asyncio.wait({connecting}, timeout=patience_s))[0]:
            raise TimeoutError
        connecting.result()
    finally:
        if not connecting.done():
            with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
                await end(connecting)


def _options(
    client: _NatsClient, credentials: ClientCredentials, *, requires_tls: bool
) -> dict[str, Any]:
    """Return the options for our user and our private inbox."""
    login = credentials.login()
    if login is not None:
        inbox = inbox_of(login.user)
        login_callbacks = {"user": client.user_name, "password": client.password}
        return {**login_callbacks, "inbox_prefix": inbox}
    return {"token": client.empty_token} if requires_tls else {}


class ConnectWait:
    """Reasons why the first connection takes long; each is logged once, after `LATE_S`."""

    def __init__(self) -> None:
        self.reason = ""
        self._began = time.monotonic()
        self._logged: set[str] = set()

    def note(self, why: str) -> None:
        """Record the latest reason."""
        self.reason = why
        if time.monotonic() - self._began >= LATE_S and why not in self._logged:
            self._logged.add(why)
            logger.warning("waiting for NATS: %s", why)

    def over(self) -> None:
        """The connection is up."""
        if self._logged:
            logger.info("connected to NATS after %.0f s", time.monotonic() - self._began)


class _ConnectionErrors:
    """Errors of a connection; each is logged once until the connection is up again."""

    def __init__(self, on_failure: "Callable[[_ConnectionErrors], None]") -> None:
        self.is_connected = False
        self.is_refused = False
        self.fault = ""
        self.failure = "no response"
        self._on_failure = on_failure
        self._logged = ""

    async def note(self, error: Exception) -> None:
        """Record an error of the library."""
        if "permissions violation" in str(error).lower():
            logger.error(
                "%s: our NATS user lacks a permission, see `leasehold credentials --nats`", error
            )
            return
        logger.debug("NATS: %r", error)
        fault = self.sort(error)
        if not self.is_connected:
            self._on_failure(self)
        elif fault and fault != self._logged:
            self._logged = fault
            logger.warning("cannot reconnect to NATS: %s", fault)

    async def back(self) -> None:
        """The connection is up again."""
        self._logged = ""
        logger.info("reconnected to NATS")

    def sort(self, error: BaseException) -> str:
        """Record the error; return its text if it is about authentication."""
        if "authorization" in repr(error).lower():
            self.is_refused, self.fault = True, ""
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
                self.is_refused, self.fault = False, ""
        return fault or ""


def _os_error_text(error: OSError) -> str:
    """Return the system's error text of a failed connection, without its number."""
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
