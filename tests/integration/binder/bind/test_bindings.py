"""Pods that placers place are bound once, or have no lease."""

import asyncio

import pytest
from msgspec import structs

from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    PodBound,
)
from shared.model.leases.lease import LeaseState
from shared.model.leases.lease_copy import ANNOTATION, load_lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Term
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.world import NewWorld, World, chosen, lease, running
from tests.support.clock import FakeClock
from tests.support.waiting import until

POD = lease().pod
N1 = NodeName("n1")
N2 = NodeName("n2")
UNBOUND = PodSnapshot(POD, None)
BOUND = PodSnapshot(POD, N1)


async def test_a_placement_is_bound_once_with_all_annotations_after_its_lease_is_published(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease())
    states: list[LeaseState] = []
    world.pods.before_binding = lambda: states.extend(
        event.lease.state for event in world.bus.published if isinstance(event, LeaseChanged)
    )

    events = await world.bind_all(lease())

    ((name, node, annotations),) = world.pods.bindings
    copy = load_lease(annotations[ANNOTATION], namespace=Namespace("default"), name="p1")
    assert (name, node, copy.shares) == ("p1", "n1", lease().shares)
    assert [type(event) for event in events] == [PodBound]
    assert (await world.leases())[POD].state is LeaseState.BOUND
    assert states == [LeaseState.BOUND]


@pytest.mark.parametrize(
    ("term", "ends_at"),
    [(Term(), None), (Term(max_run_s=5400, expected_run_s=60), "1970-01-01T01:46:40+00:00")],
)
async def test_a_pod_is_told_when_its_maximum_run_time_is_over_if_it_has_one(
    new_world: NewWorld, term: Term, ends_at: str | None
) -> None:
    ending = structs.replace(lease(), term=term)
    world = await new_world(ending, clock=FakeClock(1000.0))

    await world.bind_all(ending)

    ((_, _, annotations),) = world.pods.bindings
    assert annotations.get("leasehold.dev/ends-at") == ends_at


async def test_a_lease_made_by_a_clock_that_is_ahead_is_bound_after_no_time(
    new_world: NewWorld,
) -> None:
    ahead = structs.replace(lease(), created_at=5_000.0)
    world = await new_world(ahead, clock=FakeClock(1000.0))

    (event,) = await world.bind_all(ahead)

    assert isinstance(event, PodBound)
    assert event.latency_s == 0.0


async def test_an_expired_lease_is_not_bound_and_its_binding_fails(world: World) -> None:
    assert [type(event) for event in await world.bind_all(lease())] == [BindingFailed]
    assert not world.pods.bindings
    assert not world.bus.published


async def test_the_same_batch_twice_is_one_binding(new_world: NewWorld) -> None:
    world = await new_world(lease("p1"), lease("p2"))
    batch = chosen(lease("p1"), lease("p2"))

    async with running(world.binder.sender.send_bindings):
        first = await world.binder.pods.bind_pods(batch)
        again = await world.binder.pods.bind_pods(batch)

    assert len(world.pods.bindings) == 2
    assert [type(event) for event in first] == [type(event) for event in again] == [PodBound] * 2


@pytest.mark.parametrize(
    "error",
    [ConflictError("another replica has bound it"), UnavailableError("the response was lost")],
)
async def test_a_pod_that_is_bound_to_its_node_is_a_success_whatever_the_response(
    new_world: NewWorld, error: LeaseholdError
) -> None:
    world = await new_world(lease())
    world.pods.errors["p1"] = [error]
    world.pods.seen["p1"] = BOUND

    assert [type(event) for event in await world.bind_all(lease())] == [PodBound]
    assert (await world.leases())[POD].state is LeaseState.BOUND


@pytest.mark.parametrize(
    ("error", "seen", "word"),
    [
        (ConflictError("exists"), PodSnapshot(POD, N2), "to node n2"),
        (ConflictError("exists"), PodSnapshot(POD, None, deleting=True), "being deleted"),
        (ConflictError("the pod has scheduling gates"), UNBOUND, "scheduling gates"),
        (ConflictError("exists"), PodSnapshot(POD, N1, terminal=True), "has terminated"),
        (RequestError("403 Forbidden: pods/binding"), UNBOUND, "403 Forbidden"),
    ],
)
async def test_the_lease_of_a_pod_that_cannot_be_bound_is_released(
    new_world: NewWorld, error: LeaseholdError, seen: PodSnapshot, word: str
) -> None:
    world = await new_world(lease(), lease("good"))
    world.pods.errors["p1"] = [error]
    world.pods.seen["p1"] = seen

    events = await world.bind_all(lease(), lease("good"))

    [failed] = [event for event in events if isinstance(event, BindingFailed)]
    [changed] = [event for event in events if isinstance(event, LeaseChanged)]
    assert word in failed.reason
    assert (changed.lease.pod, changed.lease.state) == (POD, LeaseState.RELEASED)
    assert [event.lease.name for event in events if isinstance(event, PodBound)] == ["good"]
    assert [each.name for each in (await world.leases()).values()] == ["good"]


@pytest.mark.parametrize(
    ("seen", "word"), [(None, "deleted"), (PodSnapshot(PodUid("other"), None), "replaced")]
)
async def test_the_lease_of_a_deleted_pod_stays_until_its_agent_confirms_that_it_does_not_run(
    new_world: NewWorld, seen: PodSnapshot | None, word: str
) -> None:
    world = await new_world(lease())
    world.pods.errors["p1"] = [RequestError("404")]
    world.pods.seen["p1"] = seen

    (failed,) = await world.bind_all(lease())

    assert isinstance(failed, BindingFailed)
    assert word in failed.reason
    assert (await world.leases())[POD].state is LeaseState.BOUND
    assert list(await world.ledger.list_vanished()) == [POD]


async def test_a_binding_that_did_not_happen_is_sent_again_with_the_next_delivery(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease())
    world.pods.errors["p1"] = [UnavailableError("503")]
    world.pods.seen["p1"] = UNBOUND

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError):
            await world.binder.pods.bind_pods(chosen(lease()))
        world.pods.seen["p1"] = None
        events = await world.binder.pods.bind_pods(chosen(lease()))

    assert len(world.pods.bindings) == 2
    assert [type(event) for event in events] == [PodBound]


async def test_leases_stay_while_the_api_server_is_unavailable(new_world: NewWorld) -> None:
    world = await new_world(lease())
    world.pods.away = True

    with pytest.raises(UnavailableError, match="1 of 1"):
        await world.bind_all(lease())

    assert (await world.leases())[POD].state is LeaseState.BOUND


async def test_a_hanging_binding_blocks_no_other_and_is_not_sent_twice(new_world: NewWorld) -> None:
    world = await new_world(lease("slow"), lease("quick"), batch_wait_s=0.05)
    world.pods.hanging["slow"] = asyncio.Event()
    batch = chosen(lease("slow"), lease("quick"))

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError):
            await world.binder.pods.bind_pods(batch)
        early = [event.lease.name for event in world.bus.published if isinstance(event, PodBound)]
        world.pods.hanging["slow"].set()
        events = await world.binder.pods.bind_pods(batch)

    assert early == ["quick"]
    assert len(events) == 2
    assert sorted(name for name, _, _ in world.pods.bindings) == ["quick", "slow"]


async def test_an_active_lease_needs_no_binding(new_world: NewWorld) -> None:
    world = await new_world(structs.replace(lease(), state=LeaseState.ACTIVE))

    assert [type(event) for event in await world.bind_all(lease())] == [PodBound]
    assert not world.pods.bindings


async def test_bindings_in_flight_when_the_sender_stops_are_unknown_not_lost(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease())
    world.pods.hanging["p1"] = asyncio.Event()

    async with running(world.binder.sender.send_bindings):
        waiting = asyncio.create_task(world.binder.pods.bind_pods(chosen(lease())))
        await until(lambda: world.pods.bindings)

    with pytest.raises(UnavailableError):
        await waiting
