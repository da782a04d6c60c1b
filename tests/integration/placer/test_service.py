"""The placer's handler, beside others that change the ledger."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import yaml
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from services.placer.rounds.decisions import CONTESTED_PODS, CandidateCount
from services.placer.service import Placer
from services.topology import published
from services.watcher.service import Watcher
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.devices.device import Device
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.pod_events import (
    PlacementChosen,
    PlacementRefused,
    PodQueued,
    message_digest,
)
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import (
    AlreadyLeased,
    NoCapacity,
    Reservation,
    ReservationOutcome,
    WaitingPod,
    WaitResult,
)
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import Gang, NodeOrder
from shared.nats.bus import Bus
from shared.placing.index.ranked_nodes import CANDIDATES
from shared.runtime import health
from shared.runtime.service import roles_of
from tests.integration.nats.world import queued
from tests.support.build import device, dice, gpu, ledger_node, pod_queued, request, use
from tests.support.clock import FakeClock
from tests.support.placer.ledger import device as card
from tests.support.placer.ledger import facts, ledger, report
from tests.support.placer.running import Clock, Running, add, decided, placers, running, two_nodes
from tests.support.servers.nats import nats_server
from tests.support.waiting import until


@pytest.fixture
async def single(url: str) -> AsyncIterator[Running]:
    async with running(url, ledger_node("n1", device())) as placer:
        yield placer


@pytest.fixture
async def pair(url: str) -> AsyncIterator[Running]:
    async with running(url, *two_nodes()) as placer:
        yield placer


async def test_a_batch_is_one_group_and_each_pod_gets_a_lease(pair: Running) -> None:
    events = [pod_queued(f"uid-{n}", trace=f"trace-{n}") for n in range(5)]

    answers = await pair.placer.place_pods(events)

    assert [len(group) for group in pair.ledger.groups] == [5]
    assert all(isinstance(answer, PlacementChosen) for answer in answers)
    assert [answer.trace for answer in answers] == [event.trace for event in events]
    assert all(len(one.candidates) == 1 for one in pair.ledger.groups[0])


async def test_pods_that_spread_get_further_candidates_after_a_first_one_was_not_granted(
    pair: Running,
) -> None:
    pair.ledger.outcomes = [NoCapacity(pod=PodUid("uid-1"), reason="n1: taken")]
    first, second = (request(gpu(memory=n), node_order=NodeOrder.SPREAD) for n in (2, 1))

    await pair.placer.place_pods([pod_queued("uid-1", first)])
    await pair.placer.place_pods([pod_queued("uid-2", second)])

    assert [len(group[0].candidates) for group in pair.ledger.groups] == [1, 2, 2]


async def test_pods_that_pack_leave_a_node_that_others_have_taken(pair: Running) -> None:
    pair.ledger.outcomes = [NoCapacity(pod=PodUid("uid-1"), reason="taken")]

    await pair.placer.place_pods([pod_queued("uid-1")])
    await pair.placer.place_pods([pod_queued("uid-2", request(gpu(memory=1)))])

    [taken], *others = [[c.node for c in group[0].candidates] for group in pair.ledger.groups]
    assert others == [["n2" if taken == "n1" else "n1"]] * 2


def test_pods_get_one_candidate_once_first_ones_are_granted_again() -> None:
    candidates = CandidateCount()

    candidates.note_contention()

    assert {candidates.next() for _ in range(CONTESTED_PODS)} == {CANDIDATES}
    assert candidates.next() == 1


async def test_pods_of_a_batch_do_not_get_the_same_free_memory(pair: Running) -> None:
    whole = request(gpu())

    answers = await pair.placer.place_pods([pod_queued(f"uid-{n}", whole) for n in range(3)])

    nodes = [one.lease.node for one in answers if isinstance(one, PlacementChosen)]
    assert sorted(nodes) == ["n1", "n2"]
    assert [type(one) for one in answers].count(PlacementRefused) == 1
    [waiting] = await pair.ledger.waiting_pods.load()
    assert (waiting.queued.pod, waiting.capacity) == ("uid-2", await pair.ledger.capacity())


async def test_after_no_capacity_the_pod_is_decided_again_with_the_ledgers_totals(
    pair: Running,
) -> None:
    reserve = pair.ledger.reserve
    before = decided("no_capacity")

    async def after_another(
        wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[ReservationOutcome]:
        pair.ledger.reserve = reserve  # type: ignore[method-assign]
        faster = structs.replace(wanted[0], pod=PodUid("uid-faster"))
        return (await reserve([faster, *wanted], now=now, ttl_s=ttl_s))[1:]

    pair.ledger.reserve = after_another  # type: ignore[method-assign]
    [answer] = await pair.placer.place_pods([pod_queued("uid-1", request(gpu()))])

    (faster, first), (again,) = pair.ledger.groups
    assert isinstance(answer, PlacementChosen)
    assert {faster.candidates[0].node, answer.lease.node} == {"n1", "n2"}
    assert [each.node for each in again.candidates] == [answer.lease.node]
    assert first.candidates == faster.candidates
    assert decided("no_capacity") == before + 1


async def test_refusals_beside_a_disturbed_reservation_are_decided_again(single: Running) -> None:
    elsewhere = Lease(
        pod=PodUid("uid-1"),
        namespace=pod_queued().namespace,
        name="uid-1",
        node=NodeName("gone"),
        shares=(),
        state=LeaseState.BOUND,
    )
    single.ledger.outcomes = [AlreadyLeased(lease=elsewhere)]
    whole = request(gpu())

    answers = await single.placer.place_pods(
        [pod_queued("uid-1", whole), pod_queued("uid-2", whole)]
    )

    assert [type(one) for one in answers] == [PlacementChosen, PlacementChosen]
    assert await single.waiting() == []


@pytest.mark.parametrize(
    ("state", "answered"),
    [(LeaseState.RESERVED, 1), (LeaseState.BOUND, 1), (LeaseState.ACTIVE, 0)],
)
async def test_a_lease_is_published_again_until_it_is_active(
    pair: Running, state: LeaseState, answered: int
) -> None:
    await pair.placer.place_pods([pod_queued("uid-1")])
    [lease] = await pair.ledger.load([PodUid("uid-1")])
    assert lease
    if state is not LeaseState.RESERVED:
        await pair.ledger.bind([lease])
    if state is LeaseState.ACTIVE:
        await pair.ledger.activate([(lease.pod, lease.node)])
    pair.clock.advance(1)

    answers = await pair.placer.place_pods([pod_queued("uid-1")])

    assert len(answers) == answered


async def test_the_second_copy_of_a_pods_first_event_publishes_nothing(pair: Running) -> None:
    await pair.placer.place_pods([pod_queued("uid-1")])

    copy = await pair.placer.place_pods([pod_queued("uid-1")])
    resync = await pair.placer.place_pods([replace(pod_queued("uid-1"), requeue_number=-1)])
    pair.placer.rounds.forget_published([PodUid("uid-1")])
    after_failure = await pair.placer.place_pods([pod_queued("uid-1")])

    assert copy == []
    assert [type(one) for one in resync + after_failure] == [PlacementChosen, PlacementChosen]


async def test_a_pod_is_not_refused_because_of_its_own_earlier_reservation(single: Running) -> None:
    whole = pod_queued("uid-1", request(gpu()))
    await single.placer.place_pods([whole])
    await single.settled()

    [answer] = await single.placer.place_pods([replace(whole, requeue_number=-1)])

    assert isinstance(answer, PlacementChosen)


async def test_an_unchanged_verdict_is_written_but_not_published_again(single: Running) -> None:
    impossible = request(gpu(gpus=2))

    first = await single.placer.place_pods([pod_queued("uid-1", impossible)])
    second = await single.placer.place_pods([pod_queued("uid-1", impossible, requeue_number=8)])

    assert len(first) == 1
    assert second == []
    assert await single.waiting() == ["uid-1"]


@pytest.mark.parametrize(("is_shown", "published"), [(True, 0), (False, 1)])
async def test_a_resync_publishes_a_verdict_that_the_pod_does_not_show(
    single: Running, is_shown: bool, published: int
) -> None:
    impossible = pod_queued("uid-1", request(gpu(gpus=2)))
    (first,) = await single.placer.place_pods([impossible])
    assert isinstance(first, PlacementRefused)
    shown = message_digest(first.refusal.text if is_shown else "0/9 nodes are available")

    answers = await single.placer.place_pods([replace(impossible, requeue_number=-1, shown=shown)])

    assert [type(one) for one in answers] == [PlacementRefused] * published


async def test_a_changed_verdict_is_published(single: Running) -> None:
    impossible = request(gpu(gpus=2))
    await single.placer.place_pods([pod_queued("uid-1", impossible)])
    await add(single.ledger, ledger_node("n2"))
    await until(lambda: len(single.placer.mirror.nodes) == 2)

    answers = await single.placer.place_pods([pod_queued("uid-1", impossible)])

    assert isinstance(answers[0], PlacementRefused)
    assert answers[0].refusal.reason.startswith("0/2 nodes are available: ")


async def test_a_stale_verdict_is_decided_again(url: str) -> None:
    async with running(url, ledger_node("n1", (device(), use(32768)))) as it:
        enqueue = it.ledger.waiting_pods.enqueue

        async def once_freed(verdicts: Sequence[WaitingPod]) -> WaitResult:
            it.ledger.waiting_pods.enqueue = enqueue  # type: ignore[method-assign]
            await it.ledger.release([PodUid("uid-on-GPU-a")], reason="test")
            return await enqueue(verdicts)

        it.ledger.waiting_pods.enqueue = once_freed  # type: ignore[method-assign]
        answers = await it.placer.place_pods([pod_queued("uid-1")])

        assert [type(one) for one in answers] == [PlacementChosen]


async def test_events_return_to_the_queue_if_the_ledger_never_agrees(pair: Running) -> None:
    pair.ledger.outcomes = [NoCapacity(pod=PodUid("uid-1"), reason="unknown node")] * 50

    with pytest.raises(ConflictError, match="1 pods are undecided: the ledger changed 10 times"):
        await pair.placer.place_pods([pod_queued("uid-1")])


async def test_a_refusal_of_a_failed_batch_is_published_next_time(single: Running) -> None:
    impossible = pod_queued("uid-1", request(gpu(gpus=2)))
    single.ledger.outcomes = [NoCapacity(pod=PodUid("uid-2"), reason="unknown node")] * 10
    with pytest.raises(ConflictError):
        await single.placer.place_pods([impossible, pod_queued("uid-2")])

    answers = await single.placer.place_pods([impossible])

    assert [type(one) for one in answers] == [PlacementRefused]


async def test_an_unreachable_ledger_leaves_no_tentative_reservation(single: Running) -> None:
    async def fail(*_: object, **__: object) -> list[ReservationOutcome]:
        raise UnavailableError("no answer")

    single.ledger.reserve = fail  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await single.placer.place_pods([pod_queued("uid-1", request(gpu()))])

    assert single.placer.mirror.nodes[NodeName("n1")].devices[0].used_mib == 0


async def test_before_the_first_snapshot_nothing_is_decided(url: str) -> None:
    async with ledger(url, {}) as leases:
        placer = Placer(leases, Clock(), dice(1), ttl_s=30.0)

        assert placer.unready_reason() == "no snapshot of the ledger yet"
        assert placer.mirror.largest_device() == (0, 0)
        with pytest.raises(UnavailableError):
            await placer.place_pods([pod_queued()])


async def test_the_largest_device_is_published_again_and_again(url: str) -> None:
    nodes = (
        ledger_node("n1", device("GPU-1", memory_mib=80_000, unit_mib=10)),
        ledger_node("n2", device("GPU-2", memory_mib=16_000)),
    )
    async with running(url, *nodes) as it, asyncio.timeout(30):
        source = it.placer.largest_device()
        published = [*await anext(source), *await anext(source)]

    assert {(event.memory_mib, event.memory_units) for event in published} == {(80_000, 16_000)}


async def test_the_first_device_is_published_within_a_second(url: str) -> None:
    async with running(url) as it, asyncio.timeout(30):
        it.placer.clock = clock = FakeClock()
        published = asyncio.ensure_future(anext(it.placer.largest_device()))
        await until(lambda: clock.sleepers)
        await add(it.ledger, ledger_node("n1", device("GPU-1", memory_mib=16_000)))
        await it.settled()

        clock.advance(1)

        assert [event.memory_mib for event in await published] == [16_000]


async def test_after_a_lost_feed_the_placer_loads_a_new_snapshot(pair: Running) -> None:
    pair.following.cancel()
    await asyncio.gather(pair.following, return_exceptions=True)

    assert pair.placer.unready_reason() is None
    pair.clock.advance(11)
    assert pair.placer.unready_reason() == "disconnected from the ledger for 11 s"
    with pytest.raises(UnavailableError):
        await pair.placer.place_pods([pod_queued()])
    pair.following = asyncio.create_task(pair.placer.follow_ledger())
    await pair.settled()
    assert pair.ledger.snapshots == 2
    assert len(await pair.placer.place_pods([pod_queued()])) == 1


async def test_the_feed_confirms_a_tentative_reservation_without_counting_it_twice(
    single: Running,
) -> None:
    before = single.placer.mirror.version
    await single.placer.place_pods([pod_queued("uid-1")])
    await until(lambda: single.placer.mirror.version > before)

    node = single.placer.mirror.nodes[NodeName("n1")]
    assert (node.devices[0].used_mib, node.devices[0].shares) == (1000, 1)
    assert node.free_resources["pods"] == 109
    assert node.free_resources["cpu"] == 63_900


SCALED = Path(__file__).parents[3] / "k8s" / "components" / "keda" / "placer-queue.yaml"
SCALED_OBJECT = next(yaml.safe_load_all(SCALED.read_text()))
TRIGGER: dict[str, str] = SCALED_OBJECT["spec"]["triggers"][0]["metadata"]


def selected(page: str, selector: str) -> list[float]:
    """Return the samples that a selector of PromQL with equal labels selects."""
    name, _, labels = selector.partition("{")
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and sample.labels == wanted
    ]


async def waiting(address: str) -> list[float]:
    async with aiohttp.ClientSession() as client, client.get(f"http://{address}/metrics") as page:
        return selected(await page.text(), TRIGGER["valueLocation"])


async def test_the_pods_without_a_decision_are_counted_before_during_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "RENDERED_S", 0.0)
    async with (
        nats_server() as server,
        Bus.connect(server.url, name="watcher") as bus,
        health.served(health.application({}), "127.0.0.1:0") as address,
    ):
        bus.announce(sorted(published(roles_of(Watcher)), key=lambda kind: kind.subject))
        depths = [await waiting(address)]
        await bus.publish([queued(number) for number in range(3)])
        depths.append(await waiting(address))
        inbox = await bus.subscribe([PodQueued], group="placer-place-pods")
        [delivered] = await inbox.batch()
        depths.append(await waiting(address))
        delivered.confirm()

        await until(lambda: waiting(address), lambda found: found == [0])

    assert depths == [[0], [3], [3]]


WHOLE = request(gpu(memory=16_000), resources={"cpu": 100, "pods": 1})


def members(gang: str, size: int, least: int) -> list[PodQueued]:
    belongs = Gang(name=f"default/{gang}", min_member=least)
    return [
        pod_queued(f"{gang}-{number}", structs.replace(WHOLE, gang=belongs), created_at=number)
        for number in range(size)
    ]


async def reasons(leases: RedisLeases) -> dict[str, str]:
    return {w.queued.pod: w.refusal.reason for w in await leases.waiting_pods.load()}


async def refresh(leases: RedisLeases, placer: Placer) -> dict[str, str]:
    """Let the placer decide whatever is offered; return the reasons that it publishes."""
    published: dict[str, str] = {}
    while True:
        await follow(leases, placer)
        offers = await leases.waiting_pods.choose_offers(now=SystemClock().now())
        if not offers.pods:
            return published
        for event in await placer.place_pods(offers.pods):
            assert isinstance(event, PlacementRefused)
            published[event.pod] = event.refusal.reason


async def follow(leases: RedisLeases, placer: Placer) -> None:
    """Wait until the placer's mirror has every change of the ledger."""
    position = (await leases.snapshot()).capacity
    await until(lambda: placer.mirror.capacity >= position)


@asynccontextmanager
async def full_node(
    url: str, waiting: Sequence[PodQueued]
) -> AsyncIterator[tuple[RedisLeases, Placer]]:
    """Yield a ledger and a placer of a node `a` whose only device is taken, with waiting pods."""
    async with ledger(url, {"a": 1}) as leases, placers(leases, 1) as [placer]:
        await placer.place_pods([pod_queued("holder", WHOLE)])
        await placer.place_pods(waiting)
        await refresh(leases, placer)
        yield leases, placer


async def save(leases: RedisLeases, devices: Sequence[Device], at: float) -> None:
    await leases.save_devices([report("a", devices, at=at)])


async def test_each_change_of_a_reason_is_published_whichever_placer_decides(url: str) -> None:
    async with ledger(url, {"a": 1}) as leases, placers(leases, 2) as [first, second]:
        await first.place_pods([pod_queued("holder", WHOLE)])
        waits = pod_queued("w", WHOLE, requeue_number=1)
        published: list[str] = []

        for placer, cordon in ((first, ""), (second, "its agent does not respond"), (first, "")):
            await leases.set_cordoned({NodeName("a"): cordon})
            await follow(leases, placer)
            for event in await placer.place_pods([waits]):
                assert isinstance(event, PlacementRefused)
                published.append(event.refusal.reason)

        assert ["not ready" in reason for reason in published] == [False, True, False]


A = NodeName("a")
Change = Callable[[RedisLeases], Awaitable[object]]


@pytest.mark.parametrize(
    ("change", "changed", "undo", "undone"),
    [
        (
            lambda leases: leases.set_cordoned({A: "its agent does not respond"}),
            "agent that was not ready",
            lambda leases: leases.set_cordoned({A: ""}),
            "Insufficient GPU memory",
        ),
        (
            lambda leases: save(leases, [card("a", 0, healthy=False, fault="XID 79")], at=1.0),
            "unhealthy",
            lambda leases: save(leases, [card("a", 0)], at=2.0),
            "Insufficient GPU memory",
        ),
        (
            lambda leases: leases.save_nodes([facts("b")]),
            "0/2 nodes",
            lambda leases: leases.remove_node(NodeName("b")),
            "0/1 nodes",
        ),
    ],
    ids=["the cordon of a node", "the health of a device", "nodes that come and go"],
)
async def test_a_verdict_follows(
    url: str, change: Change, changed: str, undo: Change, undone: str
) -> None:
    async with full_node(url, [pod_queued("w", WHOLE)]) as (leases, placer):
        assert undone in (await reasons(leases))["w"]

        await change(leases)
        assert changed in (await refresh(leases, placer))["w"]

        await undo(leases)
        assert undone in (await refresh(leases, placer))["w"]
        assert undone in (await reasons(leases))["w"]


async def test_a_change_of_amounts_alone_refreshes_no_verdict(url: str) -> None:
    async with full_node(url, [pod_queued("w", WHOLE)]) as (leases, placer):
        await leases.save_nodes([facts("a", cpu=32_000)])

        assert await refresh(leases, placer) == {}


async def test_the_verdict_of_every_pod_of_a_gang_has_the_number_of_its_pods(url: str) -> None:
    pods = members("g", 3, 4)
    async with full_node(url, []) as (leases, placer):
        for pod in pods:
            await placer.place_pods([pod])
        await refresh(leases, placer)

        found = await reasons(leases)

        assert set(found.values()) == {"gang default/g needs 4 pods at once; 3 of 4 pods exist"}


async def test_the_verdicts_of_a_gang_follow_the_deletion_of_a_pod(url: str) -> None:
    pods = members("g", 3, 3)
    async with full_node(url, pods) as (leases, placer):
        assert all("0 of 3 fit" in reason for reason in (await reasons(leases)).values())

        await leases.waiting_pods.remove([PodUid("g-1")])
        published = await refresh(leases, placer)

        expected = "gang default/g needs 3 pods at once; 2 of 3 pods exist"
        assert published == {"g-0": expected, "g-2": expected}
        assert await reasons(leases) == published
