"""Connecting to NATS, as one of its users, and staying connected; what went wrong, in words."""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from shared.credentials.logins import ClientCredentials, Login
from shared.credentials.tls import tls_fault
from shared.model.errors import RequestError, UnavailableError
from shared.nats.cancellation import end
from shared.nats.subjects import inbox_of

logger = logging.getLogger(__name__)

GOODBYE_S = 2.0
BUFFER_BYTES = 32 * 1024
LATE_S = 2.0
"""Whoever waits longer than this for the first connection says why."""
NO_TLS = "the server offers no TLS, and we were told to use it: nothing was said to it"


_ENDED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""How a server that refuses us may end the connection, before we have read why."""


class _Transport(TcpTransport):  # type: ignore[misc]
    """Tells its reader of TLS, which the library does not: asyncio warns of each end else."""

    async def connect_tls(self, *given: Any, **named: Any) -> None:
        """Go on under TLS."""
        await super().connect_tls(*given, **named)
        protocol = self._io_writer.transport.get_protocol()
        if protocol is not None:  # None: the other end is gone already
            protocol._over_ssl = True  # noqa: SLF001

    def close(self) -> None:
        """End it; a server that does not say goodbye is not waited for as long as asyncio would."""
        super().close()
        if self._io_writer is not None:
            transport = self._io_writer.transport
            asyncio.get_running_loop().call_later(GOODBYE_S, transport.abort)


class _NatsClient(Client):  # type: ignore[misc]
    """Reads its files anew at each connection, and gives no secret away without TLS."""

    def __init__(self, keys: ClientCredentials, *, demands_tls: bool) -> None:
        super().__init__()
        self._keys = keys
        self._demands_tls = demands_tls
        self._is_covered = False

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """What the next handshake goes by; it is asked for at each."""
        try:
            context = self._keys.tls.context()
        except RequestError as error:
            raise nats.errors.Error(str(error)) from error
        self._is_covered = True
        return context

    def said_user(self) -> str:
        """Return our name, for the greeting after the handshake."""
        return self._login().user

    def said_secret(self) -> str:
        """Return our secret, which is as the file says now."""
        return self._login().secret

    def said_nothing(self) -> str:
        """Return no token, where nobody is to be said: but not without the handshake."""
        self._check()
        return ""

    def _login(self) -> Login:
        self._check()
        try:
            login = self._keys.login()
        except RequestError as error:
            raise nats.errors.Error(str(error)) from error
        if login is None:
            raise nats.errors.Error("it is not said who we are")
        return login

    def _check(self) -> None:
        if self._demands_tls and not self._is_covered:
            raise nats.errors.Error(NO_TLS)

    async def close(self) -> None:
        """End the connection, whether or not the server is still there."""
        with contextlib.suppress(OSError):
            await super().close()

    async def _process_err(self, err_msg: str) -> None:
        """Connect anew after whatever ends a connection, such as rights that have run out.

        The library would close for good.
        """
        if "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)
        else:
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg.strip()}"))

    async def _connect_to_server(self, s: Any) -> None:
        self._is_covered = False
        s.last_attempt = time.monotonic()
        self._transport = _Transport()
        await self._transport.connect(s.uri, BUFFER_BYTES, self.options["connect_timeout"])


async def connected(
    url: str,
    *,
    name: str,
    keys: ClientCredentials,
    patience_s: float,
    waits: Callable[[str], None] | None = None,
) -> Client:
    """Return a connection that heals itself; `keys` are files that say who we are and who it is.

    `waits` is told why at each attempt that fails. Raises UnavailableError if no server took us
    within `patience_s` seconds, RequestError if a file cannot be read.
    """
    where = url.rpartition("@")[2]
    met = _ConnectionErrors(lambda met: waits(_why_not(where, keys, met)) if waits else None)
    parts = urlsplit(url)
    demands_tls = bool(keys.tls) or parts.scheme == "tls"
    if demands_tls:
        keys.tls.context()
    client = _NatsClient(keys, demands_tls=demands_tls)
    connecting = asyncio.create_task(
        client.connect(
            url,
            name=name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=16 * 1024 * 1024,
            error_cb=met.note,
            disconnected_cb=_said("the connection to NATS was lost; trying again"),
            reconnected_cb=met.back,
            # Servers that a cluster tells of by address show the certificate of its name.
            **({"tls_hostname": parts.hostname} if demands_tls else {}),
            **_options(client, keys, demands_tls=demands_tls),
        )
    )
    try:
        await _within(connecting, patience_s)
    except (TimeoutError, OSError, nats.errors.Error) as error:
        met.sort(error)
        raise UnavailableError(_why_not(where, keys, met)) from error
    met.is_connected = True
    return client


async def _within(connecting: "asyncio.Task[None]", patience_s: float) -> None:
    """Wait for the task, and end it if it takes longer: the library would try for ever."""
    try:
        if not (await asyncio.wait({connecting}, timeout=patience_s))[0]:
            raise TimeoutError
        connecting.result()
    finally:
        if not connecting.done():
            with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
                await end(connecting)


def _options(client: _NatsClient, keys: ClientCredentials, *, demands_tls: bool) -> dict[str, Any]:
    """Return who we are, and where we alone hear answers."""
    login = keys.login()
    if login is not None:
        inbox = inbox_of(login.user)
        said = {"user": client.said_user, "password": client.said_secret}
        return {**said, "inbox_prefix": inbox}
    return {"token": client.said_nothing} if demands_tls else {}


class ConnectWait:
    """Why the first connection takes long: each reason is logged once, and not before it lasts."""

    def __init__(self) -> None:
        self.why = ""
        self._began = time.monotonic()
        self._told: set[str] = set()

    def note(self, why: str) -> None:
        """Take the newest reason."""
        self.why = why
        if time.monotonic() - self._began >= LATE_S and why not in self._told:
            self._told.add(why)
            logger.warning("waiting for NATS, however long that takes: %s", why)

    def over(self) -> None:
        """There is nothing to wait for any more."""
        if self._told:
            logger.info("NATS is there after %.0f s", time.monotonic() - self._began)


class _ConnectionErrors:
    """What went wrong with a connection: told once each, until it is back."""

    def __init__(self, waits: "Callable[[_ConnectionErrors], None]") -> None:
        self.is_connected = False
        self.is_refused = False
        self.fault = ""
        self.silence = "no answer"
        self._waits = waits
        self._told = ""

    async def note(self, error: Exception) -> None:
        """Take an error from the library."""
        if "permissions violation" in str(error).lower():
            logger.error("%s: our user at NATS lacks a right, see `leasehold doors --nats`", error)
            return
        logger.debug("NATS: %r", error)
        told = self.sort(error)
        if not self.is_connected:
            self._waits(self)
        elif told and told != self._told:
            self._told = told
            logger.warning("NATS does not take us back: %s", told)

    async def back(self) -> None:
        """The connection is there again."""
        self._told = ""
        logger.info("the connection to NATS is back")

    def sort(self, error: BaseException) -> str:
        """Keep what an error says, the last one most; return it if it is about who may come in."""
        if "authorization" in repr(error).lower():
            self.is_refused, self.fault = True, ""
            return "it refuses our user"
        fault = tls_fault(error, flag="--nats")
        if fault is None and isinstance(error.__cause__, RequestError):
            fault = str(error)
        if fault is None and NO_TLS in str(error):
            fault = f"{NO_TLS}; leave out --nats-ca-file, or turn TLS on there"
        if fault:
            self.fault = fault
        elif isinstance(error, OSError) and not isinstance(error, TimeoutError):
            self.silence = _words(error)
            if not isinstance(error, _ENDED):
                self.is_refused, self.fault = False, ""
        return fault or ""


def _words(error: OSError) -> str:
    """Return what the system says of a connection that was not made, without its number."""
    if isinstance(error, socket.gaierror):
        return "its name is not known yet"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return error.strerror or str(error) or type(error).__name__


def _why_not(where: str, keys: ClientCredentials, met: _ConnectionErrors) -> str:
    if met.fault:
        return f"NATS at {where}: {met.fault}"
    if met.is_refused and keys.shown is None:
        return f"NATS at {where} asks who we are: give --nats-credentials FILE"
    if met.is_refused and keys.credentials is None:
        return (
            f"NATS at {where} refuses the token in {keys.token}: does the auth service run, is the "
            "token for its audience, and is the pod of a service account of ours?"
        )
    if met.is_refused:
        return (
            f"NATS at {where} refuses the user in {keys.credentials}: compare the file with the "
            "server's configuration; `leasehold doors --out DIR` writes both"
        )
    return (
        f"NATS at {where} does not answer ({met.silence}): is nats-server running, and is "
        "LEASEHOLD_NATS_URL right?"
    )


def _said(text: str) -> Callable[[], Any]:
    async def said() -> None:
        logger.info(text)

    return said
