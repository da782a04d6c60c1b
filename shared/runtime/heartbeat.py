"""Heartbeats of a replica while it runs, and one when it shuts down."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version

from shared.model.clock import end, until_tick
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import Heartbeat
from shared.runtime.health import Probe, unready
from shared.runtime.service import Publish
from shared.runtime.settings import settings_digests

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
IN_POD = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets it in each container."""


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
    """Publish heartbeats at an interval until the context exits."""
    own_version = version("leasehold")
    settings = settings_digests() if IN_POD in os.environ else {}

    async def send(*, stopping: bool = False) -> None:
        event = Heartbeat(
            service=service,
            instance=instance,
            node=node,
            interval_s=every_s,
            stopping=stopping,
            unready_reasons=tuple(f"{name}: {text}" for name, text in unready(probes).items()),
            version=own_version,
            settings=settings,
        )
        try:
            await publish([event])
        except UnavailableError as error:
            logger.debug("no heartbeat was sent: %s", error)

    async def repeat() -> None:
        while True:
            await send()
            await asyncio.sleep(until_tick(every_s))

    sending = asyncio.create_task(repeat())
    try:
        yield
    finally:
        await end(sending)
        await send(stopping=True)
