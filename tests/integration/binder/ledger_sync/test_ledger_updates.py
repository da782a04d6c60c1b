"""The binder keeps the ledger in sync: ended leases, activations, inventory, offers."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.binder.ledger_sync.sweep import GANG_S, NEXT_OFFER_S, Sweeper
from services.binder.service import Binder
from shared.ledger.leases import RedisLeases
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.node_events import ShareActivated, ShareRefused
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    PodQueued,
    ResyncRequested,
)
from shared.model.events.request_reply import LeasesRequest
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import OfferedPods
from shared.model.names import Namespace, NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.events import activation, in_state, report, terminated
from tests.support.binder.world import NOW, NewWorld, ObservedLedger, World, lease, running
from tests.support.clock import FakeClock
from tests.support.placer.ledger import (
    GANG,
    in_gang,
    ledger,
    queued,
    reservation,
    reserve,
    share,
    verdict,
)
from tests.support.planner.scene import budget
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (LeaseState.ACTIVE, "Succeeded"),
        (LeaseState.ACTIVE, "Failed"),
        pytest.param(LeaseState.RESERVED, "", id="deleted before its binding"),
    ],
)
async def test_the_lease_of_a_pod_that_cannot_run_ends_at_once(
    new_world: NewWorld, state: LeaseState, phase: str
) -> None:
    world = await new_world(in_state(state))

    (changed,) = await world.binder.end_leases([terminated(phase=phase)])

    assert isinstance(changed, LeaseChanged)
    assert not await world.leases()
    assert not world.agents.requested_pods


async def test_plans_that_wait_for_a_pod_continue_once_its_lease_has_ended(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await new_world(in_state(LeaseState.ACTIVE))
    noted = list[PodUid]()
    monkeypatch.setattr(world.binder.preemptions, "note_ended", noted.extend)

    await world.binder.end_leases([terminated(phase="Succeeded")])

    assert noted == [lease().pod]


@pytest.mark.parametrize("state", [LeaseState.BOUND, LeaseState.ACTIVE])
async def test_the_lease_of_a_pod_deleted_by_force_ends_when_its_agent_confirms(
    new_world: NewWorld,
    state: LeaseState,
) -> None:
    world = await new_world(in_state(state))
    pod = lease().pod
    world.agents.answers[pod] = False

    assert not await world.binder.end_leases([terminated()])
    for _ in range(60):
        assert not await world.binder.vanished.end_vanished()
        world.clock.advance(1.0)
    assert pod in await world.leases()
    world.agents.answers[pod] = True

    (changed,) = await world.binder.vanished.end_vanished()
    assert changed.lease.state is LeaseState.RELEASED


async def vanished(new_world: NewWorld) -> World:
    """A lease whose pod is gone, and whose node's agent was asked once, in vain."""
    world = await new_world(in_state(LeaseState.ACTIVE))
    await world.binder.end_leases([terminated()])
    assert not await world.binder.vanished.end_vanished()
    return world


async def test_leases_on_a_silent_node_end_after_25_s(new_world: NewWorld) -> None:
    world = await vanished(new_world)

    for _ in range(24):
        world.clock.advance(1.0)
        assert not await world.binder.vanished.end_vanished()
    world.clock.advance(1.0)

    assert len(await world.binder.vanished.end_vanished()) == 1


@pytest.mark.parametrize(
    ("silent_s", "further_s"), [(10, 15), (24, 9), (-3600, 25)], ids=["early", "late", "clock"]
)
async def test_a_restart_of_the_binder_does_not_begin_the_silence_of_a_node_anew(
    new_world: NewWorld, silent_s: int, further_s: int
) -> None:
    """The new binder itself sends ten requests; a clock that was set back begins it anew."""
    world = await vanished(new_world)
    world.clock.advance(silent_s)
    another = World(world.ledger, clock=world.clock)

    for _ in range(further_s):
        assert not await another.binder.vanished.end_vanished()
        world.clock.advance(1.0)

    assert len(await another.binder.vanished.end_vanished()) == 1


async def test_a_reply_of_its_agent_ends_the_silence_of_a_node(new_world: NewWorld) -> None:
    world = await vanished(new_world)
    world.clock.advance(24)
    world.agents.answers[lease().pod] = False
    assert not await world.binder.vanished.end_vanished()

    assert await world.ledger.list_vanished() == {lease().pod: None}


async def test_a_node_gets_one_request_for_all_its_vanished_pods(new_world: NewWorld) -> None:
    names = [f"p{number}" for number in range(10)]
    world = await new_world(*(in_state(LeaseState.ACTIVE, name) for name in names))
    await world.binder.end_leases([terminated(name) for name in names])
    world.agents.answers = {lease(name).pod: name != "p7" for name in names}

    ended = await world.binder.vanished.end_vanished()

    assert len(ended) == 9
    assert world.agents.requests == 1
    assert list(await world.leases()) == [lease("p7").pod]


async def test_the_lease_of_a_vanished_pod_is_read_once_while_its_agent_is_asked(
    new_world: NewWorld,
) -> None:
    world = await new_world(in_state(LeaseState.ACTIVE))
    pod = lease().pod
    world.agents.answers[pod] = False
    await world.binder.end_leases([terminated()])
    assert isinstance(world.ledger, ObservedLedger)
    world.ledger.loaded.clear()

    for _ in range(5):
        assert not await world.binder.vanished.end_vanished()

    assert world.agents.requests == 5
    assert world.ledger.loaded == [pod]


async def test_a_lease_that_is_on_another_node_by_now_is_asked_about_there(
    new_world: NewWorld,
) -> None:
    world = await new_world(in_state(LeaseState.ACTIVE))
    pod = lease().pod
    world.agents.answers[pod] = False
    await world.binder.end_leases([terminated()])
    assert not await world.binder.vanished.end_vanished()

    await world.rebuild(lease(node="n2", state=LeaseState.ACTIVE))
    await world.binder.end_leases([terminated()])
    world.agents.answers[pod] = True

    assert not await world.binder.vanished.end_vanished()
    [ended] = await world.binder.vanished.end_vanished()
    assert ended.lease.node == "n2"


async def test_a_binder_that_was_suspended_does_not_treat_agents_as_dead(
    new_world: NewWorld,
) -> None:
    world = await vanished(new_world)

    world.clock.advance(60.0)
    assert not await world.binder.vanished.end_vanished()
    world.agents.answers[lease().pod] = True

    assert len(await world.binder.vanished.end_vanished()) == 1


@pytest.mark.parametrize(
    "loop",
    [lambda of: of.sweeper.expire_reservations(), lambda of: of.offer_capacity()],
    ids=["expiry", "offers"],
)
async def test_a_call_without_a_response_requests_a_resync(
    world: World, loop: Callable[[Binder], Awaitable[object]]
) -> None:
    answer = world.ledger.status

    async def silence(**_: object) -> Any:
        raise UnavailableError("no answer")

    world.ledger.status = silence  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await loop(world.binder)
    world.ledger.status = answer  # type: ignore[method-assign]

    [event] = await world.binder.sweeper.expire_reservations()
    assert isinstance(event, ResyncRequested)


async def test_a_budget_that_could_not_be_saved_is_requested_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(_: object) -> None:
        raise UnavailableError("no answer")

    monkeypatch.setattr(world.binder.preemptions.store, "save_budget", silence)
    with pytest.raises(UnavailableError):
        await world.binder.save_budgets([budget("a")])

    [event] = await world.binder.sweeper.expire_reservations()
    assert isinstance(event, ResyncRequested)


async def waits(world: World) -> PodQueued:
    """Save a pod that fits nowhere."""
    waiting = queued("uid-w", units=16_000)
    capacity = await world.ledger.capacity()
    await world.ledger.waiting_pods.enqueue([verdict(waiting, capacity)])
    return waiting


async def test_the_end_of_a_lease_offers_its_capacity_to_waiting_pods(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.RESERVED), lease("p2", node="n2"))
    waiting = await waits(world)
    async with running(world.binder.offer_capacity):
        await world.binder.end_leases([terminated()])
        await until(lambda: world.bus.published)

    [offered] = world.bus.published
    assert offered == replace(waiting, requeue_number=await world.ledger.capacity())


async def test_no_offers_are_chosen_while_the_capacity_number_does_not_change(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    scans = list[float]()
    choose = world.ledger.waiting_pods.choose_offers

    async def counted(*, now: float, with_gangs: bool) -> OfferedPods:
        scans.append(now)
        return await choose(now=now, with_gangs=with_gangs)

    world.ledger.waiting_pods.choose_offers = counted  # type: ignore[assignment]
    for _ in range(5):
        await world.binder.sweeper.offer()

    assert len(scans) == 1


async def test_a_lease_that_moved_on_while_it_was_ended_is_a_conflict(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))
    stale = structs.replace(in_state(LeaseState.BOUND), version=1)

    with pytest.raises(ConflictError):
        await world.updater.release_unmoved([stale], reason="test")

    assert lease().pod in await world.leases()


async def test_an_expired_reservation_is_a_failed_binding_and_its_capacity_is_offered(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease(), lease("p2", node="n2", expires_at=NOW + 60))
    waiting = await waits(world)
    world.clock.advance(31)

    async with running(world.binder.offer_capacity):
        (failed,) = await world.binder.sweeper.expire_reservations()
        await until(lambda: world.bus.published)

    assert isinstance(failed, BindingFailed)
    [offered] = world.bus.published
    assert isinstance(offered, PodQueued)
    assert offered.pod == waiting.pod


async def test_activations_are_saved_from_events_and_from_reports(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND, "p1"), in_state(LeaseState.BOUND, "p2"))
    first, second = lease("p1"), lease("p2")

    await world.binder.activate_shares(
        [ShareActivated(node=first.node, allocation=activation(first))]
    )
    await world.binder.save_devices([report("n1", activation(second))])

    assert [each.state for each in (await world.leases()).values()] == [LeaseState.ACTIVE] * 2


async def test_an_activation_without_a_lease_is_counted_once(world: World) -> None:
    await world.binder.save_devices([report("n1", activation(lease()))])
    await world.binder.save_devices([report("n1", activation(lease()))])

    assert world.metrics.anomalies["active_without_lease"] == 1


async def test_only_the_newest_report_of_a_node_is_saved(world: World) -> None:
    newest = replace(report(at=NOW), served=("nvidia.com/gpu",))

    await world.binder.save_devices([newest, report(at=NOW - 5)])

    [node] = await world.ledger.totals.of_nodes([newest.node])
    assert node.node.served == newest.served


async def test_the_lease_of_a_refused_share_is_released(new_world: NewWorld) -> None:
    world = await new_world(in_state(LeaseState.BOUND))
    refused = ShareRefused(
        node=NodeName("n1"),
        reason="reserved variable",
        pod=lease().pod,
        namespace=Namespace("default"),
        name="p1",
        container="c",
    )

    (changed,) = await world.binder.release_refused([refused])

    assert changed.lease.state is LeaseState.RELEASED


async def test_a_refusal_of_a_claims_earlier_lease_does_not_end_the_present_one(
    new_world: NewWorld,
) -> None:
    """The kubelet tries to prepare a claim again and again, and each time may be refused."""
    world = await new_world(in_state(LeaseState.BOUND))
    [stored] = (await world.leases()).values()
    refused = ShareRefused(node=stored.node, reason="no room", pod=stored.pod, name=stored.name)
    earlier = replace(refused, namespace=stored.namespace, version=stored.version - 1)

    assert not await world.binder.release_refused([earlier])
    (changed,) = await world.binder.release_refused([replace(earlier, version=stored.version)])

    assert changed.lease.state is LeaseState.RELEASED


async def test_a_node_gets_only_its_own_leases(new_world: NewWorld) -> None:
    world = await new_world(lease("p1", "n1"), lease("p2", "n2"))

    reply = await world.binder.list_leases(LeasesRequest(node=NodeName("n1")))
    request = LeasesRequest(node=NodeName("n1"), pods=(lease("p1").pod, lease("p2").pod))

    assert [each.name for each in reply.leases] == ["p1"]
    assert await world.binder.list_leases(request) == reply


@pytest.mark.parametrize(
    "pod",
    [
        None,
        PodSnapshot(PodUid("another"), NodeName("n1")),
        PodSnapshot(lease().pod, NodeName("n2")),
        PodSnapshot(lease().pod, NodeName("n1"), terminal=True),
    ],
)
async def test_no_lease_is_restored_for_a_pod_that_does_not_run_there(
    world: World,
    pod: PodSnapshot | None,
) -> None:
    world.pods.seen["p1"] = pod

    await world.binder.save_devices([report("n1", activation(lease()))])

    assert not await world.leases()


P4_S = 2.0
"""Freed capacity reaches a waiting pod that fits within this time."""


async def test_another_binder_offers_again_what_was_lost_with_the_first() -> None:
    with valkey_server() as server:
        await server.ready()
        async with ledger(server.url) as leases:
            clock = FakeClock(NOW)
            dying = Sweeper(leases, clock, forsake=lambda _leases: None)
            other = Sweeper(leases, clock, forsake=lambda _leases: None)
            await wait_for_full_devices(leases)
            await other.offer()
            await leases.release([PodUid("full-0")], reason="test")

            lost = await dying.offer()
            found: list[PodQueued] = []
            while not found and clock.now() < NOW + 60:
                clock.advance(NEXT_OFFER_S)
                found = await other.offer()

            assert [event.pod for event in lost] == ["w"]
            assert [event.pod for event in found] == ["w"]
            assert clock.now() - NOW <= P4_S + 2 * NEXT_OFFER_S


async def test_the_verdicts_of_a_gang_that_forms_are_decided_again_once_in_a_while(
    url: str,
) -> None:
    gang = structs.replace(GANG, min_member=99)
    async with ledger(url) as leases:
        clock = FakeClock(NOW)
        sweeper = Sweeper(leases, clock, forsake=lambda _leases: None)
        reviewed = list[float]()
        for number in range(40):
            await leases.waiting_pods.enroll(gang, [verdict(in_gang(f"p-{number}"), 0)])
            if await sweeper.offer():
                reviewed.append(clock.now() - NOW)
            clock.advance(0.25)

        assert len(reviewed) == pytest.approx(10 / GANG_S, abs=1)


async def wait_for_full_devices(leases: RedisLeases) -> None:
    """Fill both devices, and let one pod wait."""
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4, 4_000)) for n in range(8)))
    await leases.waiting_pods.enqueue([verdict(queued("w"), await leases.capacity())])
