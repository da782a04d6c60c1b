"""Waiting pods: which are offered freed capacity, how often, and in which order of namespaces."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.model.budgets.fair_share import Entitlement, GpuAmount, fair_order
from shared.model.events.pod_events import (
    BudgetChanged,
    PlacementChosen,
    PlacementRefused,
    PodQueued,
)
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import (
    RESERVED_FOR_OTHER,
    Reservation,
    ReservedLease,
    WaitingPod,
    WaitResult,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang
from tests.support.build import gpu, pod_queued, request
from tests.support.effort import tries
from tests.support.placer.ledger import (
    NOW,
    device,
    facts,
    ledger,
    queued,
    rebuild,
    refusal,
    report,
    reservation,
    reserve,
    share,
    uses,
    verdict,
)
from tests.support.placer.running import placers
from tests.support.servers.valkey import ValkeyServer


async def fill(leases: RedisLeases) -> None:
    """Take both devices of node `a`, in shares of 4,000 MiB."""
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4, 4_000)) for n in range(8)))


async def let_wait(leases: RedisLeases, *events: PodQueued) -> None:
    await leases.waiting_pods.choose_offers(now=NOW)
    capacity = await leases.capacity()
    assert (
        await leases.waiting_pods.enqueue([verdict(event, capacity) for event in events])
        == WaitResult()
    )


async def offered(leases: RedisLeases, now: float = NOW, spare: int = 0) -> list[str]:
    return [
        event.pod for event in (await leases.waiting_pods.choose_offers(now=now, spare=spare)).pods
    ]


async def test_a_freed_share_is_offered_to_a_pod_that_fits_once(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("small", units=4_000), queued("large", units=16_000))
    assert await offered(leases) == []

    await leases.release([PodUid("full-0")], reason="test")

    [event] = (await leases.waiting_pods.choose_offers(now=NOW, spare=0)).pods
    assert event.pod == "small"
    assert event.requeue_number == await leases.capacity()
    assert await offered(leases) == []


async def test_as_many_pods_get_offers_as_may_fit(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, *(queued(f"w{n:02d}") for n in range(40)))

    await leases.release([PodUid(f"full-{n}") for n in range(3)], reason="test")

    assert await offered(leases) == ["w00", "w01", "w02"]


async def test_the_first_of_many_pods_with_different_needs_get_offers(leases: RedisLeases) -> None:
    await fill(leases)
    names = [f"w{n:03d}" for n in range(150)]
    await let_wait(leases, *(queued(names[n], units=100 + n) for n in reversed(range(150))))

    await leases.release([PodUid("full-0")], reason="test")
    assert await offered(leases) == names[:128]


async def test_a_verdict_that_freed_capacity_may_change_is_stale(leases: RedisLeases) -> None:
    await fill(leases)
    before = await leases.capacity()
    await leases.release([PodUid("full-0")], reason="test")

    waited = await leases.waiting_pods.enqueue(
        [verdict(queued("fits"), before), verdict(queued("large", units=9_000), before)]
    )

    assert waited == WaitResult(stale=(PodUid("fits"),))
    [waiting] = await leases.waiting_pods.load()
    assert waiting.queued.pod == "large"
    assert waiting.capacity == await leases.capacity()


async def test_freed_capacity_is_offered_to_more_and_more_pods_while_they_do_not_fit(
    leases: RedisLeases,
) -> None:
    await fill(leases)
    await let_wait(leases, *(queued(f"w{n:02d}") for n in range(10)))
    await leases.release([PodUid("full-0")], reason="test")

    rounds = []
    for _ in range(5):
        found = await leases.waiting_pods.choose_offers(now=NOW)
        rounds.append([event.pod for event in found.pods])
        assert found.complete == (not found.pods)
        capacity = await leases.capacity()
        await leases.waiting_pods.enqueue([verdict(event, capacity) for event in found.pods])

    assert [len(found) for found in rounds] == [1, 2, 4, 3, 0]
    assert [pod for found in rounds for pod in found] == [f"w{n:02d}" for n in range(10)]


async def test_while_an_offer_is_open_no_other_pod_is_offered_the_same(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("first"), queued("second"), queued("third"))
    await leases.release([PodUid("full-0")], reason="test")
    assert await offered(leases) == ["first"]

    second = await leases.waiting_pods.choose_offers(now=NOW + 1)
    late = await leases.waiting_pods.choose_offers(now=NOW + 3)
    await reserve(leases, reservation("first", share("a")))
    third = await leases.waiting_pods.choose_offers(now=NOW + 3)

    assert (second.pods, second.complete) == ((), False)
    assert [event.pod for event in late.pods] == ["second", "third", "first"]
    assert (third.pods, third.complete) == ((), True)


async def test_pods_that_cannot_fit_what_was_freed_are_left_alone(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, *(queued(f"w{n:02d}", units=16_000) for n in range(20)))

    await leases.release([PodUid("full-0")], reason="test")

    found = await leases.waiting_pods.choose_offers(now=NOW + 100)
    assert (found.pods, found.complete) == ((), True)


async def test_an_offer_without_an_answer_is_repeated(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("w"))
    await leases.release([PodUid("full-0")], reason="test")
    assert await offered(leases) == ["w"]
    assert await offered(leases, NOW + 1, spare=8) == []

    assert await offered(leases, NOW + 2, spare=8) == ["w"]

    await let_wait(leases, queued("w"))
    assert await offered(leases, NOW + 1000, spare=8) == []


async def test_added_capacity_is_offered_as_well(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("two", gpus=2, units=10_000))
    await leases.save_nodes([facts("b")])
    await leases.save_devices([report("b", [device("b", 0)])])
    assert await offered(leases) == []

    await leases.save_devices([report("b", [device("b", 0), device("b", 1)])])

    assert await offered(leases) == ["two"]


async def test_a_pod_is_offered_a_node_when_cpus_beside_its_gpus_become_free(
    leases: RedisLeases,
) -> None:
    async def report_cpus(cpus: int | None) -> list[str]:
        found = [device("a", n, numa=0, numa_cpus=cpus) for n in range(2)]
        await leases.save_devices([report("a", found)])
        return await offered(leases)

    await report_cpus(2)
    await let_wait(leases, queued("w", units=4_000))

    assert await report_cpus(1) == []
    assert await report_cpus(None) == []
    assert await report_cpus(3) == ["w"]


async def test_a_pod_without_gpu_is_offered_any_freed_node(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("plain", gpus=0))

    await leases.release([PodUid("full-0")], reason="test")

    assert await offered(leases) == ["plain"]


async def test_a_permanent_verdict_is_decided_again_only_when_the_cluster_changes(
    leases: RedisLeases,
) -> None:
    await fill(leases)
    await leases.waiting_pods.choose_offers(now=NOW)
    never = Refusal(reason="no such device", permanent=True)
    await leases.waiting_pods.enqueue(
        [WaitingPod(queued=queued("never"), refusal=never, capacity=await leases.capacity())]
    )

    await leases.release([PodUid("full-0")], reason="test")

    assert await offered(leases, spare=8) == []
    await leases.save_nodes([facts("b")])
    await leases.save_devices([report("b", [device("b", 0)])])
    assert await offered(leases, spare=8) == ["never"]
    assert await offered(leases, spare=8) == []


async def test_a_pod_that_holds_a_lease_waits_no_longer(leases: RedisLeases) -> None:
    await let_wait(leases, queued("p"), queued("q"))
    first = [w for w in await leases.waiting_pods.load([PodUid("p")]) if w.queued == queued("p")]
    assert len(first) == 1

    await reserve(leases, reservation("p", share("a")))
    waited = await leases.waiting_pods.enqueue([verdict(queued("p"), await leases.capacity())])

    assert [lease.pod for lease in waited.already_leased] == ["p"]
    assert [waiting.queued.pod for waiting in await leases.waiting_pods.load()] == ["q"]
    await leases.waiting_pods.remove([PodUid("q"), PodUid("unknown")])
    assert await leases.waiting_pods.load() == []


async def test_how_long_a_pod_waits_is_counted_from_its_first_verdict(leases: RedisLeases) -> None:
    capacity = await leases.capacity()
    for since in (NOW, NOW + 50):
        await leases.waiting_pods.enqueue(
            [replace(verdict(queued("p"), capacity), waiting_since=since)]
        )

    assert [w.waiting_since for w in await leases.waiting_pods.load()] == [NOW]


def low(pod: str, gpu: int = 0) -> Reservation:
    return structs.replace(reservation(pod, share("a", gpu)), priority=-1)


async def test_what_is_offered_to_a_higher_priority_is_reserved_for_it(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("high", priority=5))
    await leases.release([PodUid("full-0")], reason="test")

    before_the_offer = await refusal(leases, low("low"))
    assert await offered(leases) == ["high"]
    after_the_offer = await refusal(leases, low("low"), now=NOW + 1)
    equal = structs.replace(reservation("equal", share("a", 1)), priority=5)

    assert before_the_offer.reserved_for_other
    assert after_the_offer.reserved_for_other
    assert not (await refusal(leases, equal, now=NOW + 1)).reserved_for_other


@pytest.mark.nodes(a=2, b=2)
async def test_an_offer_reserves_no_node_of_which_nothing_was_freed(leases: RedisLeases) -> None:
    """The pod does not fit there, by its node selector for example."""
    await fill(leases)
    await let_wait(leases, queued("high", priority=5))
    await leases.release([PodUid("full-0")], reason="test")
    assert await offered(leases) == ["high"]

    on_freed_node = await refusal(leases, low("low"), now=NOW + 1)
    elsewhere = structs.replace(reservation("other", share("b"), node="b"), priority=-1)
    await reserve(leases, elsewhere, now=NOW + 1)

    assert on_freed_node.reserved_for_other


async def test_nothing_is_reserved_for_a_pod_once_its_offer_was_refused_or_has_expired(
    leases: RedisLeases,
) -> None:
    await fill(leases)
    await let_wait(leases, queued("high", priority=5))
    await leases.release([PodUid("full-0"), PodUid("full-4")], reason="test")
    assert await offered(leases) == ["high"]

    await reserve(leases, low("low"), now=NOW + 3)
    await leases.waiting_pods.enqueue(
        [verdict(queued("high", priority=5), await leases.capacity())]
    )

    await reserve(leases, low("lower", 1), now=NOW + 3)


async def test_what_does_not_fit_the_higher_priority_is_not_reserved_for_it(
    leases: RedisLeases,
) -> None:
    await fill(leases)
    await let_wait(leases, queued("high", units=16_000, priority=5))
    await leases.release([PodUid("full-0")], reason="test")

    await reserve(leases, low("low"))


async def test_a_pod_with_lower_priority_is_offered_what_the_higher_priority_leaves(
    leases: RedisLeases,
) -> None:
    await fill(leases)
    await let_wait(leases, queued("high", priority=5))
    await leases.release([PodUid("full-0"), PodUid("full-1")], reason="test")
    assert await offered(leases) == ["high"]
    kept = replace(verdict(queued("low", priority=-1), 0), capacity=RESERVED_FOR_OTHER)
    assert await leases.waiting_pods.enqueue([kept]) == WaitResult()

    await reserve(leases, structs.replace(reservation("high", share("a")), priority=5))

    assert await offered(leases) == ["low"]
    await reserve(leases, low("low"))
    assert (await leases.waiting_pods.choose_offers(now=NOW)).complete
    assert [lease.pod for lease in (await leases.waiting_pods.enqueue([kept])).already_leased] == [
        "low"
    ]
    late = replace(kept, queued=queued("late", priority=-1))
    assert await leases.waiting_pods.enqueue([late]) == WaitResult(stale=(PodUid("late"),))


@pytest.mark.nodes(a=4)
async def test_no_pod_that_fits_stays_without_an_offer_when_leases_end_one_after_the_other(
    leases: RedisLeases,
) -> None:
    await reserve(leases, *(reservation(f"full-{n}", share("a", n // 4, 4_000)) for n in range(16)))
    await let_wait(leases, *(queued(f"w{n:02d}") for n in range(16)))

    for n in range(16):
        await leases.release([PodUid(f"full-{n}")], reason="test")
        [pod] = await offered(leases, NOW + n)
        await reserve(leases, reservation(pod, share("a", n // 4, 4_000)))


async def test_a_verdict_from_before_the_last_change_of_a_node_is_decided_again(
    leases: RedisLeases,
) -> None:
    await fill(leases)
    before = await leases.capacity()
    await leases.set_cordoned({NodeName("a"): "its agent does not respond"})

    await leases.waiting_pods.enqueue([verdict(queued("w"), before)])

    assert await offered(leases, spare=8) == ["w"]
    assert await offered(leases, spare=8) == []


async def test_a_pod_whose_verdict_is_refreshed_is_offered_nothing(leases: RedisLeases) -> None:
    await let_wait(leases, queued("large", units=20_000, priority=5))
    await leases.save_nodes([replace(facts("a"), labels={"zone": "b"})])
    assert await offered(leases, spare=8) == ["large"]

    await reserve(leases, low("low"))


A, B, C = (Namespace(f"team-{letter}") for letter in "abc")


def held(pod: str, namespace: Namespace, gpu: int, mib: int = 4_000, cores: int = 0) -> Reservation:
    return structs.replace(
        reservation(pod, share("a", gpu, mib, cores), cpu=1), namespace=namespace
    )


def waits(pod: str, namespace: Namespace, at: float = 0.0, **amounts: int) -> PodQueued:
    return replace(queued(pod, **amounts), namespace=namespace, created_at=NOW + at)


async def save_budget(
    leases: RedisLeases,
    namespace: Namespace,
    *,
    share: int = 1,
    out: bool = False,
    at: float = 1.0,
    new_pods: str = "admit",
) -> None:
    """Say how a namespace's budget stands."""
    standing = BudgetChanged(
        namespace=namespace,
        state="exhausted" if out else "ok",
        previous_state="ok",
        lease_class="reclaimable" if out else "guaranteed",
        new_pods=new_pods,
        weight=share,
        reported_at=at,
    )
    await Preemptions(leases._connection).save_budget(standing)


async def test_a_new_pod_does_not_get_what_is_being_offered_to_another(leases: RedisLeases) -> None:
    await reserve(leases, *(held(f"full-{n}", A, n // 4) for n in range(8)))
    await let_wait(leases, waits("poor", B))
    await leases.release([PodUid("full-0"), PodUid("full-1")], reason="test")

    before = await refusal(leases, held("rich", A, 0))
    [event] = (await leases.waiting_pods.choose_offers(now=NOW, spare=0)).pods
    during = await refusal(leases, held("rich", A, 0))
    await reserve(leases, held("none", C, 0, 1_000))  # holds as little: need not wait
    await leases.waiting_pods.enqueue([verdict(waits("poor", B), await leases.capacity())])
    await reserve(leases, held("rich", A, 0, 3_000))  # the other has answered

    assert event.pod == "poor"
    assert before.reserved_for_other
    assert during.reserved_for_other


async def test_within_a_batch_a_namespace_stops_once_it_holds_more_than_one_that_waits(
    leases: RedisLeases,
) -> None:
    await reserve(leases, *(held(f"full-{n}", C, n // 4) for n in range(8)))
    await let_wait(leases, waits("b-1", B))
    await leases.release([PodUid(f"full-{n}") for n in range(3)], reason="test")

    outcomes = await leases.reserve(
        [held(f"a-{n}", A, 0, 4_000) for n in range(3)], now=NOW, ttl_s=30
    )

    assert [isinstance(each, ReservedLease) for each in outcomes] == [True, False, False]


async def test_the_use_of_namespaces_follows_every_lease(leases: RedisLeases) -> None:
    await reserve(leases, held("a-0", A, 0, 4_000, cores=30), held("b-0", B, 1, 16_000, 100))
    both = (await leases.totals.fair_share()).used
    gang = Gang(name="g", min_member=3)
    withheld = await leases.reserve_gang(gang, [held("c-0", C, 0)], now=NOW, ttl_s=30)
    await leases.release([PodUid("a-0")], reason="test")
    one = (await leases.totals.fair_share()).used
    await leases.expire(NOW + 1000)
    turns = await leases.totals.fair_share()

    assert not any(isinstance(each, ReservedLease) for each in withheld)
    assert both == {
        A: GpuAmount(cores_percent=30, memory_mib=4_000),
        B: GpuAmount(cores_percent=100, memory_mib=16_000),
    }
    assert one == {B: both[B]}
    assert turns.used == {}
    assert turns.total == GpuAmount(cores_percent=200, memory_mib=32_000)


async def test_a_rebuilt_ledger_has_the_same_use_and_weights(leases: RedisLeases) -> None:
    found = await reserve(leases, held("a-0", A, 0, 4_000, cores=30))
    await save_budget(leases, A, share=3)
    before = await leases.totals.fair_share()

    await rebuild(leases, kept=found, now=NOW + 1, force=True)
    after = await leases.totals.fair_share()

    assert after.used == before.used
    assert after.entitlements == before.entitlements == {A: Entitlement(weight=3)}


POOL = [Namespace(name) for name in ("n-1", "n-2", "n-3")]
PODS = st.lists(
    st.tuples(st.sampled_from(POOL), st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=12
)
HOLDS = st.lists(
    st.tuples(st.sampled_from(POOL), st.integers(1, 4), st.sampled_from((0, 30, 90))), max_size=4
)
RIGHTS = st.dictionaries(st.sampled_from(POOL), st.tuples(st.integers(1, 3), st.booleans()))


@settings(
    max_examples=tries(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(PODS, HOLDS, RIGHTS)
def test_the_ledger_offers_in_the_order_that_explain_shows(
    server: ValkeyServer,
    pods: list[tuple[Namespace, int, int]],
    holds: list[tuple[Namespace, int, int]],
    rights: dict[Namespace, tuple[int, bool]],
) -> None:
    async def both() -> tuple[list[str], list[str]]:
        await server.ready()
        async with ledger(server.url, {"a": 16}) as leases:
            for n, (namespace, quarters, cores) in enumerate(holds):
                await reserve(leases, held(f"h-{n}", namespace, n, 4_000 * quarters, cores=cores))
            for namespace, (weight, out) in rights.items():
                await save_budget(leases, namespace, share=weight, out=out)
            full = [held(f"full-{n}", C, n, 16_000) for n in range(4, 16)]
            await reserve(leases, *full)
            events = [
                waits(f"w-{n:02d}", namespace, at, units=16_000, priority=priority)
                for n, (namespace, priority, at) in enumerate(pods)
            ]
            await let_wait(leases, *events)
            explained = fair_order(events, await leases.totals.fair_share())
            await leases.release([each.pod for each in full[: len(pods)]], reason="test")
            offers = await leases.waiting_pods.choose_offers(now=NOW, spare=0)
            return [event.pod for event in offers.pods], [event.pod for event in explained]

    offered, explained = asyncio.run(both())

    assert offered == explained


async def endless(leases: RedisLeases, steps: int) -> AsyncIterator[list[Lease]]:
    """End leases by chance while two namespaces want ever more; yield all leases at each step."""
    draw = random.Random(34)  # noqa: S311
    numbers = iter(range(10_000))
    amounts = request(gpu(memory=4_000), resources={"cpu": 1, "pods": 1})

    def fresh(namespace: Namespace) -> PodQueued:
        number = next(numbers)
        at = NOW + number
        return pod_queued(f"p-{number:05d}", amounts, namespace=namespace, created_at=at)

    async with placers(leases, 2) as (one, other):
        for namespace in (A, B):
            await one.place_pods([fresh(namespace) for _ in range(60)])
        for step in range(steps):
            live = [lease async for page in leases.load_all() for lease in page]
            yield live
            ended = draw.choice(sorted(live, key=lambda lease: lease.pod))
            await leases.release([ended.pod], reason="it ended")
            # Its controller is quicker than any offer.
            await other.place_pods([fresh(ended.namespace)])
            async with asyncio.timeout(20):
                while not (
                    offers := await leases.waiting_pods.choose_offers(now=NOW + step, spare=0)
                ).complete:
                    await one.place_pods(offers.pods)


async def test_gpusharing_34_endless_demand_with_shares_2_to_1_converges_to_2_to_1(
    url: str,
) -> None:
    async with ledger(url, {"a": 6}) as leases:
        await save_budget(leases, A, share=2)
        seen: Counter[Namespace] = Counter()
        number = 0
        async for live in endless(leases, 140):
            number += 1
            if number == 1:
                assert {lease.namespace for lease in live} == {A}, (
                    "the first namespace has everything"
                )
            if number > 60:
                seen.update(lease.namespace for lease in live)
        taken = (await leases.totals.fair_share()).used
        used = await uses(leases)

    assert 2 * 0.95 <= seen[A] / seen[B] <= 2 * 1.05
    assert sum(each.memory_mib for each in taken.values()) == sum(
        use.memory_mib for use in used.values()
    )
    assert msgspec.to_builtins(taken[B])["memory_mib"] == 8 * 4_000


@pytest.mark.parametrize("new_pods", ["queue", "deny"])
async def test_a_budget_keeps_new_pods_waiting_even_if_they_were_admitted(
    url: str, new_pods: str
) -> None:
    async with ledger(url, {"a": 2}) as leases, placers(leases, 2) as (one, other):
        amounts = request(gpu(memory=4_000), resources={"cpu": 1, "pods": 1})
        pods = [pod_queued(f"p-{n}", amounts, namespace=A) for n in range(20)]
        await save_budget(leases, A, out=True, new_pods=new_pods)

        refused = await one.place_pods(pods)
        free = await other.place_pods([pod_queued("free", amounts, namespace=B)])
        before = await leases.waiting_pods.choose_offers(now=NOW, spare=0)
        await save_budget(leases, A, at=2.0)
        offered: list[str] = []
        async with asyncio.timeout(20):
            while not (found := await leases.waiting_pods.choose_offers(now=NOW, spare=0)).complete:
                offered += [event.pod for event in found.pods]
                await other.place_pods(found.pods)
        live = [lease async for page in leases.load_all() for lease in page]

    assert len(refused) == len(pods)
    assert all(isinstance(each, PlacementRefused) for each in refused)
    assert "is used up or invalid" in refused[0].refusal.reason  # type: ignore[union-attr]
    assert "leasehold budget team-a" in refused[0].refusal.hint  # type: ignore[union-attr]
    assert isinstance(free[0], PlacementChosen)
    assert before.pods == ()
    assert sorted(offered)[:7] == sorted(lease.pod for lease in live if lease.namespace == A)
    assert len(live) == 8
