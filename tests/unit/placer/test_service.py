"""The placer's handler against a ledger made of lists."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from services.placer.rounds.batch import CONTESTED_PODS, CandidateCount
from shared.model.device import DeviceUse
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import (
    LargestDeviceReported,
    PlacementChosen,
    PlacementRefused,
    message_digest,
)
from shared.model.lease import Lease, LeaseState
from shared.model.ledger import (
    AlreadyLeased,
    FeedTruncatedError,
    LedgerChange,
    NoCapacity,
    NodeUse,
    ReservationOutcome,
)
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.request import NodeOrder
from shared.placing.index.ranked_nodes import CANDIDATES
from tests.support.build import device, gpu, ledger_node, pod_queued, request, use
from tests.support.placer.running import Running, granted, two_nodes


async def test_a_batch_is_one_group_and_each_pod_gets_a_lease() -> None:
    async with Running(*two_nodes()) as it:
        events = [pod_queued(f"uid-{n}", trace=f"trace-{n}") for n in range(5)]

        answers = await it.placer.place_pods(events)

        assert [len(group) for group in it.ledger.groups] == [5]
        assert all(isinstance(answer, PlacementChosen) for answer in answers)
        assert [answer.trace for answer in answers] == [event.trace for event in events]
        assert all(len(one.candidates) == 1 for one in it.ledger.groups[0])


async def test_pods_that_spread_get_further_candidates_after_a_first_one_was_not_granted() -> None:
    async with Running(*two_nodes()) as it:
        it.ledger.outcomes = [NoCapacity(pod=PodUid("uid-1"), reason="n1: taken")]
        first, second = (request(gpu(memory=n), node_order=NodeOrder.SPREAD) for n in (2, 1))

        await it.placer.place_pods([pod_queued("uid-1", first)])
        await it.placer.place_pods([pod_queued("uid-2", second)])

        assert [len(group[0].candidates) for group in it.ledger.groups] == [1, 2, 2]


async def test_pods_that_pack_leave_a_node_that_others_have_taken() -> None:
    async with Running(*two_nodes()) as it:
        it.ledger.outcomes = [NoCapacity(pod=PodUid("uid-1"), reason="taken")]

        await it.placer.place_pods([pod_queued("uid-1")])
        await it.placer.place_pods([pod_queued("uid-2", request(gpu(memory=1)))])

        [taken], *others = [[c.node for c in group[0].candidates] for group in it.ledger.groups]
        assert others == [["n2" if taken == "n1" else "n1"]] * 2


def test_pods_get_one_candidate_once_first_ones_are_granted_again() -> None:
    candidates = CandidateCount()

    candidates.note_contention()

    assert {candidates.next() for _ in range(CONTESTED_PODS)} == {CANDIDATES}
    assert candidates.next() == 1


async def test_pods_of_a_batch_do_not_get_the_same_free_memory() -> None:
    async with Running(*two_nodes()) as it:
        whole = request(gpu())

        answers = await it.placer.place_pods([pod_queued(f"uid-{n}", whole) for n in range(3)])

        nodes = [one.lease.node for one in answers if isinstance(one, PlacementChosen)]
        assert sorted(nodes) == ["n1", "n2"]
        assert [type(one) for one in answers].count(PlacementRefused) == 1
        assert [one.queued.pod for one in it.ledger.waiting] == ["uid-2"]
        assert it.ledger.waiting[0].capacity == 7


async def test_pods_of_higher_priority_come_first_in_a_batch() -> None:
    async with Running(ledger_node("n1", device())) as it:
        low = pod_queued("low", request(gpu(), priority=1))
        high = pod_queued("high", request(gpu(), priority=9))

        answers = await it.placer.place_pods([low, high])

        chosen = [one.lease.pod for one in answers if isinstance(one, PlacementChosen)]
        assert chosen == ["high"]


async def test_after_no_capacity_the_pod_is_decided_again_with_the_ledgers_totals() -> None:
    async with Running(*two_nodes()) as it:
        it.ledger.outcomes = [
            NoCapacity(
                pod=PodUid("uid-1"),
                reason="n1: taken",
                devices={DeviceUuid("GPU-1"): use(32768, fence=5)},
                nodes={NodeName("n1"): NodeUse(version=9, used={"pods": 1})},
            )
        ]

        answers = await it.placer.place_pods([pod_queued("uid-1")])

        assert isinstance(answers[0], PlacementChosen)
        assert answers[0].lease.node == "n2"
        assert [c.node for c in it.ledger.groups[1][0].candidates] == ["n2"]
        assert it.metrics.counts["no_capacity"] == 1


async def test_refusals_beside_a_disturbed_reservation_are_decided_again() -> None:
    async with Running(ledger_node("n1", device())) as it:
        elsewhere = Lease(
            pod=PodUid("uid-1"),
            namespace=pod_queued().namespace,
            name="uid-1",
            node=NodeName("gone"),
            shares=(),
            state=LeaseState.BOUND,
        )
        it.ledger.outcomes = [AlreadyLeased(lease=elsewhere)]
        whole = request(gpu())

        answers = await it.placer.place_pods(
            [pod_queued("uid-1", whole), pod_queued("uid-2", whole)]
        )

        assert [type(one) for one in answers] == [PlacementChosen, PlacementChosen]
        assert it.ledger.waiting == []


@pytest.mark.parametrize(
    ("state", "answered"),
    [(LeaseState.RESERVED, 1), (LeaseState.BOUND, 1), (LeaseState.ACTIVE, 0)],
)
async def test_a_lease_is_published_again_until_it_is_active(
    state: LeaseState, answered: int
) -> None:
    async with Running(*two_nodes()) as it:
        await it.placer.place_pods([pod_queued("uid-1")])
        lease = granted(it.ledger.groups[0][0], 0).lease
        it.ledger.outcomes = [AlreadyLeased(lease=structs.replace(lease, state=state))]

        answers = await it.placer.place_pods([pod_queued("uid-1")])

        assert len(answers) == answered


async def test_the_second_copy_of_a_pods_first_event_publishes_nothing() -> None:
    async with Running(*two_nodes()) as it:
        await it.placer.place_pods([pod_queued("uid-1")])
        now = it.placer.clock.now()
        lease = structs.replace(granted(it.ledger.groups[0][0], 0).lease, created_at=now)
        it.ledger.outcomes = [AlreadyLeased(lease=lease)] * 3

        copy = await it.placer.place_pods([pod_queued("uid-1")])
        resync = await it.placer.place_pods([replace(pod_queued("uid-1"), requeue_number=-1)])
        it.placer.writer.forget_published([PodUid("uid-1")])
        after_failure = await it.placer.place_pods([pod_queued("uid-1")])

        assert copy == []
        assert [type(one) for one in resync + after_failure] == [PlacementChosen, PlacementChosen]


async def test_a_pod_is_not_refused_because_of_its_own_earlier_reservation() -> None:
    async with Running(ledger_node("n1", (device(), use(32768)))) as it:
        wanted = pod_queued("uid-1")
        lease = Lease(
            pod=wanted.pod,
            namespace=wanted.namespace,
            name=wanted.name,
            node=NodeName("n1"),
            shares=(),
        )
        it.ledger.leases = [lease]

        answers = await it.placer.place_pods([wanted])

        assert answers == [PlacementChosen(lease=lease)]


async def test_an_unchanged_verdict_is_written_but_not_published_again() -> None:
    async with Running(ledger_node("n1", device())) as it:
        impossible = request(gpu(gpus=2))

        first = await it.placer.place_pods([pod_queued("uid-1", impossible)])
        second = await it.placer.place_pods([pod_queued("uid-1", impossible, requeue_number=8)])

        assert len(first) == 1
        assert second == []
        assert len(it.ledger.waiting) == 2


@pytest.mark.parametrize(("is_shown", "published"), [(True, 0), (False, 1)])
async def test_a_resync_publishes_a_verdict_that_the_pod_does_not_show(
    is_shown: bool, published: int
) -> None:
    async with Running(ledger_node("n1", device())) as it:
        impossible = pod_queued("uid-1", request(gpu(gpus=2)))
        (first,) = await it.placer.place_pods([impossible])
        assert isinstance(first, PlacementRefused)
        shown = message_digest(first.refusal.text if is_shown else "0/9 nodes are available")

        answers = await it.placer.place_pods([replace(impossible, requeue_number=-1, shown=shown)])

        assert [type(one) for one in answers] == [PlacementRefused] * published


async def test_a_changed_verdict_is_published() -> None:
    async with Running(ledger_node("n1", device())) as it:
        impossible = request(gpu(gpus=2))
        await it.placer.place_pods([pod_queued("uid-1", impossible)])
        it.ledger.feed.put_nowait(
            [LedgerChange(position="2", cause="x", capacity=8, nodes=(ledger_node("n2"),))]
        )
        await it.settled()

        answers = await it.placer.place_pods([pod_queued("uid-1", impossible)])

        assert isinstance(answers[0], PlacementRefused)
        assert answers[0].refusal.reason.startswith("0/2 nodes are available: ")


async def test_a_stale_verdict_is_decided_again() -> None:
    async with Running(ledger_node("n1", (device(), use(32768)))) as it:
        it.ledger.stale_once = {PodUid("uid-1")}
        it.ledger.feed.put_nowait(
            [
                LedgerChange(
                    position="2",
                    cause="released",
                    capacity=8,
                    devices={DeviceUuid("GPU-a"): DeviceUse(fence=2)},
                )
            ]
        )
        deciding = asyncio.create_task(it.placer.place_pods([pod_queued("uid-1")]))
        async with asyncio.timeout(30):
            answers = await deciding

        assert [type(one) for one in answers] == [PlacementChosen]


async def test_events_return_to_the_queue_if_the_ledger_never_agrees() -> None:
    async with Running(*two_nodes()) as it:
        it.ledger.outcomes = [NoCapacity(pod=PodUid("uid-1"), reason="unknown node")] * 50

        with pytest.raises(
            ConflictError, match="1 pods are undecided: the ledger changed 10 times"
        ):
            await it.placer.place_pods([pod_queued("uid-1")])


async def test_a_refusal_of_a_failed_batch_is_published_next_time() -> None:
    async with Running(ledger_node("n1", device())) as it:
        impossible = pod_queued("uid-1", request(gpu(gpus=2)))
        it.ledger.outcomes = [NoCapacity(pod=PodUid("uid-2"), reason="unknown node")] * 10
        with pytest.raises(ConflictError):
            await it.placer.place_pods([impossible, pod_queued("uid-2")])

        answers = await it.placer.place_pods([impossible])

        assert [type(one) for one in answers] == [PlacementRefused]


async def test_an_unreachable_ledger_leaves_no_tentative_reservation() -> None:
    async with Running(ledger_node("n1", device())) as it:

        async def fail(*_: object, **__: object) -> list[ReservationOutcome]:
            raise UnavailableError("no answer")

        it.ledger.reserve = fail  # type: ignore[method-assign]
        with pytest.raises(UnavailableError):
            await it.placer.place_pods([pod_queued("uid-1", request(gpu()))])

        assert it.placer.mirror.nodes[NodeName("n1")].devices[0].used_mib == 0


async def test_before_the_first_snapshot_nothing_is_decided() -> None:
    it = Running(*two_nodes())

    assert it.placer.unready_reason() == "no snapshot of the ledger yet"
    with pytest.raises(UnavailableError):
        await it.placer.place_pods([pod_queued()])


async def test_the_largest_device_is_published_once_devices_are_known_and_again() -> None:
    it = Running(
        ledger_node("n1", device("GPU-1", memory_mib=80_000, unit_mib=10)),
        ledger_node("n2", device("GPU-2", memory_mib=16_000)),
    )
    published: list[LargestDeviceReported] = []

    async def listen() -> None:
        async for events in it.placer.largest_device():
            published.extend(events)

    listening = asyncio.create_task(listen())
    await it.clock.sleep(0)
    before = list(published)
    async with it, asyncio.timeout(30):
        while len(published) < 2:
            await it.clock.sleep(0)
    listening.cancel()

    assert before == [], "nothing is known yet"
    assert {(event.memory_mib, event.memory_units) for event in published} == {(80_000, 16_000)}


async def test_after_a_lost_feed_the_placer_loads_a_new_snapshot() -> None:
    async with Running(*two_nodes()) as it:
        it.ledger.feed.put_nowait(FeedTruncatedError("1", "trimmed"))
        async with asyncio.timeout(30):
            await it.following

        assert it.placer.unready_reason() is None
        it.clock.advance(11)
        assert it.placer.unready_reason() == "disconnected from the ledger for 11 s"
        with pytest.raises(UnavailableError):
            await it.placer.place_pods([pod_queued()])
        it.following = asyncio.create_task(it.placer.follow_ledger())
        await it.settled()
        assert it.ledger.snapshots == 2
        assert len(await it.placer.place_pods([pod_queued()])) == 1


async def test_the_feed_confirms_a_tentative_reservation_without_counting_it_twice() -> None:
    async with Running(ledger_node("n1", device())) as it:
        await it.placer.place_pods([pod_queued("uid-1")])
        change = LedgerChange(
            position="2",
            cause="reserved",
            capacity=7,
            devices={DeviceUuid("GPU-a"): use(1000, fence=1)},
            used={NodeName("n1"): NodeUse(version=2, used={"cpu": 100, "pods": 1})},
        )
        it.ledger.feed.put_nowait([change])
        it.ledger.feed.put_nowait([change])
        await it.settled()

        node = it.placer.mirror.nodes[NodeName("n1")]
        assert (node.devices[0].used_mib, node.devices[0].shares) == (1000, 1)
        assert node.free_resources["pods"] == 109
        assert node.free_resources["cpu"] == 63_900
