"""The binder compares the ledger with listings, and rebuilds one that was lost."""

import asyncio
from dataclasses import replace

from msgspec import structs

from services.binder.observations import PodSnapshot
from shared.model.events.pod_events import (
    LedgerRebuilt,
    PlacementChosen,
    ResyncRequested,
)
from shared.model.lease import LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.binder.events import activation, bound, in_state, listing, report, terminated
from tests.support.binder.world import NOW, World, chosen, lease, running
from tests.support.waiting import until


async def test_a_lease_whose_pod_is_not_listed_ends() -> None:
    world = World(in_state(LeaseState.BOUND))

    (event,) = await world.binder.reconcile_listing([listing()])

    assert event == replace(terminated(), trace="")


async def test_a_listing_counts_only_when_it_is_complete() -> None:
    world = World(in_state(LeaseState.BOUND))

    first = await world.binder.reconcile_listing([listing(piece=0, pieces=2)])
    second = await world.binder.reconcile_listing([listing(piece=1, pieces=2)])

    assert not first
    assert len(second) == 1


async def test_the_binding_of_a_new_lease_is_not_sent_again() -> None:
    new = structs.replace(in_state(LeaseState.BOUND), created_at=NOW - 4)
    world = World(new)
    world.pods.seen["p1"] = PodSnapshot(new.pod, None)

    assert not await world.binder.reconcile_listing([listing()])


async def test_the_binding_of_a_committed_lease_is_sent_again_if_its_pod_is_unbound() -> None:
    committed = in_state(LeaseState.BOUND)
    world = World(committed)
    world.pods.seen["p1"] = PodSnapshot(committed.pod, None)

    (event,) = await world.binder.reconcile_listing([listing()])

    assert event == PlacementChosen(lease=committed)


async def test_a_lease_that_only_the_pod_carries_is_reported_not_created() -> None:
    world = World()

    assert not await world.binder.reconcile_listing([listing(bound(lease()))])

    assert world.metrics.anomalies["pods_without_lease"] == 1
    assert not world.ledger.leases


async def wanted(world: World) -> str:
    """Wait for the rebuild's request; return its ID."""
    await until(lambda: world.clock.sleepers)
    while True:
        for event in world.bus.published:
            if isinstance(event, ResyncRequested):
                return event.request_id
        world.clock.advance(0.25)
        await until(lambda: world.clock.sleepers)


async def test_an_empty_ledger_is_restored_from_agents_and_pods() -> None:
    world = World()
    world.ledger.is_ready = False
    active, silent = lease("p1", "n1"), lease("p2", "n2")

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.save_devices([report("n1", activation(active))])
        await world.binder.save_devices([report("n2")])
        assert not await world.binder.reconcile_listing(
            [listing(bound(active), bound(silent), request_id=request_id)]
        )
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)
        await until(lambda: isinstance(world.bus.published[-1], LedgerRebuilt))

    states = [(each.name, each.state) for each in world.ledger.restored]
    assert states == [("p1", LeaseState.ACTIVE), ("p2", LeaseState.BOUND)]


async def test_a_rebuild_lists_pods_only_after_the_bindings_in_flight() -> None:
    world = World(lease())
    world.pods.hanging["p1"] = asyncio.Event()

    async with running(world.binder.send_bindings, world.binder.rebuild_ledger):
        binding = asyncio.create_task(world.binder.bind_pods(chosen(lease())))
        await until(lambda: world.pods.bindings)
        world.ledger.is_ready = False
        for _ in range(20):
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers)
        early = [type(event) for event in world.bus.published]
        world.pods.hanging["p1"].set()
        await binding
        await wanted(world)

    assert ResyncRequested not in early


async def test_a_silent_node_delays_the_rebuild_10_s_at_most() -> None:
    world = World()
    world.ledger.is_ready = False
    began = world.clock.now()

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.reconcile_listing([listing(bound(lease()), request_id=request_id)])
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)

    assert 10 <= world.clock.now() - began < 13
    assert [each.name for each in world.ledger.restored] == ["p1"]


async def test_leases_that_cannot_be_restored_are_reported() -> None:
    world = World()
    world.ledger.is_ready = False
    forged = replace(bound(lease("p1")), pod=PodUid("another"))
    world.ledger.misfits = {lease("p2").pod}

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.save_devices([report("n1")])
        pods = (forged, bound(lease("p2")))
        await world.binder.reconcile_listing([listing(*pods, request_id=request_id)])
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)

    assert world.metrics.anomalies["not_restored"] == 2


async def test_an_agents_word_counts_only_for_pods_that_are_on_its_node() -> None:
    world = World()
    world.ledger.is_ready = False
    gone, bound_late, elsewhere = lease("p1"), lease("p2"), lease("p3")
    world.pods.seen["p2"] = PodSnapshot(bound_late.pod, bound_late.node)
    world.pods.seen["p3"] = PodSnapshot(elsewhere.pod, NodeName("n2"))

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        reported = map(activation, (gone, bound_late, elsewhere))
        await world.binder.save_devices([report("n1", *reported)])
        await world.binder.reconcile_listing([listing(request_id=request_id)])
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)

    assert [each.pod for each in world.ledger.restored] == [bound_late.pod]


async def test_nodes_that_keep_reporting_are_waited_for_and_not_asked_again() -> None:
    world = World()
    world.ledger.is_ready = False
    leases = [lease(f"p{number}", f"n{number}") for number in range(30)]

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        pods = [bound(each) for each in leases]
        await world.binder.reconcile_listing([listing(*pods, request_id=request_id)])
        for first in range(0, len(leases), 3):
            of_some = [report(each.node, activation(each)) for each in leases[first : first + 3]]
            await world.binder.save_devices(of_some)
            for _ in range(32):
                world.clock.advance(0.25)
                await until(lambda: world.clock.sleepers or world.ledger.is_ready)
        await until(lambda: isinstance(world.bus.published[-1], LedgerRebuilt))

    assert {each.state for each in world.ledger.restored} == {LeaseState.ACTIVE}
    requests = [each for each in world.bus.published if isinstance(each, ResyncRequested)]
    assert len(requests) == 1
