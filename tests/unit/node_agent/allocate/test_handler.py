"""The kubelet's calls, with a fake kubelet and fake leases."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from services.node_agent.allocate.handler import LEASE_WAIT_S, ROOM_S
from services.node_agent.allocate.patience import PAUSE_S
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import Lease, LeaseState, MigPlacement
from shared.model.names import DeviceUuid, PodUid
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.allocation_handler import (
    OTHER,
    SIGHT_S,
    SLOT,
    HandlerWorld,
    container,
)
from tests.support.waiting import until


@pytest.fixture
async def world(tmp_path: Path) -> HandlerWorld:
    return await HandlerWorld(tmp_path).open()


async def test_allocate_fails_with_the_error_of_the_pod_resources_api(
    world: HandlerWorld,
) -> None:
    world.add_leased("a", share(0, 1000))
    world.kubelet.error = "PodResources: no answer within 10 s"

    with pytest.raises(UnavailableError, match="no answer within 10 s"):
        await world.allocate()


async def later(world: HandlerWorld, change: Callable[[], None]) -> None:
    """Change something while a call waits for much longer than for what can be seen."""
    await world.node.clock.sleep(ROOM_S + LEASE_WAIT_S)
    change()


async def test_allocate_waits_for_pod_resources_that_do_not_respond(world: HandlerWorld) -> None:
    world.add_leased("a", share(0, 1000))
    world.kubelet.error = "PodResources: no answer within 10 s"

    async with asyncio.TaskGroup() as group:
        group.create_task(world.allocate())
        await later(world, lambda: setattr(world.kubelet, "error", ""))

    assert world.allocated == ["uid-a"]


@pytest.mark.parametrize("prefers", [True, False])
async def test_the_calls_wait_for_a_binder_that_does_not_respond(
    world: HandlerWorld, *, prefers: bool
) -> None:
    world.add_leased("a", share(0, 1000))
    world.ledger.unavailable = True

    async def prefer() -> object:
        return await world.handler.get_preferred_allocation(NUMBER, [SLOT], [], 1)

    async with asyncio.TaskGroup() as group:
        call = group.create_task(prefer() if prefers else world.allocate())
        await later(world, lambda: setattr(world.ledger, "unavailable", False))

    assert call.result()


async def test_calls_that_follow_one_another_wait_only_once_and_say_what_is_not_seen(
    world: HandlerWorld,
) -> None:
    world.ledger.unavailable = True
    ticks = world.node.clock.ticks
    waited = []
    for name in ("a", "b"):
        world.add_leased(name, share(0, 1000))
        began = ticks()
        unseen = rf"no reply within .* whether pod default/{name}"
        with pytest.raises(UnavailableError, match=unseen):
            await world.allocate()
        waited.append(ticks() - began)

    assert waited[0] > SIGHT_S - 1
    assert waited[1] < SIGHT_S / 2
    assert world.effects.calls.count("unavailable") == 2


async def test_a_full_device_is_given_out_again_although_an_old_list_shows_its_last_pod(
    world: HandlerWorld,
) -> None:
    ended = world.add_leased("a", share(0, 10_000, slot=0))
    await world.allocate()
    world.kubelet.pods = [replace(ended, phase="Running")]
    del world.ledger.leases[ended.uid]
    world.add_leased("b", share(0, 10_000, slot=1, fence=2))

    await world.allocate(f"{SLOT[:-1]}1")

    assert world.allocated == ["uid-b"]


async def test_an_ended_pod_that_an_old_list_shows_as_pending_is_no_candidate(
    world: HandlerWorld,
) -> None:
    ended = world.add_leased("a", share(0, 10_000, slot=0))
    await world.allocate()
    del world.ledger.leases[ended.uid]
    await world.node.lease_sync.sync()
    await world.grants.reconciler.forget_ended()
    world.add_leased("b", share(0, 10_000, slot=1, fence=2))

    await world.allocate(f"{SLOT[:-1]}1")

    assert world.allocated == ["uid-b"]


async def test_a_pod_that_an_empty_list_lacks_is_known_by_its_lease(world: HandlerWorld) -> None:
    world.add_leased("a", share(0, 1000))
    world.kubelet.pods.clear()
    world.kubelet.active = frozenset({("default", "a")})

    await world.allocate()

    assert world.allocated == ["uid-a"]


async def test_a_pod_gets_nothing_of_its_namesake_that_an_old_list_has_instead(
    world: HandlerWorld,
) -> None:
    """A pod was deleted by force and made again: the list does not have the new one yet."""
    world.add_leased("a", share(0, 1000))
    await world.allocate()
    world.kubelet.active = frozenset({("default", "a")})
    again = lease_of("uid-again", share(1, 2000, fence=2), name="a")
    world.ledger.grant(again)

    preferred = await world.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)
    await world.allocate(*preferred)

    assert (preferred, world.allocated) == ([OTHER], ["uid-a", "uid-again"])


async def refuse_first(world: HandlerWorld) -> None:
    """Refuse pod `a`, which the kubelet's old list shows as pending from now on."""
    world.add_leased("a", share(1, 1000))
    with pytest.raises(RequestError, match="the lease is for 1 of"):
        await world.allocate()


@pytest.mark.parametrize(
    ("active", "has_restarted"), [("b", False), ("ab", False), ("b", True)], ids=str
)
async def test_a_pod_gets_nothing_of_a_failed_one_that_an_old_list_has_instead(
    world: HandlerWorld, active: str, *, has_restarted: bool
) -> None:
    """Kubelets before 1.34 list failed pods as active."""
    await refuse_first(world)
    world.kubelet.active = frozenset(("default", name) for name in active)
    if has_restarted:
        world.node.refused.clear()
    world.lease("b", share(0, 2000))

    preferred = await world.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)
    await world.allocate(*preferred)

    assert (preferred, world.allocated) == ([SLOT], ["uid-b"])


async def test_a_pod_does_not_count_as_a_failed_one_while_no_binder_replies(
    world: HandlerWorld,
) -> None:
    await refuse_first(world)
    await world.node.clock.sleep(PAUSE_S + 1)
    world.kubelet.active = frozenset({("default", "a"), ("default", "b")})
    world.lease("b", share(0, 2000))
    world.ledger.unavailable = True

    async with asyncio.TaskGroup() as group:
        group.create_task(world.allocate())
        await later(world, lambda: setattr(world.ledger, "unavailable", False))

    assert world.allocated == ["uid-b"]


async def test_a_bound_pod_in_no_list_waits_for_a_lease_that_is_reserved_after_a_rollback(
    world: HandlerWorld,
) -> None:
    await refuse_first(world)
    world.kubelet.active = frozenset({("default", "a"), ("default", "b")})
    reserved = world.lease("b", share(0, 2000), state=LeaseState.RESERVED)

    def commit() -> None:
        world.ledger.grant(structs.replace(reserved, state=LeaseState.BOUND, version=9))

    async with asyncio.TaskGroup() as group:
        group.create_task(world.allocate())
        await later(world, commit)

    assert world.allocated == ["uid-b"]


async def test_a_lease_that_stays_reserved_is_named(world: HandlerWorld) -> None:
    world.kubelet.active = frozenset({("default", "a")})
    world.lease("a", share(0, 2000), state=LeaseState.RESERVED)

    with pytest.raises(UnavailableError, match="lease of pod default/a is only reserved"):
        await world.allocate()

    assert world.allocated == []


async def test_a_device_whose_holder_is_not_seen_to_run_or_to_have_ended_is_waited_for(
    world: HandlerWorld,
) -> None:
    ended = world.add_leased("a", share(0, 10_000, slot=0))
    began = world.node.clock.ticks()
    await world.allocate()
    world.kubelet.pods = []
    world.kubelet.blind = "processes of pods are not visible"
    del world.ledger.leases[ended.uid]
    world.add_leased("b", share(0, 10_000, slot=1, fence=2))

    unseen = "cannot be seen: pod default/a: processes of pods are not visible"
    with pytest.raises(UnavailableError, match=unseen):
        await world.allocate(f"{SLOT[:-1]}1")
    assert world.node.clock.ticks() - began > SIGHT_S - 1
    assert "over-committed" not in world.effects.calls

    await world.node.clock.sleep(PAUSE_S + 1)
    async with asyncio.TaskGroup() as group:
        group.create_task(world.allocate(f"{SLOT[:-1]}1"))
        await later(world, lambda: setattr(world.kubelet, "blind", ""))
    assert world.allocated == ["uid-b"]


async def test_a_device_whose_holder_runs_is_refused_at_once_however_blind_the_agent_is(
    world: HandlerWorld,
) -> None:
    held = world.add_leased("a", share(0, 10_000, slot=0))
    await world.allocate()
    world.kubelet.pods = []
    world.kubelet.processes = {held.uid: frozenset({"c"})}
    world.kubelet.is_passing = True
    world.kubelet.unreadable_reason = "the API server is away"
    del world.ledger.leases[held.uid]
    world.add_leased("b", share(0, 10_000, slot=1, fence=2))
    began = world.node.clock.ticks()

    with pytest.raises(RequestError, match="over-committed"):
        await world.allocate(f"{SLOT[:-1]}1")

    assert world.node.clock.ticks() - began < SIGHT_S / 2
    assert world.allocated == ["uid-a"]


async def test_equal_pods_are_told_apart_once_the_list_can_be_read_again(
    world: HandlerWorld,
) -> None:
    first, second = (world.add_leased(name, share(0, 1000, slot=n)) for n, name in enumerate("ab"))
    world.kubelet.is_passing = True
    world.kubelet.unreadable_reason = "the API server is away"

    def readable() -> None:
        world.kubelet.is_passing = False
        world.kubelet.unreadable_reason = ""
        world.kubelet.pods.remove(second)

    async with asyncio.TaskGroup() as group:
        preferred = group.create_task(
            world.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)
        )
        await later(world, readable)

    assert preferred.result() == [SLOT]
    await world.allocate()
    assert world.allocated == [first.uid]


async def test_a_call_that_the_kubelet_cancels_does_not_count_as_refused(
    world: HandlerWorld,
) -> None:
    for name in ("a", "b"):
        world.add_leased(name, share(0, 1000))

    call = asyncio.create_task(world.allocate())
    await until(lambda: world.kubelet.list_calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert world.effects.calls == ["cancelled"]


async def test_equal_pods_are_listed_again_and_then_refused_by_name(world: HandlerWorld) -> None:
    world.kubelet.unreadable_reason = "the kubelet's list of pods cannot be read"
    for name in ("a", "b"):
        world.add_leased(name, share(0, 1000))

    assert await world.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1) == []
    assert world.kubelet.list_calls == 1
    found = r"2 containers are possible \(default/a, container main; default/b, .* cannot be read"
    with pytest.raises(RequestError, match=found):
        await world.allocate()

    assert (await world.refusal()).pod is None, "no lease is refused for a guess"
    assert world.kubelet.list_calls > 2
    assert world.allocated == []


async def test_38_a_device_mismatch_is_refused_published_and_annotated(
    world: HandlerWorld,
) -> None:
    world.add_leased("a", share(1, 1000))

    with pytest.raises(RequestError, match="the lease is for 1 of"):
        await world.allocate()

    assert (await world.refusal()).pod == "uid-a"
    assert world.effects.calls == ["shown as failed", "refused"]
    assert not world.checkpoint.starts_due(0.0)


async def test_allocate_refuses_to_overcommit_a_device_whatever_the_lease(
    world: HandlerWorld,
) -> None:
    world.add_leased("a", share(0, 10_000, slot=0))
    await world.allocate()
    world.add_holding("a", "main", SLOT)
    await world.node.outbox.take()

    world.add_leased("b", share(0, 10_000, slot=1, fence=2))
    with pytest.raises(RequestError, match="over-committed") as refused:
        await world.allocate(f"{SLOT[:-1]}1")

    assert "default/a" in str(refused.value)
    assert "default/b" in str(refused.value)
    assert (await world.refusal()).pod == "uid-b"
    assert world.allocated == ["uid-a"]
    assert "over-committed" in world.effects.calls


@pytest.mark.parametrize("phase", ["", "Succeeded"])
async def test_a_pod_that_has_just_ended_does_not_count_against_the_device(
    world: HandlerWorld, phase: str
) -> None:
    ended = world.add_leased("a", share(0, 10_000, slot=0))
    await world.allocate()
    world.kubelet.pods = [replace(ended, phase=phase)] if phase else []
    if phase:
        world.add_holding("a", "main", SLOT)
    del world.ledger.leases[ended.uid]

    world.add_leased("b", share(0, 10_000, slot=1, fence=2))
    await world.allocate(f"{SLOT[:-1]}1")

    assert world.allocated == ["uid-b"]


async def test_a_pod_that_has_just_ended_is_forgotten_while_no_binder_replies(
    world: HandlerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_reply(*_: object, timeout_s: float) -> None:
        await world.node.clock.sleep(timeout_s)
        raise UnavailableError("the ledger is being rebuilt")

    ended = world.add_leased("a", share(0, 10_000, slot=0))
    await world.allocate()
    world.kubelet.pods = []
    world.node.leases.end([ended.uid])
    world.add("b")
    world.node.leases.observe([world.lease("b", share(0, 1_000, slot=0, fence=2))])
    monkeypatch.setattr(type(world.ledger), "request", no_reply)

    await world.allocate()

    assert world.allocated == ["uid-b"]


async def test_allocate_waits_for_the_rebuild_of_a_lost_checkpoint(
    world: HandlerWorld,
) -> None:
    world.checkpoint.lost = True
    world.add_leased("a", share(0, 1000))

    with pytest.raises(UnavailableError, match="has lost its records"):
        await world.allocate()
    assert world.allocated == []

    world.checkpoint.lost = False
    await world.allocate()


async def test_a_pod_bound_with_an_earlier_lease_gets_what_that_one_says(
    world: HandlerWorld,
) -> None:
    pod = world.add_leased("a", share(0, 1000))
    earlier = world.ledger.leases[pod.uid]
    later = share(1, 1000)
    world.node.leases.observe([world.lease("a", later, created_at=earlier.created_at + 9)])
    world.kubelet.pods = [replace(pod, leased_at=earlier.created_at)]

    allocating = asyncio.create_task(world.allocate())
    while not world.ledger.requests:
        await asyncio.sleep(0)
    world.ledger.grant(structs.replace(earlier, version=9))
    await allocating

    [given] = world.node.checkpoint.allocations
    assert given.lease.shares == earlier.shares


async def test_a_pod_whose_own_lease_does_not_come_back_is_refused(world: HandlerWorld) -> None:
    pod = world.add_leased("a", share(0, 1000))
    world.kubelet.pods = [replace(pod, leased_at=1.0)]

    with pytest.raises(RequestError, match="was bound with another lease than"):
        await world.allocate()
    assert world.allocated == []


async def test_27_a_start_is_refused_when_another_container_holds_the_devices(
    world: HandlerWorld,
) -> None:
    world.add_leased("a", share(0, 1000))
    await world.allocate()
    assert world.checkpoint.starts_due(time.time())

    world.add_holding("b", "main", SLOT)
    with pytest.raises(RequestError, match=r"with default/b/main, .* allocated to default/a/main"):
        await world.handler.pre_start_container(NUMBER, [SLOT])

    world.kubelet.holdings.clear()
    with pytest.raises(RequestError, match="with no container"):
        await world.handler.pre_start_container(NUMBER, [SLOT])

    with pytest.raises(RequestError, match=r"with no container, .* allocated to no container"):
        await world.handler.pre_start_container(NUMBER, [OTHER])

    world.add_holding("a", "main", SLOT)
    before = time.time()
    await world.handler.pre_start_container(NUMBER, [SLOT])
    assert world.effects.calls[-1] == "prepared for a start"
    assert world.checkpoint.started_since(before) == {"uid-a"}
    await world.checkpoint.forget({PodUid("uid-a")})
    assert world.checkpoint.started_since(before) == set()


async def test_27_an_init_container_starts_without_being_listed_by_pod_resources(
    world: HandlerWorld,
) -> None:
    world.add("a", container("first", init=True), container())
    world.lease("a", share(0, 1000, container="first", init=True), share(0, 1000, fence=2))
    await world.allocate()

    await world.handler.pre_start_container(NUMBER, [SLOT])

    assert world.checkpoint.allocations[0].container == "first"


async def test_a_call_that_waits_for_mig_instances_does_not_hold_up_others(
    world: HandlerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.Event()
    laid_out = asyncio.Event()

    async def partition(lease: Lease, container: str) -> dict[tuple[DeviceUuid, int], str]:
        waiting.set()
        await laid_out.wait()
        raise RequestError("the layout does not fit")

    monkeypatch.setattr(world.effects, "instance_uuids", partition)
    world.add("a")
    placed = MigPlacement(layout="all-1g", position=0, profile="1g.10gb")
    world.lease("a", structs.replace(share(0, 1000), mig=placed))
    first = asyncio.create_task(world.allocate())
    await waiting.wait()
    world.add_leased("b", share(1, 1000))

    async with asyncio.timeout(10):
        setup = await world.allocate(OTHER)

    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    assert not first.done()
    laid_out.set()
    with pytest.raises(RequestError, match="does not fit"):
        await first
    assert world.allocated == ["uid-b"]
