"""What an agent cannot give: one pod fails for it, those bound meanwhile wait, others are not."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.allocate.admission_window import SETTLE_S, AdmissionWindow
from services.node_agent.allocate.failed_grants import NOT_GIVEN
from services.node_agent.gpus.inventory import SharingConfig, devices_of
from services.node_agent.mig.instances import InUseError
from services.node_agent.records import checkpoint
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.leases.lease import LeaseState, Share
from shared.model.names import NodeName
from simcluster.node_agent.gpus import SimulatedGpus
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.allocation_handler import (
    OTHER,
    SIGHT_S,
    SLOT,
    HandlerWorld,
    container,
)
from tests.support.node_agent.mig import mig_share
from tests.support.node_agent.node import kubelet_pod, snapshot_of
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until

SECOND = f"{SLOT[:-1]}1"
DEVICE = share().device


@dataclass(frozen=True)
class Fault:
    """Something for which each pod on a device would fail."""

    reason: str
    method: str = ""
    error: Exception | None = None
    share: Callable[..., Share] = share


def no_descriptors() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


FAULTS = {
    "a specification without the device": Fault(
        "has no leasehold.dev/gpu=MIG-0",
        "ensure_named",
        UnavailableError("the CDI specification has no leasehold.dev/gpu=MIG-0"),
    ),
    "an instance in use": Fault(
        "is in use by pod",
        "instance_uuids",
        InUseError("instance MIG-0 is in use by pod default/x"),
        share=lambda _, slot=0, fence=1: mig_share("group1", slot, fence=fence),
    ),
    "no file descriptors": Fault("Too many open files", "prepare", no_descriptors()),
    "a checkpoint on a full disk": Fault("must be on disk before the kubelet gets it"),
    "a GPU that is missing": Fault("is missing on the node"),
}


class FaultyWorld(HandlerWorld):
    """A handler for which one of the faults begins and ends."""

    async def open(self) -> "FaultyWorld":
        gpus = await SimulatedGpus(NodeName(NODE), "2xA100-40GB").discover()
        self.plain = snapshot_of(*devices_of(gpus, SharingConfig()))
        layouts = await SimulatedGpus(NodeName(NODE), "2xA100-40GB:mig").discover()
        self.mig = snapshot_of(*devices_of(layouts, SharingConfig()))
        self.node.snapshot = self.plain
        self.node.leases.synced = True
        return self

    def begin(self, fault: Fault, patch: pytest.MonkeyPatch) -> None:
        if fault.method and fault.error:
            self.effects.failures[fault.method] = fault.error
        elif "disk" in fault.reason:
            patch.setattr(checkpoint, "replace_file", full)
        else:
            self.node.snapshot = replace(self.plain, absent=frozenset({DEVICE}))

    def end(self, patch: pytest.MonkeyPatch) -> None:
        self.effects.failures.clear()
        patch.undo()
        self.node.snapshot = replace(self.require(), absent=frozenset())

    def require(self) -> Any:
        assert self.node.snapshot is not None
        return self.node.snapshot

    @asynccontextmanager
    async def trying(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.grants.failed.run())
        try:
            yield
        finally:
            task.cancel()


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return FAULTS[request.param]


@pytest.fixture
async def world(tmp_path: Path) -> FaultyWorld:
    return await FaultyWorld(tmp_path).open()


async def fail_first(world: FaultyWorld, fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Let the first of two pods fail that are bound to one device."""
    if fault.share is not share:
        world.node.snapshot = world.mig
    world.add_leased("first", fault.share(0))
    world.begin(fault, patch)
    with pytest.raises(LeaseholdError, match=fault.reason):
        await world.allocate()
    world.kubelet.pods.clear()
    world.add_leased("second", fault.share(0, slot=1, fence=2))


async def test_a_pod_that_was_bound_meanwhile_waits_and_gets_its_share(
    world: FaultyWorld, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fail_first(world, fault, monkeypatch)

    async with asyncio.TaskGroup() as group:
        call = group.create_task(world.allocate(SECOND))
        await world.node.clock.sleep(SIGHT_S / 2)
        assert not call.done()
        world.end(monkeypatch)

    assert world.allocated == ["uid-second"]
    assert not world.node.closed


async def test_a_device_is_closed_with_the_reason_until_the_agent_succeeds_by_itself(
    world: FaultyWorld, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fail_first(world, fault, monkeypatch)
    window = AdmissionWindow(world.node)
    wanted = lease_of("wanted", fault.share(0, slot=2, fence=3), state=LeaseState.RESERVED)
    elsewhere = lease_of("elsewhere", share(1), state=LeaseState.RESERVED)

    async with world.trying():
        await world.node.clock.sleep(4 * SETTLE_S)
        window.admit_binds([wanted], None, unreadable_reason="")
        await world.node.clock.sleep(2 * SETTLE_S)
        reply = window.admit_binds([wanted, elsewhere], None, unreadable_reason="")
        faults = dict(world.node.closed)
        world.end(monkeypatch)
        await until(lambda: not world.node.closed)
    opened = await until(
        lambda: window.admit_binds([wanted], None, unreadable_reason=""),
        lambda reply: not reply.deferred_pods,  # once the other pod counts no more
    )

    assert list(faults) == [DEVICE]
    assert faults[DEVICE].startswith(f"{NOT_GIVEN}: no share of it could be given since 20")
    assert fault.reason in faults[DEVICE]
    assert wanted.pod in reply.refusals
    assert elsewhere.pod not in reply.refusals
    assert not opened.refusals
    assert world.node.report_due.is_set()


async def test_a_pod_that_was_bound_meanwhile_fails_after_the_kubelets_patience(
    world: FaultyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS["no file descriptors"]
    await fail_first(world, fault, monkeypatch)
    began = world.node.clock.ticks()

    with pytest.raises(UnavailableError, match=fault.reason):
        await world.allocate(SECOND)

    assert SIGHT_S / 2 < world.node.clock.ticks() - began < 2 * SIGHT_S


async def test_what_is_wrong_with_a_pod_closes_nothing(world: FaultyWorld) -> None:
    world.lease("a", share(0))
    world.kubelet.pods.append(
        kubelet_pod(
            "a", containers=(replace(container(), reserved_variable="NVIDIA_VISIBLE_DEVICES"),)
        )
    )

    with pytest.raises(RequestError, match="NVIDIA_VISIBLE_DEVICES"):
        await world.allocate()

    assert not world.node.closed


async def choose_another(world: FaultyWorld, *, preferred: bool) -> None:
    """Let the kubelet choose a slot of the other device, which it was told not to if preferred."""
    world.add_leased("first", share(0))
    if preferred:
        await world.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)
    with pytest.raises(RequestError, match="the kubelet chose 1 of"):
        await world.allocate(OTHER)
    assert "the kubelet chose 1 of" in world.node.closed[DEVICE]


async def test_a_device_opens_once_the_kubelet_has_its_slots_free(world: FaultyWorld) -> None:
    served = world.require().served[NUMBER]
    taken = [text for text, each in served.items() if each.device == DEVICE]
    world.add_holding("other", "main", *taken)
    await choose_another(world, preferred=False)

    async with world.trying():
        await world.node.clock.sleep(10)
        assert world.node.closed
        world.kubelet.holdings.clear()
        await until(lambda: not world.node.closed)


async def test_a_device_that_the_kubelet_does_not_choose_opens_when_it_registers(
    world: FaultyWorld,
) -> None:
    await choose_another(world, preferred=True)

    async with world.trying():
        await world.node.clock.sleep(10)
        assert world.node.closed
        world.handler.note_registered()
        await until(lambda: not world.node.closed)


@pytest.mark.parametrize("is_removed", [False, True], ids=["missing", "removed"])
@pytest.mark.parametrize("preferred", [False, True])
async def test_a_device_that_has_left_the_node_is_not_tried_for_ever(
    world: FaultyWorld, caplog: pytest.LogCaptureFixture, *, preferred: bool, is_removed: bool
) -> None:
    caplog.set_level("INFO")
    await choose_another(world, preferred=preferred)
    snapshot = world.require()
    if is_removed:
        devices = {uuid: device for uuid, device in snapshot.devices.items() if uuid != DEVICE}
        world.node.snapshot = replace(snapshot, devices=devices)
    else:
        world.node.snapshot = replace(snapshot, absent=frozenset({DEVICE}))

    async with world.trying():
        await until(lambda: not world.node.closed)

    assert f"device {DEVICE}, of the same lease, has left the node" in caplog.text


async def test_an_ambiguous_container_closes_the_node_until_its_candidates_are_gone(
    world: FaultyWorld,
) -> None:
    for name in ("one", "two"):
        world.add_leased(name, share(0))
    with pytest.raises(RequestError, match="2 containers are possible"):
        await world.allocate()
    reason = world.node.unresolved_reason
    async with world.trying(), asyncio.TaskGroup() as group:
        call = group.create_task(world.allocate())
        await world.node.clock.sleep(SIGHT_S / 3)
        assert not call.done(), "the next one waits"
        assert world.node.unresolved_reason
        world.kubelet.pods.pop()
        await call
        world.kubelet.pods.clear()
        await until(lambda: not world.node.unresolved_reason)

    assert "default/one, container main; default/two, container main" in reason
    assert world.allocated == ["uid-one"]
