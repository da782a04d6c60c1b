"""A ledger that lost a running pod's lease, on a real server: no device is given out twice."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from services.binder.ledger_sync.lease_holders import pod_gone
from services.binder.observations import PodSnapshot
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError
from shared.dialects.dialect import ContainerSetup
from shared.ledger.leases import RedisLeases
from shared.model.device import Device
from shared.model.events.node_events import Allocation, DeviceReported, ShareRefused
from shared.model.lease import ClaimAllocation, Lease, LeaseState
from shared.model.lease_copy import ANNOTATION, dump_lease
from shared.model.ledger import NoCapacity
from shared.model.names import NodeName
from tests.support.binder.world import World
from tests.support.build import allocation_of
from tests.support.placer.ledger import (
    NOW,
    device,
    facts,
    ledger,
    report,
    reservation,
    reserve,
    share,
)

NODE = NodeName("a")
GPU: Device = device(NODE, 0, memory_mib=81_920)


def activation(lease: Lease) -> Allocation:
    return allocation_of(lease, resource="volcano.sh/vgpu-number", device_ids=(f"{GPU.uuid}::0",))


class Cluster(World):
    """A ledger, a binder, and the records of one node's agent."""

    def __init__(self, ledger: RedisLeases, path: Path) -> None:
        super().__init__(ledger)
        self.checkpoint = Checkpoint(path / "checkpoint.json", NODE)

    async def bind(self, pod: str) -> Lease:
        """Reserve 51,200 MiB of the device for a pod, and bind it."""
        leases = await reserve(self.ledger, reservation(pod, share(NODE, mib=51_200)))
        [bound] = await self.ledger.bind(leases)
        assert isinstance(bound, Lease)
        self.pods.seen[bound.name] = PodSnapshot(
            bound.pod, NODE, annotations={ANNOTATION: dump_lease(bound)}
        )
        return bound

    async def start(self, pod: str) -> Lease:
        """Bind a pod, and give it the device."""
        lease = await self.bind(pod)
        await self.allocate(lease)
        return lease

    async def held(self, lease: Lease) -> Lease:
        """The present lease of this one's pod."""
        [found] = await self.ledger.load([lease.pod])
        assert found is not None
        return found

    async def allocate(self, lease: Lease) -> None:
        entry = CheckpointEntry(allocation=activation(lease), setup=ContainerSetup(environment={}))
        await self.checkpoint.save(entry, devices={GPU.uuid: GPU})

    async def report_devices(self) -> None:
        """Report what the checkpoint has, 10 s after the last time."""
        self.clock.advance(10)
        allocations = self.checkpoint.allocations
        await self.updater.save_devices(
            [
                DeviceReported(
                    node=NODE,
                    devices=(GPU,),
                    served=("volcano.sh/vgpu-number",),
                    allocations=allocations,
                )
            ]
        )

    async def lose_all(self) -> None:
        """Begin a new ledger that knows the device and no lease."""
        token = await self.ledger.begin_rebuild(now=NOW, force=True)
        assert token is not None
        await self.ledger.save_nodes([facts(NODE)])
        await self.ledger.save_devices([report(NODE, [GPU])])
        assert await self.ledger.finish_rebuild(token)


@pytest.fixture
async def cluster(url: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with ledger(url, {"a": 0}) as leases:
        await leases.save_devices([report(NODE, [GPU])])
        yield Cluster(leases, tmp_path)


async def test_a_pod_with_a_lost_lease_keeps_its_device_to_itself(cluster: Cluster) -> None:
    first = await cluster.start("p1")
    await cluster.lose_all()
    second = await cluster.bind("p2")

    with pytest.raises(OvercommitError) as refused:
        await cluster.allocate(second)
    await cluster.report_devices()
    await cluster.updater.end_refused(
        [ShareRefused(node=NODE, reason=str(refused.value), pod=second.pod)]
    )
    await cluster.report_devices()

    [restored, ended] = await cluster.ledger.load([first.pod, second.pod])
    assert cluster.metrics.anomalies["lost_leases"] == 2
    assert restored is not None
    assert restored.state is LeaseState.ACTIVE
    assert ended is None
    [outcome] = await cluster.ledger.reserve(
        [reservation("p3", share(NODE, mib=51_200))], now=NOW, ttl_s=30
    )
    assert isinstance(outcome, NoCapacity)


@pytest.mark.parametrize("unprepared", [True, False])
async def test_a_lost_lease_ends_those_of_claims_on_its_device_that_are_not_prepared(
    cluster: Cluster, unprepared: bool
) -> None:
    first = await cluster.start("p1")
    await cluster.lose_all()
    wanted = [
        replace(reservation(claim, share(NODE, mib=20_000)), claim=ClaimAllocation(generation="1"))
        for claim in ("c1", "c2")
    ]
    claims = await reserve(cluster.ledger, *wanted)
    await cluster.ledger.bind(claims)
    cluster.agents.answers = {lease.pod: unprepared for lease in claims}

    await cluster.report_devices()

    [restored, *others] = await cluster.ledger.load([first.pod, *(one.pod for one in claims)])
    assert (restored is not None) == unprepared
    assert [lease is None for lease in others] == [unprepared, unprepared]


async def test_a_lease_that_another_binder_s_rebuild_missed_is_restored(cluster: Cluster) -> None:
    first = await cluster.start("p1")
    await cluster.report_devices()
    await cluster.lose_all()

    await cluster.report_devices()

    assert (await cluster.ledger.load([first.pod]))[0] is not None


async def test_a_second_lease_gives_way_to_the_one_that_the_pod_runs_with(cluster: Cluster) -> None:
    first = await cluster.start("p1")
    await cluster.lose_all()
    other = device(NODE, 1, memory_mib=81_920)
    await cluster.ledger.save_devices([report(NODE, [GPU, other])])
    elsewhere = await reserve(cluster.ledger, reservation("p1", share(NODE, 1, mib=51_200)))
    assert isinstance((await cluster.ledger.bind(elsewhere))[0], Lease)

    await cluster.report_devices()

    lease = await cluster.held(first)
    assert [each.device for each in lease.shares] == [GPU.uuid]


async def test_a_reservation_gives_way_to_the_lease_that_the_pod_runs_with(
    cluster: Cluster,
) -> None:
    """A rollback brings a reservation back, and has lost that the pod was bound."""
    first = await cluster.start("p1")
    await cluster.lose_all()
    await cluster.ledger.reserve(
        [reservation("p1", share(NODE, mib=51_200))], now=cluster.clock.now(), ttl_s=3_600
    )

    await cluster.report_devices()

    lease = await cluster.held(first)
    assert lease.state is LeaseState.ACTIVE


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_size_that_only_the_agent_has_is_not_believed_and_one_that_the_copy_has_is(
    cluster: Cluster, *, is_written: bool
) -> None:
    """The ledger has lost a resize; a binder may have written it into the annotation before."""
    first = await cluster.start("p1")
    await cluster.report_devices()
    [share_before] = first.shares
    larger = structs.replace(
        first,
        shares=(structs.replace(share_before, memory_mib=60_000),),
        version=first.version + 60_000,
    )
    await cluster.checkpoint.forget([first.pod])
    await cluster.allocate(larger)
    if is_written:
        cluster.pods.seen[first.name] = PodSnapshot(
            first.pod, NODE, annotations={ANNOTATION: dump_lease(larger)}
        )

    await cluster.report_devices()

    lease = await cluster.held(first)
    assert lease.shares == (larger if is_written else first).shares
    assert lease.version == larger.version + (not is_written), "agents follow newer leases only"
    unsynced = await cluster.ledger.resizes.unsynced(older_than_s=0.0)
    assert unsynced == ([] if is_written else [first.pod])


async def test_an_agent_that_missed_a_resize_is_requested_to_follow_it(cluster: Cluster) -> None:
    """The lease was restored from the copy of its pod, while its agent was silent."""
    first = await cluster.start("p1")
    await cluster.lose_all()
    [share_before] = first.shares
    resized = structs.replace(
        first,
        shares=(structs.replace(share_before, memory_mib=60_000),),
        version=first.version + 1,
        resized_at=NOW,
    )
    assert await cluster.ledger.restore([resized], now=NOW) == []

    await cluster.report_devices()

    assert await cluster.ledger.resizes.unsynced(older_than_s=0.0) == [first.pod]
    assert [each.shares for each in await cluster.ledger.load([first.pod]) if each] == [
        resized.shares
    ]


async def test_a_lease_has_the_slot_that_its_agent_has_given(cluster: Cluster) -> None:
    """The lease was restored from the copy of its pod, which had an earlier slot."""
    first = await cluster.bind("p1")
    [share_before] = first.shares
    given = (structs.replace(share_before, slot=3, fence=share_before.fence + 5),)
    await cluster.allocate(structs.replace(first, shares=given))

    await cluster.report_devices()

    assert [each.shares for each in await cluster.ledger.load([first.pod]) if each] == [given]


async def test_a_second_lease_of_another_slot_gives_way_to_the_first_one(cluster: Cluster) -> None:
    first = await cluster.start("p1")
    await cluster.lose_all()
    wanted = [reservation(pod, share(NODE, mib=20_000)) for pod in ("other", "p1")]
    leases = await reserve(cluster.ledger, *wanted)
    await cluster.ledger.bind(leases)
    await cluster.ledger.release([leases[0].pod], reason="it has succeeded")

    await cluster.report_devices()

    lease = await cluster.held(first)
    assert [each.slot for each in leases[1].shares] == [1]
    assert [each.slot for each in lease.shares] == [each.slot for each in first.shares] == [0]


async def test_a_late_report_of_an_earlier_allocation_ends_no_lease_of_a_claim(
    cluster: Cluster,
) -> None:
    earlier = structs.replace(await cluster.bind("c"), claim=ClaimAllocation(generation="g1"))
    await cluster.ledger.release([earlier.pod], reason="the claim was deallocated")
    wanted = reservation("c", share(NODE, mib=1_000), share(NODE, mib=1_000))
    wanted = replace(wanted, claim=ClaimAllocation(generation="g2"))
    await cluster.ledger.bind(await reserve(cluster.ledger, wanted))

    await cluster.allocate(earlier)
    await cluster.report_devices()

    lease = await cluster.held(earlier)
    assert lease.claim == ClaimAllocation(generation="g2")


async def test_a_lost_lease_is_not_restored_after_its_pod_was_reported_gone(
    cluster: Cluster,
) -> None:
    first = await cluster.start("p1")
    await cluster.lose_all()
    await cluster.updater.end_terminated([pod_gone(first, node=NODE)])

    await cluster.report_devices()  # the pod was read before it was gone

    assert await cluster.ledger.load([first.pod]) == [None]


async def test_the_allocation_of_a_pod_that_has_just_ended_is_no_anomaly(cluster: Cluster) -> None:
    first = await cluster.start("p1")
    await cluster.updater.end_terminated([pod_gone(first, node=NODE, phase="Succeeded")])

    await cluster.report_devices()

    assert not cluster.metrics.anomalies


async def test_a_device_on_two_nodes_is_reported_once_with_both(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.bind("p1")
    for number in range(3):
        await cluster.updater.save_devices([report("b", [GPU], at=NOW + 10 * number)])

    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"device {GPU.uuid} is reported by nodes a and b")
    assert cluster.metrics.anomalies["devices_on_two_nodes"] == 1
