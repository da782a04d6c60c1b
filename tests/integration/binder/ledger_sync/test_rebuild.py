"""The binder compares the ledger with listings, and rebuilds one that was lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
from msgspec import structs

from services.binder.ledger_sync.evidence import MOST_REPORTS, CollectedEvidence
from services.binder.ledger_sync.rebuild import LedgerRebuild, RebuildTiming
from services.watcher.claim_sources import ClaimReflector
from services.watcher.pod_sources import ManagedPodLister
from shared.kubernetes.client import KubernetesClient, Page
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import (
    LedgerRebuilt,
    PlacementChosen,
    PodsListed,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.leases.lease import LeaseState
from shared.model.names import NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.events import activation, bound, in_state, listing, report
from tests.support.binder.world import (
    NOW,
    Counts,
    FakePods,
    NewWorld,
    World,
    chosen,
    holders,
    lease,
    running,
)
from tests.support.placer.ledger import ledger
from tests.support.waiting import until


async def test_a_listing_counts_only_when_it_is_complete(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))

    first = await world.binder.reconciler.reconcile_listing([listing(piece=0, pieces=2)])
    second = await world.binder.reconciler.reconcile_listing([listing(piece=1, pieces=2)])

    assert not first
    assert len(second) == 1


@pytest.mark.parametrize(("age_s", "is_sent"), [(4, False), (60, True)])
async def test_the_binding_of_a_committed_lease_is_sent_again_if_its_pod_is_unbound(
    new_world: NewWorld, age_s: float, *, is_sent: bool
) -> None:
    committed = structs.replace(in_state(LeaseState.BOUND), created_at=NOW - age_s)
    world = await new_world(committed)
    world.pods.seen["p1"] = PodSnapshot(committed.pod, None)

    events = await world.binder.reconciler.reconcile_listing([listing()])

    assert events == ([PlacementChosen(lease=committed)] if is_sent else [])


async def test_a_lease_that_only_the_pod_carries_is_reported_not_created(world: World) -> None:
    assert not await world.binder.reconciler.reconcile_listing([listing(bound(lease()))])

    assert world.metrics.anomalies["pods_without_lease"] == 1
    assert not await world.leases()


async def wanted(world: World) -> str:
    """Wait for the rebuild's request, and answer it with quotas; return its ID."""
    await until(lambda: world.clock.sleepers)
    while True:
        for event in world.bus.published:
            if isinstance(event, ResyncRequested):
                await world.binder.updater.save_quotas([QuotasUpdated(quotas=(), read_at=NOW)])
                return event.request_id
        world.clock.advance(0.25)
        await until(lambda: world.clock.sleepers)


async def reported(world: World, reports: Sequence[DeviceReported]) -> None:
    """Deliver agents' reports, as work and as copies."""
    await world.binder.save_devices(reports)
    await world.binder.evidence.observe_reports(reports)


def has_finished(world: World) -> bool:
    return any(isinstance(event, LedgerRebuilt) for event in world.bus.published)


async def finished(world: World) -> None:
    """Let time pass until the rebuild is finished."""
    while not has_finished(world):
        world.clock.advance(0.25)
        await until(lambda: world.clock.sleepers or has_finished(world))


async def test_an_empty_ledger_is_restored_from_agents_and_pods(world: World) -> None:
    await world.lose()
    active = lease("p1", "n1")
    silent = lease("p2", "n2")

    async with running(world.binder.rebuild.rebuild_ledger):
        request_id = await wanted(world)
        await reported(world, [report("n1", activation(active))])
        await reported(world, [report("n2")])
        assert not await world.binder.reconciler.reconcile_listing(
            [listing(bound(active), bound(silent), request_id=request_id)]
        )
        await finished(world)

    assert await world.states() == {"p1": LeaseState.ACTIVE, "p2": LeaseState.BOUND}
    again = await world.leases()
    assert [again[each.pod].shares for each in (active, silent)] == [active.shares, silent.shares]
    assert world.metrics.anomalies["ledger_rebuilt"] == 1


async def test_a_rebuild_lists_pods_only_after_the_bindings_in_flight(new_world: NewWorld) -> None:
    world = await new_world(lease())
    world.pods.hanging["p1"] = asyncio.Event()

    async with running(world.binder.sender.send_bindings, world.binder.rebuild.rebuild_ledger):
        binding = asyncio.create_task(world.binder.pods.bind_pods(chosen(lease())))
        await until(lambda: world.pods.bindings)
        await world.lose()
        for _ in range(20):
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers)
        early = [type(event) for event in world.bus.published]
        world.pods.hanging["p1"].set()
        await binding
        await wanted(world)

    assert ResyncRequested not in early


async def test_a_silent_node_delays_the_rebuild_10_s_at_most(world: World) -> None:
    await world.lose()
    began = world.clock.now()

    async with running(world.binder.rebuild.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.reconciler.reconcile_listing(
            [listing(bound(lease()), request_id=request_id)]
        )
        await finished(world)

    assert 10 <= world.clock.now() - began < 13
    assert [each.name for each in (await world.leases()).values()] == ["p1"]


async def test_leases_that_cannot_be_restored_are_reported(world: World) -> None:
    await world.lose()
    forged = replace(bound(lease("p1")), pod=PodUid("another"))
    negative = (structs.replace(lease().shares[0], cores_percent=101),)
    misfit = lease("p2", shares=negative)

    async with running(world.binder.rebuild.rebuild_ledger):
        request_id = await wanted(world)
        await reported(world, [report("n1")])
        pods = (forged, bound(misfit))
        await world.binder.reconciler.reconcile_listing([listing(*pods, request_id=request_id)])
        await finished(world)

    assert world.metrics.anomalies["not_restored"] == 2


async def test_an_agents_word_counts_only_for_pods_that_are_on_its_node(world: World) -> None:
    await world.lose()
    gone = lease("p1")
    bound_late = lease("p2")
    elsewhere = lease("p3")
    world.pods.seen["p2"] = PodSnapshot(bound_late.pod, bound_late.node)
    world.pods.seen["p3"] = PodSnapshot(elsewhere.pod, NodeName("n2"))

    async with running(world.binder.rebuild.rebuild_ledger):
        request_id = await wanted(world)
        used = map(activation, (gone, bound_late, elsewhere))
        await reported(world, [report("n1", *used)])
        await world.binder.reconciler.reconcile_listing([listing(request_id=request_id)])
        await finished(world)

    assert list(await world.leases()) == [bound_late.pod]


async def test_nodes_that_keep_reporting_are_waited_for_and_not_asked_again(world: World) -> None:
    await world.lose()
    leases = [lease(f"p{number}", f"n{number}") for number in range(30)]

    async with running(world.binder.rebuild.rebuild_ledger):
        request_id = await wanted(world)
        pods = [bound(each) for each in leases]
        await world.binder.reconciler.reconcile_listing([listing(*pods, request_id=request_id)])
        for first in range(0, len(leases), 3):
            of_some = [report(each.node, activation(each)) for each in leases[first : first + 3]]
            await reported(world, of_some)
            for _ in range(32):
                world.clock.advance(0.25)
                await until(lambda: world.clock.sleepers or has_finished(world))
        await finished(world)

    assert {each.state for each in (await world.leases()).values()} == {LeaseState.ACTIVE}
    requests = [each for each in world.bus.published if isinstance(each, ResyncRequested)]
    assert len(requests) == 1


TIMING = RebuildTiming(settle_s=0.01, poll_s=0.02, resync_every_s=0.2)


class NoPods:
    """An API server without pods."""

    async def pages(self, _: str) -> AsyncIterator[Page]:
        yield Page()


async def listed(*request_ids: str) -> list[PodsListed]:
    kube = cast("KubernetesClient", NoPods())
    lister = ManagedPodLister(kube, frozenset(), ClaimReflector(kube))
    return [chunk async for chunk in lister.chunks(request_ids)]


async def rebuild(
    url: str,
    answer: Callable[[CollectedEvidence, str], Awaitable[None]],
    *,
    timing: RebuildTiming = TIMING,
    steps: int = 1,
) -> list[Event]:
    """Lose the ledger; return what the rebuild publishes in a minute from what `answer` adds."""
    clock = SystemClock()
    evidence = CollectedEvidence(clock.ticks)
    async with ledger(url, {}) as leases:
        connection = leases._connection

        async def publish(events: Sequence[Event]) -> None:
            for event in events:
                assert isinstance(event, ResyncRequested)
                await leases.quotas.save((), read_at=0.0)
                await answer(evidence, event.request_id)

        await connection._redis.delete(f"{connection.prefix}ledger")
        rebuilding = LedgerRebuild(
            ledger=leases,
            evidence=evidence,
            publish=publish,
            holders=holders(FakePods()),
            clock=clock,
            bindings_in_flight=lambda: 0,
            timing=timing,
        )
        published: list[Event] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                for _ in range(steps):
                    while not (events := await rebuilding.rebuild_ledger()):
                        await asyncio.sleep(timing.poll_s)
                    published += events
        return published


async def test_a_list_that_began_before_the_request_does_not_count(url: str) -> None:
    """A list that still was in the stream: a watcher's clock ahead let it pass for a new one."""
    requests: list[str] = []

    async def answer(evidence: CollectedEvidence, request_id: str) -> None:
        requests.append(request_id)
        for chunk in await listed("an-earlier-rebuild" if len(requests) < 3 else request_id):
            evidence.add_chunks([chunk])

    assert await rebuild(url, answer)

    assert len(requests) == 3
    assert len(set(requests)) == 1


async def test_requests_are_repeated_less_and_less_often(url: str) -> None:
    """Replies of thousands of nodes take longer than the first pause."""
    requested_at: list[float] = []

    async def answer(evidence: CollectedEvidence, request_id: str) -> None:
        requested_at.append(time.monotonic())
        if len(requested_at) == 4:
            for chunk in await listed(request_id):
                evidence.add_chunks([chunk])

    assert await rebuild(url, answer)

    _, second, third, fourth = requested_at
    assert third - second >= 2 * TIMING.resync_every_s
    assert fourth - third >= 4 * TIMING.resync_every_s


async def test_pods_are_compared_once_more_after_a_rebuild(url: str) -> None:
    """The loss of writes included a deletion; an older event recorded the pod as waiting again."""
    listed_at = 0.0
    counts = Counts()

    async def answer(evidence: CollectedEvidence, request_id: str) -> None:
        nonlocal listed_at
        for chunk in await listed(request_id):
            evidence.add_chunks([chunk])
        listed_at = time.monotonic()

    timing = replace(TIMING, compare_again_s=0.5)
    rebuilt, requested = await rebuild(url, answer, timing=timing, steps=2)

    assert isinstance(rebuilt, LedgerRebuilt)
    assert "ledger_rebuilt" not in counts.anomalies, "there was no lease to lose"
    assert isinstance(requested, ResyncRequested)
    assert time.monotonic() - listed_at >= timing.compare_again_s


async def test_a_rebuild_waits_until_all_quotas_are_known(world: World) -> None:
    await world.lose()

    async with running(world.binder.rebuild.rebuild_ledger):
        await until(lambda: world.clock.sleepers)
        while not (requests := [e for e in world.bus.published if isinstance(e, ResyncRequested)]):
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers)
        world.binder.evidence.add_chunks([listing(request_id=requests[0].request_id)])
        for _ in range(20):
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers)
        assert not has_finished(world)

        await world.binder.updater.save_quotas([QuotasUpdated(quotas=(), read_at=NOW)])
        await finished(world)


async def test_a_binder_that_takes_a_rebuild_over_begins_again(world: World) -> None:
    await world.lose()
    other = world.replica()
    active = lease("p1", "n1")

    async with running(world.binder.rebuild.rebuild_ledger):
        await wanted(world)
    other.clock.advance(2 * RebuildTiming().lock_s)
    async with running(other.binder.rebuild.rebuild_ledger):
        request_id = await wanted(other)
        other.binder.evidence.add_reports([report("n1", activation(active))])
        other.binder.evidence.add_chunks([listing(bound(active), request_id=request_id)])
        await finished(other)

    assert await other.states() == {"p1": LeaseState.ACTIVE}


async def test_a_list_whose_parts_are_lost_is_requested_again(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))

    comparing = asyncio.create_task(
        world.binder.reconciler.reconcile_listing([listing(piece=1, pieces=2)])
    )
    while not comparing.done():
        await until(lambda: world.clock.sleepers or comparing.done())
        world.clock.advance(1.0)

    [request] = comparing.result()
    assert isinstance(request, ResyncRequested)
    assert await world.leases()


async def test_the_last_part_of_a_list_waits_for_the_others(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))

    comparing = asyncio.create_task(
        world.binder.reconciler.reconcile_listing([listing(piece=1, pieces=2)])
    )
    await until(lambda: world.clock.sleepers)
    await world.binder.evidence.observe_lists([listing(piece=0, pieces=2)])
    world.clock.advance(1.0)

    [gone] = await comparing
    assert not isinstance(gone, ResyncRequested)


def test_a_node_whose_reports_always_differ_does_not_hold_up_a_rebuild() -> None:
    evidence = CollectedEvidence(time.monotonic)
    read = list[str]()
    evidence.begin_rebuild()
    for number in range(100):
        held = activation(lease(f"p{number}", "stolen"))
        evidence.add_reports([replace(report("stolen", held), reported_at=float(number))])
        read += evidence.take_reports()
    evidence.add_reports([report("honest")])

    assert read == ["stolen"] * MOST_REPORTS
    assert set(evidence.take_reports()) == {"honest"}


def test_reports_from_before_a_rebuild_do_not_count() -> None:
    evidence = CollectedEvidence(time.monotonic)
    evidence.add_reports([report("early")])
    evidence.begin_rebuild()
    evidence.add_reports([report("late")])

    assert set(evidence.take_reports()) == {"late"}


def test_lists_that_never_end_are_forgotten() -> None:
    evidence = CollectedEvidence(time.monotonic)
    for number in range(100):
        evidence.add_chunks([replace(listing(piece=0, pieces=2), listing_id=f"l{number}")])
    for number in (0, 99):
        evidence.add_chunks([replace(listing(piece=1, pieces=2), listing_id=f"l{number}")])

    assert evidence.listed("l0") is None
    assert evidence.listed("l99") is not None
