"""nats-py's client with our credentials, which no message of another client can end or confuse.

The library's tasks end for good at an unexpected error, unnoticed. Here that is a fault of the
connection, which ends the service.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from prometheus_client import Counter

from shared.credentials.logins import ClientCredentials, Login
from shared.model.errors import RequestError
from shared.nats.limited_log import LimitedLog
from shared.nats.parser import ServerParser
from shared.nats.sender_rates import SenderRates

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

UNREADABLE = Counter(
    "leasehold_nats_unreadable_messages",
    "Received messages that were dropped: their subject or reply subject is not UTF-8.",
)
CLOSE_S = 2.0
"""The longest wait for a server that does not respond to the end of a connection."""
BUFFER_BYTES = 32 * 1024
NO_TLS = "the server does not offer TLS, which is required: no credentials were sent"
SHOWN = 100
_NO_RESPONDERS_LINE = b"NATS/1.0 503"


class _Transport(TcpTransport):  # type: ignore[misc]
    """Marks the protocol as TLS after an upgrade; otherwise asyncio warns at each close."""

    async def connect_tls(self, *given: Any, **named: Any) -> None:
        await super().connect_tls(*given, **named)
        protocol = self._io_writer.transport.get_protocol()
        if protocol is not None:  # None: the other end is gone already
            protocol._over_ssl = True  # noqa: SLF001

    async def read(self, buffer_size: int) -> bytes:
        """Let other tasks run: while more arrives than is handled, reading would not wait."""
        data: bytes = await super().read(buffer_size)
        await asyncio.sleep(0)
        return data

    def write(self, payload: bytes) -> None:
        """Raise ConnectionResetError, also where uvloop raises RuntimeError for a closed socket."""
        try:
            super().write(payload)
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error

    def writelines(self, payload: Iterable[bytes]) -> None:
        try:
            super().writelines(payload)
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error

    def close(self) -> None:
        super().close()
        if self._io_writer is not None:
            transport = self._io_writer.transport
            asyncio.get_running_loop().call_later(CLOSE_S, transport.abort)


class NatsClient(Client):  # type: ignore[misc]
    """Reads credential files at each connection, and sends no secret without TLS."""

    _transport: _Transport | None

    def __init__(self, credentials: ClientCredentials, *, requires_tls: bool) -> None:
        super().__init__()
        self._credentials = credentials
        self._requires_tls = requires_tls
        self._is_encrypted = False
        self._ps = ServerParser(self)
        self.fault = ""
        self.has_failed = asyncio.Event()
        self.rates = SenderRates()

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The library reads it at each handshake."""
        try:
            context = self._credentials.tls.context()
        except RequestError as error:
            raise nats.errors.Error(str(error)) from error
        self._is_encrypted = True
        return context

    def user_name(self) -> str:
        """Called after the TLS handshake."""
        return self._login().user

    def password(self) -> str:
        return self._login().secret

    def empty_token(self) -> str:
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
        """Limit the wait for the connection's end, which may never be reported."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                await super().close()

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after any error that ends a connection, where the library would close it."""
        if "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)
        else:
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg.strip()}"))

    async def _connect_to_server(self, s: Any) -> None:
        """Close the connection of a failed attempt, which the library leaves open."""
        if self._transport is not None:
            self._transport.close()
        self._is_encrypted = False
        s.last_attempt = time.monotonic()
        self._transport = _Transport()
        await self._transport.connect(s.uri, BUFFER_BYTES, self.options["connect_timeout"])

    async def subscribe(self, *given: Any, **named: Any) -> Subscription:
        """If the task that calls `cb` ends by itself, the connection has failed."""
        subscription = await super().subscribe(*given, **named)

        def check(_: "asyncio.Task[None]") -> None:
            if not (subscription._closed or self.is_closed):  # noqa: SLF001
                self._fail(f"the task that receives {subscription.subject} has ended")

        if subscription._wait_for_msgs_task is not None:  # noqa: SLF001
            subscription._wait_for_msgs_task.add_done_callback(check)  # noqa: SLF001
        return subscription

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        """Return None to drop the message: the library's error ends its reading."""
        try:
            return super()._build_message(sid, subject, reply, data, headers)
        except UnicodeDecodeError as error:
            UNREADABLE.inc()
            subscription = self._subs.get(sid)
            ours = subscription.subject if subscription else ""
            _limited.write(
                logging.ERROR,
                f"unreadable {ours}",
                f"dropped a message on {ours}: its subject {subject[:SHOWN]!r} or its reply "
                f"subject {reply[:SHOWN]!r} is not UTF-8: {error.reason}",
            )
            return None

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """Read only the server's status: our messages have no headers.

        The library's parsing of a sender's header block raises errors that end its reading.
        """
        if headers.startswith(_NO_RESPONDERS_LINE):
            return {"Status": "503"}
        return None

    async def _process_pong(self) -> None:
        """Note a response, also to a ping whose sender has stopped waiting.

        The library's future for it is cancelled then, and the error ends its reading.
        """
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _read_loop(self) -> None:
        await self._run_while_needed("reads", super()._read_loop())

    async def _flusher(self) -> None:
        await self._run_while_needed("writes", super()._flusher())

    async def _ping_interval(self) -> None:
        await self._run_while_needed("sends pings", super()._ping_interval())

    async def _attempt_reconnect(self) -> None:
        await self._run_while_needed("reconnects", super()._attempt_reconnect())

    async def _run_while_needed(self, does: str, work: Coroutine[Any, Any, None]) -> None:
        """If a task of the library ends while it is needed, the connection has failed."""
        task = asyncio.current_task()
        cause: Exception | None = None
        try:
            await work
        except OSError as error:
            await self._process_op_err(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the task
            cause = error
        finally:
            needed = (self._reading_task, self._flusher_task, self._ping_interval_task)
            if (self.is_connected and task in needed) or (
                self.is_reconnecting and task is self._reconnection_task
            ):
                cause = cause or self._ps.error
                self._fail(f"the task that {does} has ended{f': {cause!r}' if cause else ''}")

    def _fail(self, why: str) -> None:
        self.fault = self.fault or why
        self.has_failed.set()
