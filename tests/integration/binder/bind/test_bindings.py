"""The binder binds each placement once, and releases the leases of pods it cannot bind."""

import asyncio

import pytest
from msgspec import structs

from services.binder.observations import PodSnapshot
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.pod_events import BindingFailed, LeaseChanged, PodBound
from shared.model.lease import LeaseState
from shared.model.lease_copy import ANNOTATION, load_lease
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.binder.world import NewWorld, chosen, lease, running
from tests.support.waiting import until

POD, N1, N2 = lease().pod, NodeName("n1"), NodeName("n2")
UNBOUND, BOUND = PodSnapshot(POD, None), PodSnapshot(POD, N1)


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


async def test_an_expired_lease_is_not_bound_and_its_binding_fails(new_world: NewWorld) -> None:
    world = await new_world()

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
    world.pods.errors["p1"], world.pods.seen["p1"] = [error], BOUND

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
    world.pods.errors["p1"], world.pods.seen["p1"] = [error], seen

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
    world.pods.errors["p1"], world.pods.seen["p1"] = [RequestError("404")], seen

    (failed,) = await world.bind_all(lease())

    assert isinstance(failed, BindingFailed)
    assert word in failed.reason
    assert (await world.leases())[POD].state is LeaseState.BOUND
    assert list(await world.ledger.list_vanished()) == [POD]


async def test_a_binding_that_did_not_happen_is_sent_again_with_the_next_delivery(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease())
    world.pods.errors["p1"], world.pods.seen["p1"] = [UnavailableError("503")], UNBOUND

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
