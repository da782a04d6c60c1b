"""What a rebuild requests and reads, and how often, on a real ledger."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from services.binder.ledger_sync.rebuild import LedgerRebuild, RebuildTiming
from services.watcher.sources import ClaimReflector, OurPodLister
from shared.kubernetes.client import KubernetesClient, Page
from shared.ledger.connection import LedgerConnection
from shared.ledger.leases import RedisLeases
from shared.ledger.rebuild_evidence import LedgerStaging
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.pod_events import LedgerRebuilt, ListedPods, PodsListed, ResyncRequested
from shared.model.lease import Lease
from tests.support.binder.events import activation, bound, report
from tests.support.binder.world import FakePods, holders, lease
from tests.support.placer.ledger import ledger

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


PODS_PER_CHUNK = 5


class CountedConnection(LedgerConnection):
    """Notes the size of each script's reply."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(url, prefix=prefix)
        self.reply_bytes: list[int] = []

    async def run_raw(
        self, script: str, *args: object, state: str = "ready", tail: bytes = b""
    ) -> Any:
        reply = await super().run_raw(script, *args, state=state, tail=tail)
        parts = reply if isinstance(reply, list) else [reply]
        self.reply_bytes.append(sum(len(part or b"") for part in parts))
        return reply


class ReportingClock(SystemClock):
    """While the rebuild sleeps, one more node reports."""

    def __init__(self, staging: LedgerStaging, leases: Sequence[Lease]) -> None:
        self.staging = staging
        self.left = list(leases)

    async def sleep(self, duration_s: float) -> None:
        if self.left:
            of = self.left.pop()
            await self.staging.save_reports([report(of.node, activation(of))])


async def reply_bytes(url: str, nodes: int) -> list[int]:
    """Rebuild a ledger of so many nodes, which report one after the other."""
    leases = [lease(f"p{number}", f"n{number}") for number in range(nodes)]
    prefix = f"lh-size-{nodes}:"
    async with (
        CountedConnection(url, prefix) as connection,
        LedgerStaging.connect(url, prefix=prefix) as elsewhere,
    ):

        async def publish(events: Sequence[Event]) -> None:
            [request] = events
            await RedisLeases(connection).quotas.save((), read_at=0.0)
            firsts = range(0, nodes, PODS_PER_CHUNK)
            for number, first in enumerate(firsts):
                pods = tuple(map(bound, leases[first : first + PODS_PER_CHUNK]))
                await elsewhere.save_chunk(
                    PodsListed(
                        listing_id="l1",
                        chunk=number,
                        chunks=len(firsts),
                        pods=ListedPods(bound=pods),
                        request_ids=(request.request_id,),  # type: ignore[attr-defined]
                    )
                )

        rebuild = LedgerRebuild(
            ledger=RedisLeases(connection),
            publish=publish,
            holders=holders(FakePods()),
            clock=ReportingClock(elsewhere, leases),
            bindings_in_flight=lambda: 0,
            timing=RebuildTiming(settle_s=0.0, poll_s=0.0),
        )
        assert any(isinstance(event, LedgerRebuilt) for event in await rebuild.step())
        read = list(connection.reply_bytes)
        found = [each async for page in RedisLeases(connection).load_all() for each in page]
        assert len(found) == nodes
        return read


@pytest.mark.parametrize(("few", "many"), [(40, 160)])
async def test_what_a_rebuild_reads_is_in_proportion_to_the_nodes(
    url: str, few: int, many: int
) -> None:
    of_few, of_many = await reply_bytes(url, few), await reply_bytes(url, many)

    assert sum(of_many) < 1.2 * many / few * sum(of_few)
    assert len(of_many) < 1.2 * many / few * len(of_few)
    assert max(of_many) < 2 * max(of_few)
