"""The binder compares the ledger with listings, and rebuilds one that was lost."""

import asyncio
from dataclasses import replace

from msgspec import structs

from services.binder.observations import PodSnapshot
from shared.model.events.pod_events import (
    LedgerRebuilt,
    PlacementChosen,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.lease import LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.binder.events import activation, bound, in_state, listing, report
from tests.support.binder.world import NOW, NewWorld, World, chosen, lease, running
from tests.support.waiting import until


async def test_a_listing_counts_only_when_it_is_complete(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))

    first = await world.binder.reconcile_listing([listing(piece=0, pieces=2)])
    second = await world.binder.reconcile_listing([listing(piece=1, pieces=2)])

    assert not first
    assert len(second) == 1


async def test_the_binding_of_a_new_lease_is_not_sent_again(new_world: NewWorld) -> None:
    new = structs.replace(in_state(LeaseState.BOUND), created_at=NOW - 4)
    world = await new_world(new)
    world.pods.seen["p1"] = PodSnapshot(new.pod, None)

    assert not await world.binder.reconcile_listing([listing()])


async def test_the_binding_of_a_committed_lease_is_sent_again_if_its_pod_is_unbound(
    new_world: NewWorld,
) -> None:
    committed = in_state(LeaseState.BOUND)
    world = await new_world(committed)
    world.pods.seen["p1"] = PodSnapshot(committed.pod, None)

    (event,) = await world.binder.reconcile_listing([listing()])

    assert event == PlacementChosen(lease=committed)


async def test_a_lease_that_only_the_pod_carries_is_reported_not_created(
    new_world: NewWorld,
) -> None:
    world = await new_world()

    assert not await world.binder.reconcile_listing([listing(bound(lease()))])

    assert world.metrics.anomalies["pods_without_lease"] == 1
    assert not await world.leases()


async def wanted(world: World) -> str:
    """Wait for the rebuild's request, and answer it with quotas; return its ID."""
    await until(lambda: world.clock.sleepers)
    while True:
        for event in world.bus.published:
            if isinstance(event, ResyncRequested):
                await world.binder.save_quotas([QuotasUpdated(quotas=(), read_at=NOW)])
                return event.request_id
        world.clock.advance(0.25)
        await until(lambda: world.clock.sleepers)


def has_finished(world: World) -> bool:
    return any(isinstance(event, LedgerRebuilt) for event in world.bus.published)


async def finished(world: World) -> None:
    """Let time pass until the rebuild is finished."""
    while not has_finished(world):
        world.clock.advance(0.25)
        await until(lambda: world.clock.sleepers or has_finished(world))


async def test_an_empty_ledger_is_restored_from_agents_and_pods(new_world: NewWorld) -> None:
    world = await new_world()
    await world.lose()
    active, silent = lease("p1", "n1"), lease("p2", "n2")

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.save_devices([report("n1", activation(active))])
        await world.binder.save_devices([report("n2")])
        assert not await world.binder.reconcile_listing(
            [listing(bound(active), bound(silent), request_id=request_id)]
        )
        await finished(world)

    assert await world.states() == {"p1": LeaseState.ACTIVE, "p2": LeaseState.BOUND}
    again = await world.leases()
    assert [again[each.pod].shares for each in (active, silent)] == [active.shares, silent.shares]


async def test_a_rebuild_lists_pods_only_after_the_bindings_in_flight(new_world: NewWorld) -> None:
    world = await new_world(lease())
    world.pods.hanging["p1"] = asyncio.Event()

    async with running(world.binder.send_bindings, world.binder.rebuild_ledger):
        binding = asyncio.create_task(world.binder.bind_pods(chosen(lease())))
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


async def test_a_silent_node_delays_the_rebuild_10_s_at_most(new_world: NewWorld) -> None:
    world = await new_world()
    await world.lose()
    began = world.clock.now()

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.reconcile_listing([listing(bound(lease()), request_id=request_id)])
        await finished(world)

    assert 10 <= world.clock.now() - began < 13
    assert [each.name for each in (await world.leases()).values()] == ["p1"]


async def test_leases_that_cannot_be_restored_are_reported(new_world: NewWorld) -> None:
    world = await new_world()
    await world.lose()
    forged = replace(bound(lease("p1")), pod=PodUid("another"))
    negative = (structs.replace(lease().shares[0], cores_percent=101),)
    misfit = lease("p2", shares=negative)

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        await world.binder.save_devices([report("n1")])
        pods = (forged, bound(misfit))
        await world.binder.reconcile_listing([listing(*pods, request_id=request_id)])
        await finished(world)

    assert world.metrics.anomalies["not_restored"] == 2


async def test_an_agents_word_counts_only_for_pods_that_are_on_its_node(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    await world.lose()
    gone, bound_late, elsewhere = lease("p1"), lease("p2"), lease("p3")
    world.pods.seen["p2"] = PodSnapshot(bound_late.pod, bound_late.node)
    world.pods.seen["p3"] = PodSnapshot(elsewhere.pod, NodeName("n2"))

    async with running(world.binder.rebuild_ledger):
        request_id = await wanted(world)
        reported = map(activation, (gone, bound_late, elsewhere))
        await world.binder.save_devices([report("n1", *reported)])
        await world.binder.reconcile_listing([listing(request_id=request_id)])
        await finished(world)

    assert list(await world.leases()) == [bound_late.pod]


async def test_nodes_that_keep_reporting_are_waited_for_and_not_asked_again(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    await world.lose()
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
                await until(lambda: world.clock.sleepers or has_finished(world))
        await finished(world)

    assert {each.state for each in (await world.leases()).values()} == {LeaseState.ACTIVE}
    requests = [each for each in world.bus.published if isinstance(each, ResyncRequested)]
    assert len(requests) == 1
