"""The binder keeps the ledger in step: ends, activations, inventory, sweeps, listings, rebuild."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.binder.binding import PodSeen
from services.binder.service import Binder
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events import (
    BindingFailed,
    BoundPod,
    LeaseChanged,
    LedgerRebuilt,
    ListingWanted,
    NodeChanged,
    PlacementChosen,
    PodGone,
    PodQueued,
    PodsListed,
)
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import dump_lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.node_events import Activation, DeviceReported, ShareActivated, ShareRefused
from shared.model.questions import LeasesAsked
from shared.model.request import PodRequest
from shared.runtime.service import roles_of
from tests.support.binder_world import NOW, World, chosen, lease, running, until


def gone(name: str = "p1", phase: str = "") -> PodGone:
    held = lease(name)
    return PodGone(pod=held.pod, namespace=held.namespace, name=name, node=held.node, phase=phase)


def in_state(state: LeaseState, name: str = "p1") -> Lease:
    return replace(lease(name), state=state, version=2, created_at=NOW - 60)


def activation(held: Lease) -> Activation:
    return Activation(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container="c",
        resource="volcano.sh/vgpu-number",
        device_ids=("GPU-n1-0-0",),
        lease=held,
    )


def report(node: str = "n1", *activations: Activation, at: float = NOW) -> DeviceReported:
    return DeviceReported(
        node=NodeName(node), devices=(), served=(), activations=activations, reported_at=at
    )


def bound(held: Lease) -> BoundPod:
    return BoundPod(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        node=held.node,
        lease=dump_lease(held),
    )


def listing(*pods: BoundPod, at: float = NOW, piece: int = 0, pieces: int = 1) -> PodsListed:
    return PodsListed(listing="l1", piece=piece, pieces=pieces, pods=pods, listed_at=at)


def test_every_role_of_the_binder_can_be_read() -> None:
    roles = {role.method: role for role in roles_of(Binder)}

    assert roles["bind_pods"].hears == (PlacementChosen,)
    assert roles["bind_pods"].concurrency == 16
    assert roles["explain_waiting"].says == ()


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_that_is_over_ends_its_lease_at_once(phase: str) -> None:
    world = World(in_state(LeaseState.ACTIVE))

    (changed,) = await world.binder.end_leases([gone(phase=phase)])

    assert changed.lease.state is LeaseState.RELEASED
    assert not world.agents.asked


async def test_a_pod_deleted_before_it_was_bound_ends_its_lease_at_once() -> None:
    world = World(in_state(LeaseState.RESERVED))

    assert len(await world.binder.end_leases([gone()])) == 1


def asked_once_more(world: World) -> Callable[[], bool]:
    """Let time pass until agents were asked again: the asking loop may not sleep yet."""
    before = len(world.agents.asked)

    def passes() -> bool:
        world.clock.advance(1.0)
        return len(world.agents.asked) > before

    return passes


@pytest.mark.parametrize("state", [LeaseState.BOUND, LeaseState.ACTIVE])
async def test_a_pod_deleted_by_force_keeps_its_lease_until_its_agent_says_it_ended(
    state: LeaseState,
) -> None:
    world = World(in_state(state))
    pod = lease().pod
    world.agents.answers[pod] = False

    assert not await world.binder.end_leases([gone()])
    async with running(world.binder.ask_endings):
        await until(lambda: world.agents.asked)
        for _ in range(60):
            await until(asked_once_more(world))
        assert pod in world.ledger.leases
        world.agents.answers[pod] = True
        await until(asked_once_more(world))
        await until(lambda: pod not in world.ledger.leases)
        await until(lambda: world.bus.published)

    (changed,) = world.bus.published
    assert isinstance(changed, LeaseChanged)
    assert changed.lease.state is LeaseState.RELEASED


async def test_an_agent_that_stays_silent_is_waited_for_25_s() -> None:
    world = World(in_state(LeaseState.ACTIVE))
    await world.binder.end_leases([gone()])

    for _ in range(24):
        world.clock.advance(1.0)
        assert not await world.binder.keeper.end_asked()
    world.clock.advance(1.0)

    assert len(await world.binder.keeper.end_asked()) == 1


async def test_a_node_is_asked_once_about_all_pods_that_vanished_from_it() -> None:
    names = [f"p{number}" for number in range(50)]
    world = World(*(in_state(LeaseState.ACTIVE, name) for name in names))
    await world.binder.end_leases([gone(name) for name in names])
    world.agents.answers = {lease(name).pod: name != "p7" for name in names}

    ended = await world.binder.keeper.end_asked()

    assert len(ended) == 49
    assert world.agents.questions == 1
    assert list(world.ledger.leases) == [lease("p7").pod]


async def test_a_binder_that_slept_does_not_take_its_agents_for_dead() -> None:
    world = World(in_state(LeaseState.ACTIVE))
    await world.binder.end_leases([gone()])

    world.clock.advance(60.0)
    assert not await world.binder.keeper.end_asked()
    world.agents.answers[lease().pod] = True

    assert len(await world.binder.keeper.end_asked()) == 1


@pytest.mark.parametrize("loop", ["expire_reservations", "offer_capacity"])
async def test_after_a_call_without_an_answer_all_waiting_pods_are_told_again(loop: str) -> None:
    world = World()
    answers = world.ledger.capacity, world.ledger.expire

    async def silence(*_: object) -> Any:
        raise UnavailableError("no answer")

    world.ledger.capacity = world.ledger.expire = silence  # type: ignore[method-assign, assignment]
    with pytest.raises(UnavailableError):
        await getattr(world.binder, loop)()
    world.ledger.capacity, world.ledger.expire = answers  # type: ignore[method-assign]

    async with running(world.binder.expire_reservations):
        await until(lambda: world.clock.sleepers)

    assert [type(event) for event in world.bus.published] == [ListingWanted]


async def test_the_end_of_a_lease_wakes_those_that_wait() -> None:
    world = World(in_state(LeaseState.RESERVED))
    waiting = PodQueued(
        pod=PodUid("uid-w"),
        namespace=Namespace("default"),
        name="w",
        resource_version="1",
        request=PodRequest(),
    )
    async with running(world.binder.offer_capacity):
        await until(lambda: world.ledger.scans)
        world.ledger.waiting.append(waiting)

        await world.binder.end_leases([gone()])
        await until(lambda: world.bus.published)

    assert world.bus.published == [replace(waiting, offer=1)]


async def test_nothing_is_scanned_while_the_capacity_number_stands_still() -> None:
    world = World()

    for _ in range(5):
        await world.binder.sweeper.offer()

    assert world.ledger.scans == 1


async def test_a_lease_that_moved_on_while_it_was_ended_is_looked_at_again() -> None:
    world = World(in_state(LeaseState.BOUND))
    stale = replace(in_state(LeaseState.BOUND), version=1)

    with pytest.raises(ConflictError):
        await world.binder.keeper.release_unmoved([stale], reason="test")

    assert lease().pod in world.ledger.leases


async def test_expired_reservations_are_told_as_failed_bindings() -> None:
    world = World()
    world.ledger.expiring = [replace(lease(), state=LeaseState.EXPIRED)]

    async with running(world.binder.expire_reservations):
        await until(lambda: world.bus.published)

    (failed,) = world.bus.published
    assert isinstance(failed, BindingFailed)


async def test_activations_are_noted_from_events_and_from_reports() -> None:
    world = World(in_state(LeaseState.BOUND, "p1"), in_state(LeaseState.BOUND, "p2"))
    first, second = lease("p1"), lease("p2")

    await world.binder.activate_shares(
        [ShareActivated(node=first.node, activation=activation(first))]
    )
    await world.binder.keep_devices([report("n1", activation(second))])

    assert [each.state for each in world.ledger.leases.values()] == [LeaseState.ACTIVE] * 2


async def test_an_activation_without_a_lease_is_counted_once() -> None:
    world = World()

    await world.binder.keep_devices([report("n1", activation(lease()))])
    await world.binder.keep_devices([report("n1", activation(lease()))])

    assert world.tally["active_without_lease"] == 1


async def test_only_the_newest_report_of_a_node_is_saved() -> None:
    world = World()

    await world.binder.keep_devices([report(at=NOW), report(at=NOW - 5)])

    assert world.ledger.devices[NodeName("n1")].reported_at == NOW


async def test_nodes_come_and_go() -> None:
    world = World()
    facts = NodeFacts(name=NodeName("n1"))

    await world.binder.keep_nodes([NodeChanged(facts=facts)])
    assert facts.name in world.ledger.nodes
    await world.binder.keep_nodes([NodeChanged(facts=facts, gone=True)])

    assert not world.ledger.nodes


async def test_a_share_that_its_node_refused_is_given_back() -> None:
    world = World(in_state(LeaseState.BOUND))
    refused = ShareRefused(
        node=NodeName("n1"),
        reason="reserved variable",
        pod=lease().pod,
        namespace=Namespace("default"),
        name="p1",
        container="c",
    )

    (changed,) = await world.binder.give_back_refused([refused])

    assert changed.lease.state is LeaseState.RELEASED


async def test_a_node_cannot_refuse_a_pod_of_another_node() -> None:
    world = World(in_state(LeaseState.BOUND))
    forged = ShareRefused(node=NodeName("stolen"), reason="because", pod=lease().pod)

    assert await world.binder.give_back_refused([forged]) == []


async def test_a_node_is_told_only_its_own_leases() -> None:
    world = World(lease("p1", "n1"), lease("p2", "n2"))

    told = await world.binder.tell_leases(LeasesAsked(node=NodeName("n1")))
    asked = LeasesAsked(node=NodeName("n1"), pods=(lease("p1").pod, lease("p2").pod))

    assert [each.name for each in told.leases] == ["p1"]
    assert await world.binder.tell_leases(asked) == told


async def test_a_lease_whose_pod_is_not_listed_is_ended_like_a_deleted_pods() -> None:
    world = World(in_state(LeaseState.BOUND))

    (said,) = await world.binder.compare_listing([listing()])

    assert said == replace(gone(), trace="", noticed_at=NOW)
    assert said.event_id != gone().event_id, "the stream would drop it as told already"


async def test_a_listing_counts_only_when_it_is_complete() -> None:
    world = World(in_state(LeaseState.BOUND))

    first = await world.binder.compare_listing([listing(piece=0, pieces=2)])
    second = await world.binder.compare_listing([listing(piece=1, pieces=2)])

    assert not first
    assert len(second) == 1


async def test_a_young_lease_is_no_orphan() -> None:
    world = World(replace(in_state(LeaseState.BOUND), created_at=NOW - 4))

    assert not await world.binder.compare_listing([listing()])


async def test_a_committed_lease_whose_pod_is_still_unbound_is_bound_again() -> None:
    held = in_state(LeaseState.BOUND)
    world = World(held)
    world.pods.seen["p1"] = PodSeen(held.pod, None)

    (said,) = await world.binder.compare_listing([listing()])

    assert said == PlacementChosen(lease=held)


async def test_a_pod_with_a_lease_that_the_ledger_lacks_is_reported_not_made_up() -> None:
    world = World()

    assert not await world.binder.compare_listing([listing(bound(lease()))])

    assert world.tally["pods_without_lease"] == 1
    assert not world.ledger.leases


async def wanted(world: World) -> None:
    await until(lambda: world.clock.sleepers)
    while not any(isinstance(event, ListingWanted) for event in world.bus.published):
        world.clock.advance(0.25)
        await until(lambda: world.clock.sleepers)


async def test_an_emptied_ledger_gets_back_what_agents_and_pods_say() -> None:
    world = World()
    world.ledger.is_ready = False
    active, silent = lease("p1", "n1"), lease("p2", "n2")

    async with running(world.binder.rebuild_ledger):
        await wanted(world)
        later = world.clock.now() + 1
        await world.binder.keep_devices([report("n1", activation(active), at=later)])
        await world.binder.keep_devices([report("n2", at=later)])
        assert not await world.binder.compare_listing(
            [listing(bound(active), bound(silent), at=later)]
        )
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)
        await until(lambda: isinstance(world.bus.published[-1], LedgerRebuilt))

    states = [(each.name, each.state) for each in world.ledger.restored]
    assert states == [("p1", LeaseState.ACTIVE), ("p2", LeaseState.BOUND)]


async def test_a_rebuild_lists_pods_only_when_the_bindings_under_way_have_landed() -> None:
    world = World(lease())
    world.pods.hanging["p1"] = asyncio.Event()

    async with running(world.binder.post_bindings, world.binder.rebuild_ledger):
        binding = asyncio.create_task(world.binder.bind_pods(chosen(lease())))
        await until(lambda: world.pods.posts)
        world.ledger.is_ready = False
        for _ in range(20):
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers)
        early = [type(event) for event in world.bus.published]
        world.pods.hanging["p1"].set()
        await binding
        await wanted(world)

    assert ListingWanted not in early


async def test_a_silent_node_delays_the_rebuild_10_s_at_most() -> None:
    world = World()
    world.ledger.is_ready = False
    began = world.clock.now()

    async with running(world.binder.rebuild_ledger):
        await wanted(world)
        await world.binder.compare_listing([listing(bound(lease()), at=world.clock.now() + 1)])
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)

    assert 10 <= world.clock.now() - began < 13
    assert [each.name for each in world.ledger.restored] == ["p1"]


async def test_what_cannot_be_restored_is_reported() -> None:
    world = World()
    world.ledger.is_ready = False
    forged = replace(bound(lease("p1")), pod=PodUid("another"))
    world.ledger.misfits = {lease("p2").pod}

    async with running(world.binder.rebuild_ledger):
        await wanted(world)
        await world.binder.keep_devices([report("n1")])
        pods = (forged, bound(lease("p2")))
        await world.binder.compare_listing([listing(*pods, at=world.clock.now() + 1)])
        while not world.ledger.is_ready:
            world.clock.advance(0.25)
            await until(lambda: world.clock.sleepers or world.ledger.is_ready)

    assert world.tally["not_restored"] == 2
