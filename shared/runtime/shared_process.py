"""One process: its end, its endpoints, and the work that its services pass to each other."""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from shared.model.clock import in_background
from shared.model.errors import RequestError
from shared.nats.inbox import LocalHandlers
from shared.runtime import health
from shared.runtime.settings import ServiceSettings

logger = logging.getLogger(__name__)


class SharedProcess:
    def __init__(self, services: Sequence[str]) -> None:
        self.stop = asyncio.Event()
        self.handlers = LocalHandlers() if len(services) > 1 else None
        """A single service sends its work over NATS, also to itself."""
        self.checks: dict[str, health.Probe] = {
            name: lambda: "not started yet" for name in services
        }
        self.started = {name: asyncio.Event() for name in services}

    def add(self, name: str, checks: Mapping[str, health.Probe]) -> asyncio.Event:
        """Return the event that the service sets once it runs."""
        alone = len(self.started) == 1
        del self.checks[name]
        self.checks |= {
            check if alone else f"{name} {check}": probe for check, probe in checks.items()
        }
        return self.started[name]

    async def wait_ready(self) -> None:
        for started in self.started.values():
            await started.wait()
        while health.unready(self.checks):  # noqa: ASYNC110 - probes are polled
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def open_process(
    services: Sequence[str], settings: ServiceSettings
) -> AsyncIterator[SharedProcess]:
    """Serve the endpoints until SIGTERM or SIGINT.

    `settings.run_file` is written once all services run and every check succeeds.
    """
    process = SharedProcess(services)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop.set)
    async with health.served(health.application(process.checks), settings.http) as address:
        try:
            async with in_background(_announce(process, settings, address)):
                yield process
        finally:
            if settings.run_file is not None:
                with contextlib.suppress(OSError):
                    settings.run_file.unlink()


async def _announce(process: SharedProcess, settings: ServiceSettings, address: str) -> None:
    await process.wait_ready()
    logger.info("ready on http://%s", address)
    if settings.run_file is not None:
        _write(settings.run_file, json.dumps({"pid": os.getpid(), "http": address}))


def _write(run_file: Path, text: str) -> None:
    draft = run_file.with_suffix(".new")
    try:
        run_file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(run_file)
    except OSError as error:
        raise RequestError(
            f"--run-file {run_file} cannot be written ({error.strerror}): choose another path"
        ) from error
