"""Waiting pods: which are offered freed capacity, in which order, and how often."""

from dataclasses import replace

import pytest

from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import PodQueued
from shared.model.ledger import RESERVED_FOR_OTHER, NoCapacity, Reservation, WaitingPod, WaitResult
from shared.model.names import NodeName, PodUid
from shared.model.placement import Refusal
from tests.support.placer.ledger import (
    NOW,
    device,
    facts,
    queued,
    report,
    reservation,
    reserve,
    share,
    verdict,
)


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
    return replace(reservation(pod, share("a", gpu)), priority=-1)


async def test_what_is_offered_to_a_higher_priority_is_reserved_for_it(leases: RedisLeases) -> None:
    await fill(leases)
    await let_wait(leases, queued("high", priority=5))
    await leases.release([PodUid("full-0")], reason="test")

    [before_the_offer] = await leases.reserve([low("low")], now=NOW, ttl_s=30)
    assert await offered(leases) == ["high"]
    [after_the_offer] = await leases.reserve([low("low")], now=NOW + 1, ttl_s=30)
    [equal] = await leases.reserve(
        [replace(reservation("equal", share("a", 1)), priority=5)], now=NOW + 1, ttl_s=30
    )

    assert isinstance(before_the_offer, NoCapacity)
    assert before_the_offer.reserved_for_other
    assert isinstance(after_the_offer, NoCapacity)
    assert after_the_offer.reserved_for_other
    assert isinstance(equal, NoCapacity)
    assert not equal.reserved_for_other


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

    await reserve(leases, replace(reservation("high", share("a")), priority=5))

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
