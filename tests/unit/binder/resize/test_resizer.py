"""The steps of a resize: their order, and what a binder that died leaves to do."""

from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.observations import PodAnnotations
from services.binder.resize.resizer import resized_annotations
from shared.model.device import DeviceUse
from shared.model.events.pod_events import LeaseChanged, LeaseResized
from shared.model.events.request_reply import ResizeReply, ResizeRequest
from shared.model.lease import Lease, LeaseState, ShareSize
from shared.model.lease_copy import ANNOTATION, load_lease
from shared.model.ledger import NoCapacity
from shared.model.names import DeviceUuid, PodUid
from tests.support.binder.world import World, lease, running
from tests.support.build import device
from tests.support.waiting import until

WAS = ShareSize(memory_mib=1_000, cores_percent=10)


def held() -> Lease:
    return lease(state=LeaseState.ACTIVE, dialect="volcano-vgpu", version=3)


def world(*leases: Lease) -> World:
    made = World(*(leases or (held(),)))
    made.ledger.cards = (device("GPU-n1-0", 0),)
    made.pods.annotated["p1"] = PodAnnotations(
        uid=PodUid("uid-p1"), resource_version="7", annotations={"of": "others"}
    )
    return made


async def resize(at: World, mib: int | None = None, cores: int | None = None) -> ResizeReply:
    requested = ResizeRequest(pod=PodUid("uid-p1"), memory_mib=mib, cores_percent=cores)
    return await at.binder.resize(requested)


def annotated(at: World) -> Lease:
    text = at.pods.annotated["p1"].annotations[ANNOTATION]
    return load_lease(text, namespace=held().namespace, name="p1")


async def test_growing_updates_the_ledger_then_the_pod_then_the_node() -> None:
    at = world()
    before: list[int] = []
    at.pods.before_annotate = lambda: before.append(len(at.agents.limits))

    reply = await resize(at, 2_000)

    now = at.ledger.leases[PodUid("uid-p1")]
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
    assert at.pods.annotated["p1"].annotations["of"] == "others"
    assert "GPU-n1-0,NVIDIA,2000,10:" in str(at.pods.annotated["p1"].annotations)
    assert not at.ledger.unsynced_versions
    assert at.metrics.resizes == ["resized"]


async def test_shrinking_updates_the_node_before_the_ledger() -> None:
    at = world()
    seen: list[list[str]] = []
    at.ledger.before_resize = lambda: seen.append([each.resize_id for each in at.agents.limits])

    reply = await resize(at, 500)

    assert reply.outcome == "resized"
    assert seen == [["lock of uid-p1"]]
    assert [each.resize_id for each in at.agents.limits] == ["lock of uid-p1", ""]
    assert not at.ledger.locks


async def test_less_than_the_memory_in_use_is_refused_with_the_figure() -> None:
    at = world()
    at.agents.in_use_mib = 800

    reply = await resize(at, 500)

    assert (reply.outcome, reply.reason) == ("refused", "800 MiB are in use")
    assert "--memory 800Mi" in reply.hint
    assert at.ledger.leases[PodUid("uid-p1")] == held()
    assert not at.ledger.locks
    assert (await resize(at, 800)).outcome == "resized"


async def test_a_lease_does_not_shrink_while_its_agent_is_silent() -> None:
    at = world()
    at.agents.away.add(held().node)

    reply = await resize(at, 500)

    assert reply.outcome == "unavailable"
    assert "only the agent knows how much is in use" in reply.reason
    assert at.ledger.leases[PodUid("uid-p1")] == held()
    assert not at.ledger.locks


async def test_limits_are_restored_on_the_node_where_the_ledger_has_no_capacity() -> None:
    at = world()
    taken = {DeviceUuid("GPU-n1-0"): DeviceUse(memory_mib=1_000, cores_percent=10)}
    at.ledger.full = NoCapacity(pod=held().pod, reason="cores of GPU-n1-0", devices=taken)

    reply = await resize(at, 500, 95)

    assert reply.outcome == "refused"
    assert [(each.resize_id, each.finished) for each in at.agents.limits] == [
        ("lock of uid-p1", False),
        ("lock of uid-p1", True),
    ]
    assert not at.ledger.locks


async def test_a_lease_that_moves_on_meanwhile_is_decided_on_afresh() -> None:
    at = world()

    def moves() -> None:
        at.ledger.before_resize = lambda: None
        at.ledger.leases[PodUid("uid-p1")] = structs.replace(held(), version=4)

    at.ledger.before_resize = moves

    assert (await resize(at, 2_000)).outcome == "resized"
    assert at.ledger.leases[PodUid("uid-p1")].version == 5


async def test_a_limit_is_not_raised_before_the_copy_of_the_lease_is_written() -> None:
    at = world()
    at.pods.conflicts = 100

    reply = await resize(at, 2_000)

    assert (reply.outcome, len(reply.pending)) == ("resized", 1)
    assert "annotations, and then the container's limits" in reply.pending[0]
    assert not at.agents.limits
    assert at.ledger.unsynced_versions


async def test_a_second_resize_must_wait_for_the_first() -> None:
    at = world()
    at.ledger.locks[PodUid("uid-p1")] = "another's"

    reply = await resize(at, 500)

    assert (reply.outcome, reply.reason) == ("unavailable", "another resize of it is in progress")
    assert not at.agents.limits


async def test_a_repeated_request_changes_nothing_and_finishes_the_first() -> None:
    at = world()
    at.agents.away.add(held().node)
    first = await resize(at, 2_000)
    at.agents.away.clear()

    second = await resize(at, 2_000)

    assert first.outcome == "resized"
    assert first.pending == ("the container's limits, as soon as the agent of node n1 responds",)
    assert (second.outcome, second.pending) == ("unchanged", ())
    assert annotated(at).shares[0].memory_mib == 2_000
    assert not at.ledger.unsynced_versions
    assert sum(isinstance(event, LeaseResized) for event in at.bus.published) == 1


async def test_a_resize_of_a_dead_binder_is_finished_by_another() -> None:
    at = world()
    now = structs.replace(
        held(), version=4, shares=(structs.replace(held().shares[0], memory_mib=2_000),)
    )
    at.ledger.leases[now.pod] = now
    await at.ledger.resizes.set_unsynced([now])

    async with running(at.binder.finish_resizes):
        await until(lambda: not at.ledger.unsynced_versions)

    assert at.agents.limits[-1].lease == now
    assert annotated(at).shares == now.shares


async def test_an_unavailable_node_is_retried_with_pauses() -> None:
    at = world()
    at.agents.away.add(held().node)
    await at.ledger.resizes.set_unsynced([held()])
    for _ in range(5):
        await at.binder.resizer.finish()
    requested = len(at.agents.limits)
    at.clock.advance(1.1)
    await at.binder.resizer.finish()
    again = len(at.agents.limits)
    at.agents.away.clear()
    at.clock.advance(60)
    await at.binder.resizer.finish()

    assert (requested, again) == (1, 2)
    assert not at.ledger.unsynced_versions


async def test_a_size_that_the_device_cannot_hold_is_taken_back() -> None:
    """The ledger has lost the lease of another pod there, and gave its memory out again."""
    at = world()
    grown = structs.replace(
        held(),
        version=4,
        shares=(structs.replace(held().shares[0], memory_mib=9_000, cores_percent=40),),
    )
    at.ledger.leases[grown.pod] = grown
    at.agents.kept = WAS
    await at.ledger.resizes.set_unsynced([grown])

    await at.binder.resizer.finish()

    [share] = at.ledger.leases[grown.pod].shares
    assert ShareSize(memory_mib=share.memory_mib, cores_percent=share.cores_percent) == WAS
    assert at.agents.limits[1].resize_id == "lock of uid-p1", "the agent holds it meanwhile"
    assert not at.ledger.unsynced_versions


async def test_a_resize_of_a_terminated_pod_leaves_nothing_to_do() -> None:
    at = world()
    await at.ledger.resizes.set_unsynced([held()])
    del at.ledger.leases[held().pod]

    await at.binder.resizer.finish()

    assert not at.ledger.unsynced_versions
    assert not at.agents.limits


async def test_annotations_carry_the_newest_lease_and_are_written_once() -> None:
    at = world()
    at.pods.conflicts = 3
    await resize(at, 2_000)
    writes = at.pods.writes
    await resize(at, 2_000)

    assert (writes, at.pods.writes) == (1, 1)
    assert annotated(at).shares[0].memory_mib == 2_000


@pytest.mark.parametrize("moment", ["before_read", "before_annotate"])
async def test_of_two_concurrent_annotations_the_newer_lease_stays(moment: str) -> None:
    at = world()
    newer = structs.replace(
        held(), version=9, shares=(structs.replace(held().shares[0], memory_mib=3_000),)
    )

    def another_is_faster() -> None:
        setattr(at.pods, moment, lambda: None)
        at.ledger.leases[newer.pod] = newer
        at.pods.annotated["p1"] = replace(
            at.pods.annotated["p1"], resource_version="8", annotations=resized_annotations(newer)
        )

    setattr(at.pods, moment, another_is_faster)

    await resize(at, 2_000)

    assert annotated(at).shares[0].memory_mib == 3_000
    assert at.pods.writes == 0


async def test_a_later_pod_of_the_same_name_is_not_annotated() -> None:
    at = world()
    at.pods.annotated["p1"] = replace(at.pods.annotated["p1"], uid=PodUid("uid-of-another"))

    reply = await resize(at, 2_000)

    assert reply.outcome == "resized"
    assert at.pods.writes == 0


async def test_hami_core_13_the_reply_states_that_new_cores_apply_to_new_processes() -> None:
    reply = await resize(world(), cores=30)

    assert reply.notes == (
        "cores: running processes keep their cap of 10 % until they restart; processes that start "
        "now get 30 %",
    )


async def test_a_resize_is_an_event_of_the_pod() -> None:
    at = world()
    await resize(at, 2_000, 20)

    async with running(at.binder.write_events):
        await until(lambda: at.pods.events)

    (event,) = at.pods.events.values()
    assert (event["reason"], event["type"]) == ("LeaseResized", "Normal")
    assert event["message"] == (
        "container c: 1000 to 2000 MiB, 10 to 20 % of its cores of GPU 0 of node n1"
    )
