"""The kubelet's calls, with a fake kubelet and fake leases."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from services.node_agent.records.checkpoint import Checkpoint
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import ShareActivated, ShareRefused
from shared.model.lease import Lease, LeaseState, MigPlacement
from shared.model.names import DeviceUuid, NodeName, PodUid
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import NUMBER, share
from tests.support.node_agent.allocation_handler import OTHER, SLOT, HandlerUnderTest, container
from tests.support.simcluster.kubelet import NODE


@pytest.fixture
async def under_test(tmp_path: Path) -> HandlerUnderTest:
    return await HandlerUnderTest(tmp_path).open()


async def test_allocate_saves_prepares_publishes_and_annotates(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(0, 1000))

    setup = await under_test.handler.allocate(NUMBER, [SLOT])
    reloaded = Checkpoint(under_test.checkpoint.path, NODE)
    await reloaded.load()
    events = await under_test.reporter.outbox.take()

    assert reloaded.allocations == under_test.checkpoint.allocations
    assert under_test.effects.calls == ["prepared", "shown ['main']", "allocated"]
    assert isinstance(events[0], ShareActivated)
    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"


async def test_allocate_fails_with_the_error_of_the_pod_resources_api(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(0, 1000))
    under_test.kubelet.error = "PodResources: no answer within 10 s"

    with pytest.raises(UnavailableError, match="no answer within 10 s"):
        await under_test.handler.allocate(NUMBER, [SLOT])


async def test_a_call_that_the_kubelet_cancels_does_not_count_as_refused(
    under_test: HandlerUnderTest,
) -> None:
    for name in ("a", "b"):
        under_test.kubelet.add(name)
        under_test.lease(name, share(0, 1000))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(under_test.handler.allocate(NUMBER, [SLOT]), 0.05)

    assert under_test.effects.calls == ["cancelled"]


async def test_equal_pods_are_listed_again_and_then_refused_by_name(
    under_test: HandlerUnderTest,
) -> None:
    for name in ("a", "b"):
        under_test.kubelet.add(name)
        under_test.lease(name, share(0, 1000))

    with pytest.raises(RequestError, match=r"default/a, container main; default/b"):
        await under_test.handler.allocate(NUMBER, [SLOT])

    (events,) = await under_test.reporter.outbox.take()
    assert isinstance(events, ShareRefused)
    assert events.pod is None, "no lease is refused for a guess"
    assert under_test.kubelet.list_calls > 1
    assert under_test.checkpoint.allocations == ()


async def test_no_id_is_preferred_while_the_pod_is_ambiguous(under_test: HandlerUnderTest) -> None:
    under_test.kubelet.add("a")
    under_test.kubelet.add("b")

    assert (
        list(await under_test.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)) == []
    )


async def test_the_leased_slot_is_preferred_before_it_is_allocated(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(1, 1000))

    assert list(
        await under_test.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)
    ) == [OTHER]


async def test_38_a_device_mismatch_is_refused_published_and_annotated(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(1, 1000))

    with pytest.raises(RequestError, match="the lease is for 1 of"):
        await under_test.handler.allocate(NUMBER, [SLOT])

    (events,) = await under_test.reporter.outbox.take()
    assert isinstance(events, ShareRefused)
    assert events.pod == "uid-a"
    assert under_test.effects.calls == ["shown as failed", "refused"]


async def test_allocate_refuses_to_overcommit_a_device_whatever_the_lease(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(0, 10_000, slot=0))
    await under_test.handler.allocate(NUMBER, [SLOT])
    under_test.kubelet.add_holding("a", "main", SLOT)
    await under_test.reporter.outbox.take()

    under_test.kubelet.add("b")
    under_test.lease("b", share(0, 10_000, slot=1, fence=2))
    with pytest.raises(RequestError, match="over-committed") as refused:
        await under_test.handler.allocate(NUMBER, [f"{SLOT[:-1]}1"])

    assert "default/a" in str(refused.value)
    assert "default/b" in str(refused.value)
    (event,) = await under_test.reporter.outbox.take()
    assert isinstance(event, ShareRefused)
    assert event.pod == "uid-b"
    assert [each.pod for each in under_test.checkpoint.allocations] == ["uid-a"]
    assert "over-committed" in under_test.effects.calls


@pytest.mark.parametrize("phase", ["", "Succeeded"])
async def test_a_pod_that_has_just_ended_does_not_count_against_the_device(
    under_test: HandlerUnderTest, phase: str
) -> None:
    ended = under_test.kubelet.add("a")
    under_test.lease("a", share(0, 10_000, slot=0))
    await under_test.handler.allocate(NUMBER, [SLOT])
    under_test.kubelet.pods = [replace(ended, phase=phase)] if phase else []
    if phase:
        under_test.kubelet.add_holding("a", "main", SLOT)
    del under_test.ledger.leases[ended.uid]

    under_test.kubelet.add("b")
    under_test.lease("b", share(0, 10_000, slot=1, fence=2))
    await under_test.handler.allocate(NUMBER, [f"{SLOT[:-1]}1"])

    assert [each.pod for each in under_test.checkpoint.allocations] == ["uid-b"]


async def test_a_deleted_pod_counts_while_the_runtime_has_its_container(
    under_test: HandlerUnderTest,
) -> None:
    deleted = under_test.kubelet.add("a")
    under_test.lease("a", share(0, 10_000, slot=0))
    await under_test.handler.allocate(NUMBER, [SLOT])
    under_test.kubelet.pods, under_test.kubelet.running = [], frozenset({deleted.uid})
    del under_test.ledger.leases[deleted.uid]

    under_test.kubelet.add("b")
    under_test.lease("b", share(0, 10_000, slot=1, fence=2))
    with pytest.raises(RequestError, match="over-committed"):
        await under_test.handler.allocate(NUMBER, [f"{SLOT[:-1]}1"])


async def test_allocate_waits_for_the_rebuild_of_a_lost_checkpoint(
    under_test: HandlerUnderTest,
) -> None:
    under_test.checkpoint.lost = True
    under_test.kubelet.add("a")
    under_test.lease("a", share(0, 1000))

    with pytest.raises(UnavailableError, match="has lost its records"):
        await under_test.handler.allocate(NUMBER, [SLOT])
    assert under_test.checkpoint.allocations == ()

    under_test.checkpoint.lost = False
    await under_test.handler.allocate(NUMBER, [SLOT])


async def test_a_released_lease_is_refused(under_test: HandlerUnderTest) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(0, 1000), state=LeaseState.RELEASED)

    with pytest.raises(RequestError, match="holds no lease"):
        await under_test.handler.allocate(NUMBER, [SLOT])


async def test_27_a_start_is_refused_when_another_container_holds_the_devices(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a")
    under_test.lease("a", share(0, 1000))
    await under_test.handler.allocate(NUMBER, [SLOT])

    under_test.kubelet.add_holding("b", "main", SLOT)
    with pytest.raises(RequestError, match=r"with default/b/main, .* allocated to default/a/main"):
        await under_test.handler.pre_start_container(NUMBER, [SLOT])

    under_test.kubelet.held_devices.clear()
    with pytest.raises(RequestError, match="with no container"):
        await under_test.handler.pre_start_container(NUMBER, [SLOT])

    under_test.kubelet.add_holding("a", "main", SLOT)
    before = time.time()
    await under_test.handler.pre_start_container(NUMBER, [SLOT])
    assert under_test.effects.calls[-1] == "prepared for a start"
    assert under_test.checkpoint.started_since(before) == {"uid-a"}
    await under_test.checkpoint.forget({PodUid("uid-a")})
    assert under_test.checkpoint.started_since(before) == set()


async def test_27_an_init_container_starts_without_being_listed_by_pod_resources(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a", container("first", init=True), container())
    under_test.lease("a", share(0, 1000, container="first", init=True), share(0, 1000, fence=2))
    await under_test.handler.allocate(NUMBER, [SLOT])

    await under_test.handler.pre_start_container(NUMBER, [SLOT])

    assert under_test.checkpoint.allocations[0].container == "first"


async def test_29_the_same_ids_serve_the_init_container_and_then_the_container(
    under_test: HandlerUnderTest,
) -> None:
    under_test.kubelet.add("a", container("first", init=True), container())
    under_test.lease(
        "a", share(0, 500, container="first", init=True), share(1, 1000, container="main", fence=2)
    )

    first = await under_test.handler.allocate(NUMBER, [SLOT])
    second = await under_test.handler.allocate(NUMBER, [SLOT])

    assert first.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "500m"
    assert second.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    assert second.environment["NVIDIA_VISIBLE_DEVICES"] == uuid_of(NodeName(NODE), 1)


async def test_a_call_that_waits_for_mig_instances_does_not_hold_up_others(
    under_test: HandlerUnderTest,
) -> None:
    waiting, laid_out = asyncio.Event(), asyncio.Event()

    async def partition(lease: Lease, container: str) -> dict[tuple[DeviceUuid, int], str]:
        waiting.set()
        await laid_out.wait()
        raise RequestError("the layout does not fit")

    under_test.handler.mig_instances_of = partition
    under_test.kubelet.add("a")
    placed = MigPlacement(layout="all-1g", position=0, profile="1g.10gb")
    under_test.lease("a", structs.replace(share(0, 1000), mig=placed))
    first = asyncio.create_task(under_test.handler.allocate(NUMBER, [SLOT]))
    await waiting.wait()
    under_test.kubelet.add("b")
    under_test.lease("b", share(1, 1000))

    async with asyncio.timeout(10):
        setup = await under_test.handler.allocate(NUMBER, [OTHER])

    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    assert not first.done()
    laid_out.set()
    with pytest.raises(RequestError, match="does not fit"):
        await first
    assert [each.pod for each in under_test.checkpoint.allocations] == ["uid-b"]
