"""The process of a service: settings, start, run, shutdown."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from importlib.metadata import version
from typing import Any, TypeVar

from shared.model.bounds import LATEST_S, RECURSION_LIMIT, cut
from shared.model.clock import end, in_background, until_tick
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.pod_events import Heartbeat
from shared.nats.bus import Bus
from shared.nats.subjects import user_of
from shared.runtime import health, telemetry
from shared.runtime.health import Probe, unready
from shared.runtime.runner import Runner
from shared.runtime.service import Publish
from shared.runtime.settings import ServiceSettings, load_or_exit, settings_digests
from shared.runtime.shared_process import SharedProcess, open_process

S = TypeVar("S", bound=ServiceSettings)
INTERVAL_S = 5.0
"""The interval of heartbeats; a service counts as missing after a few of them."""
READY_POLL_S = 0.5
"""The interval of looks whether an unready service has become ready, which is sent at once."""
IN_POD = "KUBERNETES_SERVICE_HOST"


@contextlib.asynccontextmanager
async def sending_heartbeats(
    publish: Publish,
    probes: Mapping[str, Probe],
    *,
    service: str,
    instance: str,
    node: str = "",
    every_s: float = INTERVAL_S,
) -> AsyncIterator[None]:
    """Publish heartbeats at an interval, and once ready."""
    own_version = version("leasehold")
    settings = settings_digests() if IN_POD in os.environ else {}

    async def send(*, stopping: bool = False) -> None:
        event = Heartbeat(
            service=service,
            instance=instance,
            node=node,
            interval_s=every_s,
            stopping=stopping,
            unready_reasons=tuple(cut(f"{name}: {text}") for name, text in unready(probes).items()),
            version=own_version,
            settings=settings,
            sent_at=min(max(time.time(), 0.0), LATEST_S),
        )
        try:
            await publish([event])
        except UnavailableError as error:
            logger.debug("no heartbeat was sent: %s", error)

    async def repeat() -> None:
        while True:
            await send()
            pause_s = until_tick(every_s)
            while pause_s > READY_POLL_S and unready(probes):
                await asyncio.sleep(READY_POLL_S)
                pause_s = pause_s - READY_POLL_S if unready(probes) else 0.0
            await asyncio.sleep(pause_s)

    try:
        async with in_background(repeat()):
            yield
    finally:
        await send(stopping=True)


logger = logging.getLogger(__name__)

NOTIFY_SOCKET = "NOTIFY_SOCKET"


class Nats(Enum):
    FIRST = "first"
    """Only the health endpoints, which return the reason."""
    MEANWHILE = "meanwhile"
    """The loops; the service is not ready."""
    OPTIONAL = "optional"
    """The loops; the service is ready."""


async def serve(
    name: str,
    service: object,
    *,
    bus: Bus,
    settings: ServiceSettings,
    nats: Nats = Nats.FIRST,
    tracing: telemetry.Tracing | None = None,
    probes: Mapping[str, health.Probe] | None = None,
    begin: Callable[[], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    process: SharedProcess | None = None,
    beside: object | None = None,
) -> None:
    """Run a service until SIGTERM or SIGINT: health endpoints, handlers, sources and loops.

    A service `beside` it has the same name, connection and end. `begin` is called once all
    subscriptions exist; `drain` before anything is stopped.
    """
    tracing = tracing or telemetry.open_tracing(name, settings)
    ahead = nats is not Nats.FIRST
    runner = Runner(
        name, service, bus, tracing, beside=beside, loops_before_nats=ahead, begin=begin
    )
    checks = dict(probes or {})
    if nats is not Nats.OPTIONAL:
        checks = {"nats": lambda: bus.unready_reason() or runner.unready_reason or None, **checks}
    instance = telemetry.instance_of(name, settings)
    route = str(getattr(service, "route", ""))
    try:
        async with contextlib.AsyncExitStack() as stack:
            if process is None:
                process = await stack.enter_async_context(open_process([name], settings))
            started = process.add(name, checks)
            await stack.enter_async_context(
                sending_heartbeats(bus.publish, checks, service=name, instance=instance, node=route)
            )
            early = nats is Nats.OPTIONAL
            await _until(process.stop, runner, started, drain=drain, early=early)
    finally:
        await asyncio.to_thread(tracing.close)


async def _until(
    stop: asyncio.Event,
    runner: Runner,
    started: asyncio.Event,
    *,
    drain: Callable[[], Awaitable[None]] | None,
    early: bool,
) -> None:
    """A service that is ready early also shuts down in order."""
    running = asyncio.create_task(runner.run(started))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        elif drain is not None and (early or started.is_set()):
            await drain()
    finally:
        await end(running, runner.tasks)
        await end(stopping)


def run(entry: Callable[[], Coroutine[Any, Any, None]], *, service: str, log_level: str) -> None:
    """Print a known error as one line, with exit code 1, or 2 for settings."""
    telemetry.open_logs(service, log_level)
    sys.setrecursionlimit(RECURSION_LIMIT)
    try:
        _runner()(_with_exception_handler(entry))
    except KeyboardInterrupt:
        sys.exit(130)
    except (LeaseholdError, BaseExceptionGroup) as error:
        errors = _known_errors(error)
        for leasehold_error in errors:
            sys.stderr.write(f"leasehold {service}: {leasehold_error}\n")
        sys.exit(
            2 if all(isinstance(leasehold_error, RequestError) for leasehold_error in errors) else 1
        )


def run_service(
    kind: type[S],
    entry: Callable[[S], Coroutine[Any, Any, None]],
    *,
    service: str,
    about: str,
    examples: Sequence[str] = (),
) -> None:
    program = f"python -m services.{service.replace('-', '_')}"
    settings = load_or_exit(kind, program, about=about, examples=examples)
    run(lambda: entry(settings), service=service, log_level=settings.log_level)


def open_bus(
    settings: ServiceSettings, service: str, node: str = "", process: SharedProcess | None = None
) -> AbstractAsyncContextManager[Bus]:
    return Bus.connect_later(
        settings.nats_url,
        name=user_of(service, node),
        credentials=settings.nats_client_credentials(service, node),
        handlers=process.handlers if process else None,
    )


async def _with_exception_handler(entry: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.get_running_loop().set_exception_handler(_on_unhandled_error)
    await entry()


def _on_unhandled_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a failed name lookup at debug level."""
    if isinstance(context.get("exception"), socket.gaierror):
        logger.debug("a name lookup failed after its timeout: %s", context["exception"])
    else:
        loop.default_exception_handler(context)


def _known_errors(error: BaseException) -> list[BaseException]:
    """Raises `error` if it contains other errors."""
    if isinstance(error, LeaseholdError):
        return [error]
    if isinstance(error, BaseExceptionGroup):
        return [
            leasehold_error
            for inner in error.exceptions
            for leasehold_error in _known_errors(inner)
        ]
    raise error


def _runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run
    run_loop: Callable[[Coroutine[Any, Any, None]], None] = uvloop.run
    return run_loop


def notify_ready(status: str, environ: Mapping[str, str] = os.environ) -> None:
    """Do nothing without `NOTIFY_SOCKET`."""
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
