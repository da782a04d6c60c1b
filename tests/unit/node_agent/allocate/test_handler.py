"""The kubelet's calls, with a fake kubelet and fake leases."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import ShareRefused
from shared.model.lease import Lease, MigPlacement
from shared.model.names import DeviceUuid, PodUid
from tests.support.node_agent.agent import NUMBER, share
from tests.support.node_agent.allocation_handler import OTHER, SLOT, HandlerUnderTest, container


@pytest.fixture
async def under_test(tmp_path: Path) -> HandlerUnderTest:
    return await HandlerUnderTest(tmp_path).open()


async def test_allocate_fails_with_the_error_of_the_pod_resources_api(
    under_test: HandlerUnderTest,
) -> None:
    under_test.add_leased("a", share(0, 1000))
    under_test.kubelet.error = "PodResources: no answer within 10 s"

    with pytest.raises(UnavailableError, match="no answer within 10 s"):
        await under_test.handler.allocate(NUMBER, [SLOT])


async def test_a_call_that_the_kubelet_cancels_does_not_count_as_refused(
    under_test: HandlerUnderTest,
) -> None:
    for name in ("a", "b"):
        under_test.add_leased(name, share(0, 1000))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(under_test.handler.allocate(NUMBER, [SLOT]), 0.05)

    assert under_test.effects.calls == ["cancelled"]


async def test_equal_pods_are_listed_again_and_then_refused_by_name(
    under_test: HandlerUnderTest,
) -> None:
    for name in ("a", "b"):
        under_test.add_leased(name, share(0, 1000))

    with pytest.raises(RequestError, match=r"default/a, container main; default/b"):
        await under_test.handler.allocate(NUMBER, [SLOT])

    (events,) = await under_test.node.outbox.take()
    assert isinstance(events, ShareRefused)
    assert events.pod is None, "no lease is refused for a guess"
    assert under_test.kubelet.list_calls > 1
    assert under_test.checkpoint.allocations == ()


async def test_no_id_is_preferred_while_the_pod_is_ambiguous(under_test: HandlerUnderTest) -> None:
    under_test.add("a")
    under_test.add("b")

    assert (
        list(await under_test.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)) == []
    )


async def test_38_a_device_mismatch_is_refused_published_and_annotated(
    under_test: HandlerUnderTest,
) -> None:
    under_test.add_leased("a", share(1, 1000))

    with pytest.raises(RequestError, match="the lease is for 1 of"):
        await under_test.handler.allocate(NUMBER, [SLOT])

    (events,) = await under_test.node.outbox.take()
    assert isinstance(events, ShareRefused)
    assert events.pod == "uid-a"
    assert under_test.effects.calls == ["shown as failed", "refused"]


async def test_allocate_refuses_to_overcommit_a_device_whatever_the_lease(
    under_test: HandlerUnderTest,
) -> None:
    under_test.add_leased("a", share(0, 10_000, slot=0))
    await under_test.handler.allocate(NUMBER, [SLOT])
    under_test.add_holding("a", "main", SLOT)
    await under_test.node.outbox.take()

    under_test.add_leased("b", share(0, 10_000, slot=1, fence=2))
    with pytest.raises(RequestError, match="over-committed") as refused:
        await under_test.handler.allocate(NUMBER, [f"{SLOT[:-1]}1"])

    assert "default/a" in str(refused.value)
    assert "default/b" in str(refused.value)
    (event,) = await under_test.node.outbox.take()
    assert isinstance(event, ShareRefused)
    assert event.pod == "uid-b"
    assert [each.pod for each in under_test.checkpoint.allocations] == ["uid-a"]
    assert "over-committed" in under_test.effects.calls


@pytest.mark.parametrize("phase", ["", "Succeeded"])
async def test_a_pod_that_has_just_ended_does_not_count_against_the_device(
    under_test: HandlerUnderTest, phase: str
) -> None:
    ended = under_test.add_leased("a", share(0, 10_000, slot=0))
    await under_test.handler.allocate(NUMBER, [SLOT])
    under_test.kubelet.pods = [replace(ended, phase=phase)] if phase else []
    if phase:
        under_test.add_holding("a", "main", SLOT)
    del under_test.ledger.leases[ended.uid]

    under_test.add_leased("b", share(0, 10_000, slot=1, fence=2))
    await under_test.handler.allocate(NUMBER, [f"{SLOT[:-1]}1"])

    assert [each.pod for each in under_test.checkpoint.allocations] == ["uid-b"]


async def test_allocate_waits_for_the_rebuild_of_a_lost_checkpoint(
    under_test: HandlerUnderTest,
) -> None:
    under_test.checkpoint.lost = True
    under_test.add_leased("a", share(0, 1000))

    with pytest.raises(UnavailableError, match="has lost its records"):
        await under_test.handler.allocate(NUMBER, [SLOT])
    assert under_test.checkpoint.allocations == ()

    under_test.checkpoint.lost = False
    await under_test.handler.allocate(NUMBER, [SLOT])


async def test_27_a_start_is_refused_when_another_container_holds_the_devices(
    under_test: HandlerUnderTest,
) -> None:
    under_test.add_leased("a", share(0, 1000))
    await under_test.handler.allocate(NUMBER, [SLOT])

    under_test.add_holding("b", "main", SLOT)
    with pytest.raises(RequestError, match=r"with default/b/main, .* allocated to default/a/main"):
        await under_test.handler.pre_start_container(NUMBER, [SLOT])

    under_test.kubelet.holdings.clear()
    with pytest.raises(RequestError, match="with no container"):
        await under_test.handler.pre_start_container(NUMBER, [SLOT])

    under_test.add_holding("a", "main", SLOT)
    before = time.time()
    await under_test.handler.pre_start_container(NUMBER, [SLOT])
    assert under_test.effects.calls[-1] == "prepared for a start"
    assert under_test.checkpoint.started_since(before) == {"uid-a"}
    await under_test.checkpoint.forget({PodUid("uid-a")})
    assert under_test.checkpoint.started_since(before) == set()


async def test_27_an_init_container_starts_without_being_listed_by_pod_resources(
    under_test: HandlerUnderTest,
) -> None:
    under_test.add("a", container("first", init=True), container())
    under_test.lease("a", share(0, 1000, container="first", init=True), share(0, 1000, fence=2))
    await under_test.handler.allocate(NUMBER, [SLOT])

    await under_test.handler.pre_start_container(NUMBER, [SLOT])

    assert under_test.checkpoint.allocations[0].container == "first"


async def test_a_call_that_waits_for_mig_instances_does_not_hold_up_others(
    under_test: HandlerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, laid_out = asyncio.Event(), asyncio.Event()

    async def partition(lease: Lease, container: str) -> dict[tuple[DeviceUuid, int], str]:
        waiting.set()
        await laid_out.wait()
        raise RequestError("the layout does not fit")

    monkeypatch.setattr(under_test.effects, "instance_uuids", partition)
    under_test.add("a")
    placed = MigPlacement(layout="all-1g", position=0, profile="1g.10gb")
    under_test.lease("a", structs.replace(share(0, 1000), mig=placed))
    first = asyncio.create_task(under_test.handler.allocate(NUMBER, [SLOT]))
    await waiting.wait()
    under_test.add_leased("b", share(1, 1000))

    async with asyncio.timeout(10):
        setup = await under_test.handler.allocate(NUMBER, [OTHER])

    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    assert not first.done()
    laid_out.set()
    with pytest.raises(RequestError, match="does not fit"):
        await first
    assert [each.pod for each in under_test.checkpoint.allocations] == ["uid-b"]
