"""Pods that are gone leave no record, and a lease that the ledger has lost comes back."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from services.binder.clients import PodClient
from services.binder.ledger_sync.lease_holders import MANY, LeaseHolders, pod_gone
from services.binder.ledger_sync.reconciliation import Correction
from services.claims.clients import ClaimClient
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.device_guard import OvercommitError
from shared.dialects.dialect import ContainerSetup
from shared.kubernetes.errors import ErrorResponse, ForbiddenError
from shared.kubernetes.paths import pod_path
from shared.ledger.leases import RedisLeases
from shared.ledger.waiting_pods import GatedPods
from shared.model.devices.device import Device
from shared.model.errors import UnavailableError
from shared.model.events.node_events import Allocation, DeviceReported, ShareRefused
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    ListedPods,
    PodGated,
    PodsListed,
    PodTerminated,
)
from shared.model.leases.lease import ClaimAllocation, Lease, LeaseState
from shared.model.leases.lease_copy import ANNOTATION, dump_lease
from shared.model.leases.ledger import NoCapacity, ReservedLease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Gang
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.world import World, chosen
from tests.support.build import allocation_of
from tests.support.placer.ledger import (
    GANG,
    NOW,
    assert_sound,
    device,
    facts,
    in_gang,
    ledger,
    queued,
    report,
    reservation,
    reserve,
    share,
    verdict,
)
from tests.support.planner.scene import Scene, waiting_pod
from tests.support.servers.valkey import ValkeyServer

FORBIDDEN = ErrorResponse(
    method="GET",
    path="/api/v1/namespaces/default/pods/name-of-p",
    code=403,
    reason="Forbidden",
    message="it is forbidden",
)


class Binder(World):
    """A binder that compares listings with the ledger."""

    def start_another(self) -> "Binder":
        """Return another binder of the same ledger."""
        return Binder(self.ledger)

    async def wait(self, *pods: str, gang: Gang | None = None) -> None:
        """Let pods wait that fit nowhere."""
        capacity = await self.ledger.capacity()
        events = [in_gang(pod, 99_000, gang) if gang else queued(pod, units=99_000) for pod in pods]
        await self.ledger.waiting_pods.enqueue([verdict(each, capacity) for each in events])

    async def list(self, *unbound: str) -> list[Correction]:
        """Compare the ledger with a complete listing."""
        listed = ListedPods(unbound=tuple(map(PodUid, unbound)))
        listing = PodsListed(listing_id="l", chunk=0, chunks=1, pods=listed)
        return await self.binder.reconciler.reconcile_listing([listing])

    async def list_pods(self, *unbound: str) -> Sequence[PodTerminated]:
        """Compare as `list`, and return the pods that are gone."""
        return [event for event in await self.list(*unbound) if isinstance(event, PodTerminated)]

    async def reserve_gang(self, *pods: str) -> Sequence[Lease]:
        wanted = [
            structs.replace(reservation(pod, share("a", 0, 4_000)), gang=GANG.name) for pod in pods
        ]
        outcomes = await self.ledger.reserve_gang(GANG, wanted, now=NOW, ttl_s=30)
        return [outcome.lease for outcome in outcomes if isinstance(outcome, ReservedLease)]

    async def waiting(self) -> set[str]:
        return {each.queued.pod for each in await self.ledger.waiting_pods.load()}


@pytest.fixture
async def binder(server: ValkeyServer) -> AsyncIterator[Binder]:
    await server.ready()
    async with ledger(server.url) as leases:
        yield Binder(leases)


def deleted(pod: str) -> PodTerminated:
    space = Namespace("default")
    return PodTerminated(pod=PodUid(pod), namespace=space, name=pod, node=None, phase="")


async def test_records_of_pods_that_vanished_unseen_are_removed(binder: Binder) -> None:
    await binder.wait("stays", "gone", "recreated", "finalized", "new")
    binder.pods.seen = {
        "gone": None,
        "recreated": PodSnapshot(PodUid("another"), None),
        "finalized": PodSnapshot(PodUid("finalized"), None, deleting=True),
        "new": PodSnapshot(PodUid("new"), None),  # created while the pods were listed
    }

    ended = await binder.list_pods("stays")
    await binder.updater.end_terminated(ended)

    assert {event.pod for event in ended} == {"gone", "recreated", "finalized"}
    assert await binder.waiting() == {"stays", "new"}
    assert await binder.list_pods("stays", "new") == []


async def test_reservations_of_pods_that_vanished_unseen_end(binder: Binder) -> None:
    """A ledger that was rolled back has reservations again, which could last for as long as before
    the clock of its server was set back."""
    pods = ("stays", "gone", "recreated", "succeeded", "new")
    wanted = [reservation(pod, share("a", n % 2, mib=1_000)) for n, pod in enumerate(pods)]
    await reserve(binder.ledger, *wanted)
    binder.pods.seen = {
        "name-of-gone": None,
        "name-of-recreated": PodSnapshot(PodUid("another"), None),
        "name-of-succeeded": PodSnapshot(PodUid("succeeded"), NodeName("a"), terminal=True),
        "name-of-new": PodSnapshot(PodUid("new"), None),  # created while the pods were listed
    }

    await binder.updater.end_terminated(await binder.list_pods("stays"))

    assert {lease.pod for lease in await assert_sound(binder.ledger)} == {"stays", "new"}


async def test_a_gang_is_counted_without_the_pods_that_vanished_unseen(binder: Binder) -> None:
    await binder.wait("ghost", "p", "q", gang=GANG)
    binder.pods.seen = {"ghost": None}

    await binder.updater.end_terminated(await binder.list_pods("p", "q"))

    counted = await binder.ledger.waiting_pods.enroll(GANG, [])
    assert (counted.live_count, counted.waiting_count) == (0, 2)


async def test_a_pod_that_was_bound_by_something_else_waits_no_longer(binder: Binder) -> None:
    await binder.wait("p")
    binder.pods.seen = {"p": PodSnapshot(PodUid("p"), NodeName("a"))}

    assert await binder.list_pods() == []
    assert await binder.waiting() == set()


async def test_the_lost_lease_of_a_bound_pod_that_waits_can_be_restored(binder: Binder) -> None:
    [lease] = await reserve(binder.ledger, reservation("p", share("a", 0, 4_000)))
    await binder.ledger.release([PodUid("p")], reason="lost")
    await binder.wait("p")
    binder.pods.seen = {"p": PodSnapshot(PodUid("p"), NodeName("a"))}

    await binder.list_pods()

    lost = structs.replace(lease, state=LeaseState.ACTIVE, expires_at=0.0)
    assert await binder.ledger.restore([lost], now=NOW) == []


async def test_a_lease_of_a_pod_that_is_bound_to_another_node_ends_and_the_pod_is_not_gone(
    binder: Binder,
) -> None:
    [lease] = await reserve(binder.ledger, reservation("p", share("a", 0, 4_000)))
    await binder.ledger.bind([lease])
    binder.pods.seen = {lease.name: PodSnapshot(PodUid("p"), NodeName("b"))}

    [event] = await binder.list()

    assert isinstance(event, LeaseChanged)
    assert await binder.ledger.load([PodUid("p")]) == [None]
    assert await binder.ledger.waiting_pods.list_gone([PodUid("p")]) == set()


async def test_a_gated_pod_that_vanished_unseen_is_reported(binder: Binder) -> None:
    space = Namespace("default")
    await binder.ledger.part(GatedPods).save(
        [
            PodGated(pod=PodUid(pod), namespace=space, name=pod, resource_version="1")
            for pod in ("gone", "stays")
        ]
    )
    binder.pods.seen = {"gone": None}

    assert [event.pod for event in await binder.list_pods("stays")] == ["gone"]


async def test_the_rest_of_a_gang_is_placed_again_if_a_pod_is_deleted_before_it_is_bound(
    binder: Binder,
) -> None:
    reserved = await binder.reserve_gang("p", "q", "r")

    events = await binder.updater.end_terminated([deleted("q")])

    assert {each.lease.pod for each in events if isinstance(each, LeaseChanged)} == {"p", "q", "r"}
    assert {each.pod for each in events if isinstance(each, BindingFailed)} == {"p", "r"}
    assert not any(isinstance(each, Lease) for each in await binder.ledger.bind(reserved))
    assert await assert_sound(binder.ledger) == []


async def test_no_pod_of_a_gang_is_bound_if_one_was_deleted_since_they_were_counted(
    binder: Binder,
) -> None:
    """The event of the deletion is still on its way: the API server is read before a Binding."""
    pods = ("p", "ghost", "q")
    placements = chosen(*await binder.reserve_gang(*pods))
    binder.pods.seen = {
        f"name-of-{pod}": PodSnapshot(PodUid(pod), None) for pod in pods if pod != "ghost"
    }

    events = await binder.binder.pods.bind_pods(placements)

    assert {each.pod for each in events if isinstance(each, BindingFailed)} >= {"p", "q"}
    assert not binder.pods.bindings
    assert await assert_sound(binder.ledger) == []
    counted = await binder.ledger.waiting_pods.enroll(GANG, [])
    assert counted.live_count == 0


async def test_another_binder_ends_the_lease_of_a_pod_that_vanished_before_it_started(
    binder: Binder,
) -> None:
    await binder.ledger.bind(await reserve(binder.ledger, reservation("p", share("a"))))
    await binder.updater.end_terminated([deleted("p")])
    successor = binder.start_another()
    successor.agents.answers = {PodUid("p"): True}

    [ended] = await successor.binder.vanished.end_vanished()

    assert isinstance(ended, LeaseChanged)
    assert ended.lease.pod == "p"
    assert await binder.ledger.load_vanished() == []
    assert await assert_sound(binder.ledger) == []


async def test_a_listing_finds_a_lease_that_was_reserved_a_moment_before_it(binder: Binder) -> None:
    await binder.ledger.bind(await reserve(binder.ledger, reservation("p", share("a"))))

    assert [event.pod for event in await binder.list_pods()] == ["p"]


async def test_a_pod_that_cannot_be_read_does_not_hold_up_the_others(binder: Binder) -> None:
    wanted = (reservation("p", share("a")), reservation("q", share("a")))
    await binder.ledger.bind(await reserve(binder.ledger, *wanted))
    binder.pods.unreadable = {"name-of-p": ForbiddenError(FORBIDDEN)}

    with pytest.raises(UnavailableError, match="name-of-p"):
        await binder.list()

    assert [getattr(event, "pod", None) for event in binder.bus.published] == ["q"]
    binder.pods.unreadable = {}
    assert {event.pod for event in await binder.list_pods()} == {"p", "q"}


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
        structs.replace(
            reservation(claim, share(NODE, mib=20_000)), claim=ClaimAllocation(generation="1")
        )
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
    wanted = structs.replace(wanted, claim=ClaimAllocation(generation="g2"))
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


class CountingClient(PodClient):
    """Counts the pods that are read one by one."""

    reads = 0

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        self.reads += 1
        return await super().get(namespace, name)


async def test_many_pods_of_a_namespace_are_listed_and_only_the_missing_ones_read(
    at: Scene,
) -> None:
    names = [f"g-{number}" for number in range(MANY)]
    records = []
    for name in names:
        made = await at.pod(name, "b", spec={})
        records.append(waiting_pod(made["metadata"]["uid"], name=name))
    for name in ("g-0", "g-1"):
        await at.kube.delete(pod_path("b", name))
    await at.pod("g-1", "b", spec={})
    await at.kube.bind_pod("b", "g-2", records[2].pod, "a", {})
    pods = CountingClient(at.kube)
    claims = ClaimClient(at.kube, at.clock)

    found = [pod for _, pod in await LeaseHolders(pods, claims).read_pods(records)]

    assert found[:2] == [None, None]
    assert [pod and pod.node for pod in found[2:]] == ["a", *[None] * (MANY - 3)]
    assert [pod and pod.pod for pod in found[2:]] == [each.pod for each in records[2:]]
    assert pods.reads == 3
