"""The steps of a resize: their order, and what a binder that died leaves to do."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.resize import resizer
from services.binder.resize.resizer import resized_annotations
from shared.model.events.pod_events import LeaseChanged, LeaseResized
from shared.model.events.request_reply import ResizeReply, ResizeRequest
from shared.model.leases.lease import (
    Lease,
    LeaseState,
    ShareSize,
    StaleLeaseError,
    WaitingSize,
)
from shared.model.leases.lease_copy import load_lease
from shared.model.leases.ledger import NoCapacity
from shared.model.names import PodUid
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.world import NewWorld, World, lease, running
from tests.support.waiting import until

WAS = ShareSize(memory_mib=1_000, cores_percent=10)
HELD = lease(state=LeaseState.ACTIVE, dialect="volcano-vgpu", version=3)
UID = HELD.pod


@pytest.fixture
async def at(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> World:
    """A pod with a lease, and with annotations of others."""
    monkeypatch.setattr(resizer, "ABANDONED_S", 0.0)
    made = await new_world(HELD)
    made.pods.seen["p1"] = PodSnapshot(
        UID, HELD.node, resource_version="7", annotations={"of": "others"}
    )
    return made


async def resize(at: World, mib: int | None = None, cores: int | None = None) -> ResizeReply:
    requested = ResizeRequest(pod=UID, memory_mib=mib, cores_percent=cores)
    return await at.binder.resizer.resize(requested)


async def sized(at: World, mib: int, cores: int = 10) -> Lease:
    """Write another size into the ledger, as a binder that dies then."""
    [current] = [each for each in (await at.leases()).values() if each.pod == UID]
    shares = (structs.replace(current.shares[0], memory_mib=mib, cores_percent=cores),)
    written = await at.ledger.resizes.apply(structs.replace(current, shares=shares))
    assert isinstance(written, Lease)
    return written


def before_resize(at: World, act: Callable[[], Awaitable[object]]) -> None:
    """Do something once, before the ledger is written."""
    resizes = at.ledger.resizes
    apply = resizes.apply

    async def hooked(lease: Lease, *, token: str = "") -> Lease | NoCapacity | StaleLeaseError:
        resizes.apply = apply  # type: ignore[method-assign]
        await act()
        return await apply(lease, token=token)

    resizes.apply = hooked  # type: ignore[method-assign]


def seen(at: World) -> PodSnapshot:
    found = at.pods.seen["p1"]
    assert found is not None
    return found


def annotated(at: World) -> Lease:
    return load_lease(seen(at).lease, namespace=HELD.namespace, name="p1")


async def unsynced(at: World) -> list[PodUid]:
    return await at.ledger.resizes.unsynced(older_than_s=0.0)


async def is_locked(at: World) -> bool:
    token = await at.ledger.resizes.lock(UID, ttl_s=10)
    if token is not None:
        await at.ledger.resizes.unlock(UID, token)
    return token is None


def requests(at: World) -> list[tuple[bool, bool]]:
    """Of each request to the agent: whether it is a proposal, and whether that is finished."""
    return [(bool(each.resize_id), each.finished) for each in at.agents.limits]


async def test_growing_updates_the_ledger_then_the_pod_then_the_node(at: World) -> None:
    before: list[int] = []

    async def note() -> None:
        before.append(len(at.agents.limits))

    at.pods.before_annotate = note

    reply = await resize(at, 2_000)

    now = (await at.leases())[UID]
    assert reply == ResizeReply(
        outcome="resized",
        container="c",
        node="n1",
        devices=(0,),
        before=WAS,
        after=ShareSize(memory_mib=2_000, cores_percent=10),
    )
    assert [(each.lease, each.resize_id) for each in at.agents.limits] == [(now, "")]
    assert before == [0], "a rebuild restores no more than what the pod's copy says"
    assert at.bus.published == [
        LeaseChanged(lease=now),
        LeaseResized(lease=now, container="c", before=WAS, after=replace(WAS, memory_mib=2_000)),
    ]
    assert annotated(at).shares == now.shares
    assert seen(at).annotations["of"] == "others"
    assert "GPU-n1-0,NVIDIA,2000,10:" in str(seen(at).annotations)
    assert not await unsynced(at)
    assert at.metrics.resizes == {"resized": 1}


async def test_shrinking_updates_the_node_before_the_ledger(at: World) -> None:
    seen: list[list[tuple[bool, bool]]] = []

    async def note() -> None:
        seen.append(requests(at))

    before_resize(at, note)

    assert (await resize(at, 500)).outcome == "resized"
    assert seen == [[(True, False)]]
    assert requests(at) == [(True, False), (False, False)]
    assert not await is_locked(at)


async def test_less_than_the_memory_in_use_is_refused_with_the_figure(at: World) -> None:
    at.agents.in_use_mib = 800

    reply = await resize(at, 500)

    assert (reply.outcome, reply.reason) == ("refused", "800 MiB are in use")
    assert "--memory 800Mi" in reply.hint
    assert (await at.leases())[UID].shares == HELD.shares
    assert not await is_locked(at)
    assert (await resize(at, 800)).outcome == "resized"


@pytest.fixture
async def held_by_driver(at: World) -> World:
    """The same, whose memory the driver holds, and which uses 800 MiB."""
    await at.ledger.release([UID], reason="it is restored with another share")
    share = structs.replace(HELD.shares[0], memory="driver", mode="driver")
    await at.restore(structs.replace(HELD, shares=(share,), version=HELD.version + 9))
    at.agents.in_use_mib = 800
    return at


async def test_a_smaller_size_than_the_driver_can_set_waits_until_less_is_in_use(
    held_by_driver: World,
) -> None:
    at = held_by_driver

    waits = await resize(at, 500)

    waiting = (await at.leases())[UID]
    assert (waits.outcome, waits.reason) == ("waiting", "800 MiB are in use")
    assert (waits.before, waits.after) == (WAS, WAS)
    assert waiting.shares[0].memory_mib == 1_000
    assert waiting.waiting_size == WaitingSize(
        container="c", memory_mib=500, cores_percent=10, since=at.clock.now()
    )
    assert annotated(at).waiting_size == waiting.waiting_size, "a rebuild of the ledger has it"
    assert not await is_locked(at)
    assert (await resize(at, 500)).outcome == "waiting"
    assert (await at.leases())[UID].version == waiting.version
    async with running(at.binder.events.write_events):
        await until(lambda: at.pods.events)
    (event,) = at.pods.events.values()
    assert event["reason"] == "ResizeWaiting"
    assert "1000 to 500 MiB" in event["message"]
    assert "300 MiB less are in use" in event["message"]

    for _ in range(9):
        at.clock.advance(20)
        await at.binder.resizer.finish_resizes()
    assert (await at.leases())[UID].version == waiting.version, "a try that fails writes nothing"
    at.agents.in_use_mib = 500
    at.clock.advance(resizer.MAX_WAITING_RETRY_S + 0.1)
    await at.binder.resizer.finish_resizes()

    resized = (await at.leases())[UID]
    assert (resized.shares[0].memory_mib, resized.waiting_size) == (500, None)
    assert annotated(at).shares == resized.shares
    assert annotated(at).waiting_size is None
    await at.binder.resizer.finish_resizes()
    assert not await unsynced(at)


async def test_a_smaller_size_that_the_driver_ignores_waits_although_little_is_in_use(
    held_by_driver: World,
) -> None:
    at = held_by_driver
    at.agents.in_use_mib = 0
    at.agents.keeps_limits = True

    waits = await resize(at, 500)

    assert (waits.outcome, waits.reason) == ("waiting", "the driver keeps it")
    async with running(at.binder.events.write_events):
        await until(lambda: at.pods.events)
    (event,) = at.pods.events.values()
    assert "waits until the driver sets it" in event["message"]
    at.agents.keeps_limits = False
    at.clock.advance(resizer.MAX_WAITING_RETRY_S + 0.1)
    await at.binder.resizer.finish_resizes()
    assert (await at.leases())[UID].shares[0].memory_mib == 500


async def test_a_resize_to_the_present_size_withdraws_a_waiting_one(
    held_by_driver: World,
) -> None:
    at = held_by_driver
    await resize(at, 500)

    reply = await resize(at, 1_000)

    assert reply.outcome == "resized"
    assert reply.notes == ("it does not wait for 500 MiB any more",)
    assert (await at.leases())[UID].waiting_size is None
    assert not await unsynced(at)
    assert not any(isinstance(event, LeaseResized) for event in at.bus.published)


async def test_another_binder_goes_on_with_a_waiting_size(held_by_driver: World) -> None:
    at = held_by_driver
    await resize(at, 500)
    at.binder.resizer._retries.clear()
    at.agents.in_use_mib = 0

    await at.binder.resizer.finish_resizes()

    assert (await at.leases())[UID].shares[0].memory_mib == 500


async def test_a_lease_does_not_shrink_while_its_agent_is_silent(at: World) -> None:
    at.agents.away.add(HELD.node)

    reply = await resize(at, 500)

    assert reply.outcome == "unavailable"
    assert "only the agent knows how much is in use" in reply.reason
    assert (await at.leases())[UID].shares == HELD.shares
    assert not await is_locked(at)


async def test_limits_are_restored_on_the_node_where_the_ledger_has_no_capacity(at: World) -> None:
    other = lease("p2", state=LeaseState.BOUND)
    share = structs.replace(other.shares[0], cores_percent=80)
    before_resize(at, lambda: at.restore(structs.replace(other, shares=(share,))))

    reply = await resize(at, 500, 95)

    assert reply.outcome == "refused"
    assert requests(at) == [(True, False), (True, True)]
    assert not await is_locked(at)


async def test_a_lease_that_moves_on_meanwhile_is_decided_on_afresh(at: World) -> None:
    before_resize(at, lambda: sized(at, 1_500))

    assert (await resize(at, 2_000)).outcome == "resized"
    assert (await at.leases())[UID].shares[0].memory_mib == 2_000


async def test_a_limit_is_not_raised_before_the_copy_of_the_lease_is_written(at: World) -> None:
    at.pods.conflicts = 100

    reply = await resize(at, 2_000)

    assert (reply.outcome, len(reply.pending)) == ("resized", 1)
    assert "annotations, and then the container's limits" in reply.pending[0]
    assert not at.agents.limits
    assert await unsynced(at)


async def test_a_second_resize_must_wait_for_the_first(at: World) -> None:
    await at.ledger.resizes.lock(UID, ttl_s=60)

    reply = await resize(at, 500)

    assert (reply.outcome, reply.reason) == ("unavailable", "another resize of it is in progress")
    assert not at.agents.limits


async def test_a_repeated_request_changes_nothing_and_finishes_the_first(at: World) -> None:
    at.agents.away.add(HELD.node)
    first = await resize(at, 2_000)
    at.agents.away.clear()

    second = await resize(at, 2_000)

    assert first.outcome == "resized"
    assert first.pending == ("the container's limits, as soon as the agent of node n1 responds",)
    assert (second.outcome, second.pending) == ("unchanged", ())
    assert annotated(at).shares[0].memory_mib == 2_000
    assert not await unsynced(at)
    assert sum(isinstance(event, LeaseResized) for event in at.bus.published) == 1


async def test_a_resize_of_a_dead_binder_is_finished_by_another(at: World) -> None:
    now = await sized(at, 2_000)

    await at.binder.resizer.finish_resizes()

    assert not await unsynced(at)
    assert at.agents.limits[-1].lease == now
    assert annotated(at).shares == now.shares


async def test_an_unavailable_node_is_retried_with_pauses(at: World) -> None:
    at.agents.away.add(HELD.node)
    await sized(at, 2_000)
    for _ in range(5):
        await at.binder.resizer.finish_resizes()
    requested = len(at.agents.limits)
    at.clock.advance(1.1)
    await at.binder.resizer.finish_resizes()
    again = len(at.agents.limits)
    at.agents.away.clear()
    at.clock.advance(60)
    await at.binder.resizer.finish_resizes()

    assert (requested, again) == (1, 2)
    assert not await unsynced(at)


async def test_a_size_that_the_device_cannot_hold_is_taken_back(at: World) -> None:
    """The ledger has lost the lease of another pod there, and gave its memory out again."""
    await sized(at, 9_000, 40)
    at.agents.kept = WAS

    await at.binder.resizer.finish_resizes()

    [share] = (await at.leases())[UID].shares
    assert ShareSize(memory_mib=share.memory_mib, cores_percent=share.cores_percent) == WAS
    assert at.agents.limits[1].resize_id, "the agent holds it meanwhile"
    assert not await unsynced(at)


async def test_a_resize_of_a_terminated_pod_leaves_nothing_to_do(at: World) -> None:
    await sized(at, 2_000)
    await at.ledger.release([UID], reason="the pod has terminated")

    await at.binder.resizer.finish_resizes()

    assert not await unsynced(at)
    assert not at.agents.limits


async def test_annotations_carry_the_newest_lease_and_are_written_once(at: World) -> None:
    at.pods.conflicts = 3
    await resize(at, 2_000)
    writes = at.pods.writes
    await resize(at, 2_000)

    assert (writes, at.pods.writes) == (1, 1)
    assert annotated(at).shares[0].memory_mib == 2_000


@pytest.mark.parametrize("moment", ["before_read", "before_annotate"])
async def test_of_two_concurrent_annotations_the_newer_lease_stays(at: World, moment: str) -> None:
    async def another_is_faster() -> None:
        setattr(at.pods, moment, nothing)
        at.pods.seen["p1"] = replace(
            seen(at),
            resource_version="8",
            annotations=resized_annotations(await sized(at, 3_000)),
        )

    async def nothing() -> None: ...

    setattr(at.pods, moment, another_is_faster)

    await resize(at, 2_000)

    assert annotated(at).shares[0].memory_mib == 3_000
    assert at.pods.writes == 0


async def test_a_later_pod_of_the_same_name_is_not_annotated(at: World) -> None:
    at.pods.seen["p1"] = replace(seen(at), pod=PodUid("uid-of-another"))

    assert (await resize(at, 2_000)).outcome == "resized"
    assert at.pods.writes == 0


async def test_hami_core_13_the_reply_states_that_new_cores_apply_to_new_processes(
    at: World,
) -> None:
    assert (await resize(at, cores=30)).notes == (
        "cores: running processes keep their cap of 10 % until they restart; processes that start "
        "now get 30 %",
    )


async def test_a_resize_is_an_event_of_the_pod(at: World) -> None:
    await resize(at, 2_000, 20)

    async with running(at.binder.events.write_events):
        await until(lambda: at.pods.events)

    (event,) = at.pods.events.values()
    assert (event["reason"], event["type"]) == ("LeaseResized", "Normal")
    assert event["message"] == (
        "container c: 1000 to 2000 MiB, 10 % to 20 % of its cores of GPU 0 of node n1"
    )
