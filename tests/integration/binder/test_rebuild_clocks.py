"""A rebuild and watchers whose clocks are off, on a real ledger."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest

from services.binder.ledger_sync.rebuild import LedgerRebuild, RebuildTiming
from services.watcher.claim_sources import ClaimReflector
from services.watcher.sources import OurPodLister
from shared.kubernetes.client import KubernetesClient, Page
from shared.ledger.rebuild_evidence import LedgerStaging
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.pod_events import LedgerRebuilt, PodsListed, ResyncRequested
from tests.support.binder.claims import holders
from tests.support.binder.world import FakePods
from tests.support.placer.ledger import ledger

HOUR_S = 3600.0
TIMING = RebuildTiming(settle_s=0.01, poll_s=0.02, resync_every_s=0.2)


class NoPods:
    """An API server without pods."""

    async def pages(self, _: str) -> AsyncIterator[Page]:
        yield Page()


async def listing(*request_ids: str) -> list[PodsListed]:
    kube = cast("KubernetesClient", NoPods())
    lister = OurPodLister(kube, frozenset(), ClaimReflector(kube))
    return [chunk async for chunk in lister.chunks(request_ids)]


async def rebuild(
    url: str,
    answer: Callable[[LedgerStaging, str], Awaitable[None]],
    *,
    timing: RebuildTiming = TIMING,
    steps: int = 1,
) -> list[Event]:
    """Lose the ledger; return what the rebuild publishes within 5 s from what `answer` stages."""
    async with ledger(url, {}) as leases:
        connection = leases._connection
        async with LedgerStaging.connect(url, prefix=connection.prefix) as staging:

            async def publish(events: Sequence[Event]) -> None:
                for event in events:
                    assert isinstance(event, ResyncRequested)
                    await leases.quotas.save((), read_at=0.0)
                    await answer(staging, event.request_id)

            await connection._redis.delete(f"{connection.prefix}ledger")
            rebuilding = LedgerRebuild(
                ledger=leases,
                staging=staging,
                publish=publish,
                holders=holders(FakePods()),
                clock=SystemClock(),
                bindings_in_flight=lambda: 0,
                timing=timing,
            )
            published: list[Event] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    for _ in range(steps):
                        while not (events := await rebuilding.step()):
                            await asyncio.sleep(timing.poll_s)
                        published += events
            return published


@pytest.mark.parametrize("off_s", [-45.0, -HOUR_S, HOUR_S])
async def test_the_clock_of_the_watcher_does_not_delay_a_rebuild(
    url: str, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    """Row 8: a watcher's clock 45 s behind kept the ledger closed for 49 s."""
    now = time.time

    async def answer(staging: LedgerStaging, request_id: str) -> None:
        with monkeypatch.context() as host:
            host.setattr(time, "time", lambda: now() + off_s)
            chunks = await listing(request_id)
        for chunk in chunks:
            await staging.save_chunk(chunk)

    assert await rebuild(url, answer)


async def test_a_list_that_began_before_the_request_does_not_count(url: str) -> None:
    """A list that still was in the stream: a watcher's clock ahead let it pass for a new one."""
    requests: list[str] = []

    async def answer(staging: LedgerStaging, request_id: str) -> None:
        requests.append(request_id)
        for chunk in await listing("an-earlier-rebuild" if len(requests) < 3 else request_id):
            await staging.save_chunk(chunk)

    assert await rebuild(url, answer)

    assert len(requests) == 3
    assert len(set(requests)) == 1


async def test_requests_are_repeated_less_and_less_often(url: str) -> None:
    """Replies of thousands of nodes take longer than the first pause."""
    requested_at: list[float] = []

    async def answer(staging: LedgerStaging, request_id: str) -> None:
        requested_at.append(time.monotonic())
        if len(requested_at) == 4:
            for chunk in await listing(request_id):
                await staging.save_chunk(chunk)

    assert await rebuild(url, answer)

    _, second, third, fourth = requested_at
    assert third - second >= 2 * TIMING.resync_every_s
    assert fourth - third >= 4 * TIMING.resync_every_s


async def test_pods_are_compared_once_more_after_a_rebuild(url: str) -> None:
    """The loss of writes included a deletion; an older event recorded the pod as waiting again."""
    listed_at = 0.0

    async def answer(staging: LedgerStaging, request_id: str) -> None:
        nonlocal listed_at
        for chunk in await listing(request_id):
            await staging.save_chunk(chunk)
        listed_at = time.monotonic()

    timing = replace(TIMING, compare_again_s=0.5)
    rebuilt, requested = await rebuild(url, answer, timing=timing, steps=2)

    assert isinstance(rebuilt, LedgerRebuilt)
    assert isinstance(requested, ResyncRequested)
    assert time.monotonic() - listed_at >= timing.compare_again_s
