"""Messages of NATS as bytes, with everything that another client can put into them."""

import json
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

ODD_NAMES = (
    b"\xff",
    b"_INBOX.\xc3.\x28",
    b"_INBOX.\xed\xa0\x80",
    b"a\x0bb",
    b"a\x0c7",
    b"a\x0b12\x0c3",
    b"\x00",
    b"\x1b[2J",
    b"*",
    b">",
    b"_INBOX.>",
    b"_INBOX.node-agent.*.x.1",
    b".",
    b"a..b",
    b"_INBOX.binder..1",
    b"_INBOX." + b"9" * 3_000,
    b".".join([b"t"] * 1_500),
    "_INBOX.\u0661.\u202e\u2028".encode(),
    b"$SYS.REQ.SERVER.PING",
    b"-ERR",
    b"'permissions violation'",
    b"authorization",
)
"""Reply subjects that the server passes on as they are."""
ODD_HEADERS = (
    b"NATS/1.0",
    b"NATS/1.0\r\n",
    b"NATS/1.0\r\n\r\n",
    b"N",
    b"\r\n",
    b"\xff" * 20,
    b"\x00",
    b"NATS/1.0 ",
    b"NATS/1.0 \xff\xfe\xfd\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 503 \xff\xff\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\nNats-Consumer-Stalled: a b\r\n\r\n",
    b"NATS/1.0 100 FlowControl Request\r\n\r\n",
    b"NATS/9.9 abc\r\n\r\n",
    b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0\r\nno colon\r\n: no name\r\na b: c\r\n\r\n",
    b"NATS/1.0\r\nA: 1\r\nA: 2\r\na: 3\r\n\r\n",
    b"NATS/1.0\r\nA: 1\n\n\r\r\n\n",
    b"NATS/1.0\r\ntraceparent: 00-\xff-zz\r\ntracestate: =,=\r\n\r\n",
    b"NATS/1.0\r\ntraceparent: " + b"0" * 70_000 + b"\r\n\r\n",
    b"NATS/1.0\r\n" + b"".join(b"H%d: x\r\n" % number for number in range(5_000)) + b"\r\n",
    b"NATS/1.0\r\n" + b"H" * 500_000 + b": x\r\n\r\n",
)
"""Blocks of headers that the server passes on as they are."""
ODD_DATA = (b"", b"\x00", b"abc", b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"\xff" * 70_000)


def message(subject: bytes, data: bytes, reply: bytes = b"", headers: bytes | None = None) -> bytes:
    """Return what a client sends to publish."""
    to = b" ".join(filter(None, (subject, reply)))
    if headers is None:
        return b"PUB %s %d\r\n%s\r\n" % (to, len(data), data)
    sizes = b"%d %d" % (len(headers), len(headers) + len(data))
    return b"HPUB %s %s\r\n%s%s\r\n" % (to, sizes, headers, data)


def odd_messages(subject: bytes, good: bytes, inbox: bytes) -> Iterator[bytes]:
    """Yield messages to a subject: odd in one part, and good data elsewhere."""
    for name in ODD_NAMES:
        yield message(subject, good, name)
        yield message(subject, b"", name, b"NATS/1.0\r\n\r\n")
    for headers in ODD_HEADERS:
        for data in (b"", good):
            yield message(subject, data, inbox, headers)
    for data in ODD_DATA:
        yield message(subject, data, inbox)
    # What the server refuses itself: it may close the sender's connection.
    yield b"HPUB %s %s 10 5\r\nabcde\r\n" % (subject, inbox)
    yield b"HPUB %s %s 99999999999999999999 3\r\nabc\r\n" % (subject, inbox)
    yield b"PUB %s %s -1\r\n\r\n" % (subject, inbox)
    yield b"PUB %s %s 3\r\nabcdefgh\r\n" % (subject, inbox)


@dataclass(frozen=True, slots=True)
class RawClient:
    """A user of NATS without a client library."""

    url: str
    user: str = ""
    secret: str = ""
    tls: ssl.SSLContext | None = None

    def send(self, messages: Iterable[bytes]) -> None:
        """Send each message, on another connection whenever the server has closed one."""
        waiting = list(messages)
        while waiting:
            with self._connection() as connection:
                while waiting:
                    if not _is_taken(connection, waiting.pop(0)):
                        break

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        address = urlsplit(self.url)
        login = {"user": self.user, "pass": self.secret} if self.user else {}
        options = {"verbose": False, "pedantic": False, "headers": True, "protocol": 1, **login}
        with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
            assert connection.recv(65_536).startswith(b"INFO ")
            with self._secured(connection, address.hostname) as secured:
                secured.sendall(b"CONNECT %s\r\n" % json.dumps(options).encode())
                yield secured

    def _secured(self, connection: socket.socket, host: str | None) -> socket.socket:
        return self.tls.wrap_socket(connection, server_hostname=host) if self.tls else connection


def _is_taken(connection: socket.socket, sent: bytes) -> bool:
    """Send bytes; return False once the server has closed the connection because of them."""
    with suppress(ConnectionError):
        connection.sendall(sent + b"PING\r\n")
        received = b""
        while b"PONG\r\n" not in received:
            more = connection.recv(65_536)
            if not more:
                return False
            received += more
        return True
    return False
