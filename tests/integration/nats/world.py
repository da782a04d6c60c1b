"""Services that handle pods slowly, not at all or as they come, and how they are connected."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY

from shared.model.events.pod_events import PodQueued, PodTerminated
from shared.model.names import Namespace, PodUid
from shared.model.requests.request import GpuRequest, PodRequest
from shared.nats.bus import Bus
from shared.nats.confirmations import ConfirmationTiming
from shared.nats.unconfirmed_work import ResendPolicy
from shared.runtime.runner import Runner
from shared.runtime.service import handles
from shared.runtime.telemetry import Tracing
from tests.support.servers.nats import NatsServer, flush

SOON = ResendPolicy(
    receipt_s=1.0, silent_s=1.5, return_s=0.05, probe_s=0.05, tick_s=0.02, unready_s=0.3
)
OFTEN = ConfirmationTiming(report_s=0.02, held_s=0.2)


def queued(number: int, **fields: Any) -> PodQueued:
    request = PodRequest(dialect="volcano-vgpu", containers=(GpuRequest(container="a", gpus=1),))
    known: dict[str, Any] = {"resource_version": "1", "request": request}
    return PodQueued(
        pod=PodUid(f"pod-{number}"),
        namespace=Namespace("default"),
        name=f"p{number}",
        **known | fields,
    )


@dataclass
class Recorder:
    """Handles pods once `gate` is open, and raises the given errors before."""

    errors: list[Exception] = field(default_factory=list)
    gate: asyncio.Event | None = None
    seen: list[str] = field(default_factory=list)
    batches: int = 0

    @handles
    async def place_pods(self, events: Sequence[PodQueued]) -> list[PodTerminated]:
        if self.gate is not None:
            await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.batches += 1
        self.seen += [event.name for event in events]
        return []

    def has_seen(self, *numbers: int) -> bool:
        """Whether it has handled these pods, and no others."""
        return set(self.seen) == {f"p{number}" for number in numbers}


def slow() -> tuple[Recorder, asyncio.Event]:
    """A service that handles nothing until its gate is opened."""
    gate = asyncio.Event()
    return Recorder(gate=gate), gate


@contextlib.asynccontextmanager
async def connected(
    server: NatsServer, name: str = "test", policy: ResendPolicy = SOON
) -> AsyncIterator[Bus]:
    async with Bus.connect(server.url, name=name, policy=policy, confirmation_timing=OFTEN) as bus:
        yield bus


@contextlib.asynccontextmanager
async def running(bus: Bus, service: object, name: str = "placer") -> AsyncIterator[None]:
    """Run a service on a bus."""
    started = asyncio.Event()
    task = asyncio.create_task(Runner(name, service, bus, Tracing(name, None)).run(started))
    try:
        await asyncio.wait_for(started.wait(), 10)
        await flush(bus.client)  # the server has the subscriptions
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def replica(server: NatsServer, service: object, name: str = "placer") -> AsyncIterator[Bus]:
    """Run a service on a connection of its own."""
    async with connected(server, name) as bus, running(bus, service):
        yield bus


async def publish(bus: Bus, count: int) -> None:
    """Publish so many pods, each in a message of its own."""
    for number in range(count):
        await bus.publish([queued(number)])


def metric(name: str, service: str) -> float:
    labels = {"service": service, "subject": PodQueued.subject}
    return REGISTRY.get_sample_value(name, labels) or 0.0


def is_confirmed(service: str) -> bool:
    """Whether nothing that the service has sent is unconfirmed."""
    return metric("leasehold_unconfirmed_events", service) == 0
