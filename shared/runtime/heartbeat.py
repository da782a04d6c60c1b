"""A replica's sign of life: `PartReported` while it runs, and once more when it is told to stop."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.metadata import version
from typing import Protocol

from shared.model.errors import UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import PartReported
from shared.nats.cancellation import end
from shared.runtime.health import Probe, unready

logger = logging.getLogger(__name__)

EVERY_S = 5.0


class Publishing(Protocol):
    """The bus."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events."""
        ...


@contextlib.asynccontextmanager
async def reporting(
    bus: Publishing,
    probes: Mapping[str, Probe],
    *,
    service: str,
    instance: str,
    node: str = "",
    every_s: float = EVERY_S,
) -> AsyncIterator[None]:
    """Report that the replica runs, now and every `every_s` seconds, until the context ends."""

    async def tell(*, leaving: bool = False) -> None:
        event = PartReported(
            service=service,
            instance=instance,
            node=node,
            every_s=every_s,
            leaving=leaving,
            missing=tuple(f"{name}: {text}" for name, text in unready(probes).items()),
            version=version("leasehold"),
        )
        try:
            await bus.publish([event])
        except UnavailableError as error:
            logger.debug("nobody hears that this replica runs: %s", error)

    async def again() -> None:
        while True:
            await tell()
            await asyncio.sleep(every_s)

    telling = asyncio.create_task(again())
    try:
        yield
    finally:
        await end(telling)
        await tell(leaving=True)
