"""A service of ours as a process of its own: its pages, its log, its end."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.command_server import Forked
from tests.support.servers.nats import free_port
from tests.support.waiting import until


class ServiceProcess:
    """One replica; its health pages are on a port of its own."""

    def __init__(self, service: str, *flags: str) -> None:
        self.http = f"127.0.0.1:{free_port()}"
        descriptor, name = tempfile.mkstemp(prefix="lh-log-")
        self._log = Path(name)
        self._last_log = ""
        with Path(os.devnull).open("rb") as nothing:
            self.process = Forked(
                ("--http", self.http, *flags),
                os.environ,
                streams=(nothing.fileno(), 1, descriptor),
                module=f"services.{service}",
            )
        os.close(descriptor)

    async def page(self, path: str) -> tuple[int, str]:
        """Return a page's status and text; 0 while it does not respond."""
        try:
            async with aiohttp.request("GET", f"http://{self.http}{path}") as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def until_ready(self) -> None:
        """Wait until it is ready."""
        await until(self._readiness, lambda page: page[0] == 200)

    async def until_unready(self, *texts: str) -> None:
        """Wait until it is not ready, with each of the texts among its reasons."""
        await until(
            self._readiness, lambda page: page[0] == 503 and all(text in page[1] for text in texts)
        )

    async def _readiness(self) -> tuple[int, str]:
        assert self.process.poll() is None, self.log()
        return await self.page("/readyz")

    def log(self) -> str:
        """Return all that it has logged."""
        return self._log.read_text() if self._log.exists() else self._last_log

    def warnings(self) -> list[dict[str, Any]]:
        """Return the lines above `info`; a line that is no JSON fails."""
        lines = [json.loads(line) for line in self.log().splitlines()]
        return [line for line in lines if line["level"] not in {"debug", "info"}]

    async def terminated(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 20)

    def end(self) -> None:
        """Kill it, and remove the file of its log, which is remembered."""
        self.process.kill()
        self.process.wait()
        self._last_log = self.log()
        self._log.unlink()


@contextmanager
def service_process(service: str, *flags: str) -> Iterator[ServiceProcess]:
    """Start a service; it is gone at the end."""
    running = ServiceProcess(service, *flags)
    try:
        yield running
    finally:
        running.end()
