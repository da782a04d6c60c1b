"""`python -m tests.support.webhook.flood KIND PORT`: a peer that gives a webhook much to do.

It writes a line once it has begun, and continues until it is ended.
"""

import asyncio
import contextlib
import itertools
import json
import os
import resource
import ssl
import sys
import zlib
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

from services.webhook.registration import PATH
from tests.support.effort import tries
from tests.support.webhook.replica import pod

HOST = "127.0.0.1"
PAUSE_S = 0.05
CONNECTIONS = tries(10_000)
"""At any time; each that the webhook closes is opened again."""
SPARE_FILES = 200
_numbers = itertools.count()
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def review(size: int = 0) -> bytes:
    """The review of a pod in a namespace that nobody has."""
    number = next(_numbers)
    notes = {f"example.com/a{n}": "x" * 1_000 for n in range(size // 1_020)}
    obj: dict[str, Any] = pod()
    obj["metadata"]["annotations"] = notes
    request = {
        "uid": f"uid-{number}",
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": f"invented-{number}",
        "object": obj,
    }
    whole = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    return json.dumps(whole).encode()


def head(length: int, *more: str, timeout: str = "5s") -> bytes:
    lines = (
        f"POST {PATH}?timeout={timeout} HTTP/1.1",
        "Host: webhook",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, *more, "", "")).encode()


class Flood:
    """One kind of flood on a port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.tls = ssl.create_default_context()
        self.tls.check_hostname = False
        self.tls.verify_mode = ssl.CERT_NONE
        self.kinds: dict[str, tuple[int, Callable[[int], Awaitable[None]]]] = {
            "compressed bodies": (40, self.compressed),
            "bodies that never end": (8, self.endless),
            "connections": (CONNECTIONS, self.idle),
            "connections of many addresses": (CONNECTIONS, self.idle_elsewhere),
            "headers that never end": (500, self.slow_headers),
            "handshakes that never end": (500, self.slow_handshake),
        }

    async def run(self, kind: str) -> None:
        number, attack = self.kinds[kind]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        number = min(number, hard - SPARE_FILES)
        tasks = [asyncio.create_task(self._again(attack, n)) for n in range(number)]
        await asyncio.sleep(PAUSE_S)
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        await asyncio.gather(*tasks)

    async def _again(self, attack: Callable[[int], Awaitable[None]], number: int) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
                await attack(number)
            await asyncio.sleep(PAUSE_S)

    async def _open(self, *, tls: bool = True, source: str = HOST) -> Streams:
        return await asyncio.open_connection(
            HOST, self.port, ssl=self.tls if tls else None, local_addr=(source, 0)
        )

    async def _post(self, streams: Streams, body: bytes, *more: str) -> None:
        reader, writer = streams
        writer.write(head(len(body), *more) + body)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)

    @cached_property
    def deflated(self) -> bytes:
        """A review of a few kilobytes that becomes 23 MB; made once, since that takes long."""
        return zlib.compress(review(23_000_000 // 40) + b" " * 23_000_000)

    async def compressed(self, _: int) -> None:
        await self._post(await self._open(), self.deflated, "Content-Encoding: deflate")

    async def endless(self, _: int) -> None:
        _reader, writer = await self._open()
        writer.write(head(20_000_000, timeout="86400s") + b'{"request": {"uid": "u"')
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(PAUSE_S)

    async def idle(self, _: int) -> None:
        reader, _writer = await self._open(tls=False)
        await reader.read(1)

    async def idle_elsewhere(self, number: int) -> None:
        source = f"127.1.{number // 250 % 250}.{number % 250 + 1}"
        reader, _writer = await self._open(tls=False, source=source)
        await reader.read(1)

    async def slow_headers(self, _: int) -> None:
        _reader, writer = await self._open()
        writer.write(f"POST {PATH} HTTP/1.1\r\n".encode())
        while not writer.is_closing():
            writer.write(b"X-More: x\r\n")
            await writer.drain()
            await asyncio.sleep(1)

    async def slow_handshake(self, _: int) -> None:
        reader, writer = await self._open(tls=False)
        writer.write(bytes.fromhex("160301010001"))  # the begin of a ClientHello
        await reader.read(1)


if __name__ == "__main__":
    os.nice(10)  # a peer on another machine would take nothing of this one's processors
    asyncio.run(Flood(int(sys.argv[2])).run(sys.argv[1]))
