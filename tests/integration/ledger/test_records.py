"""What was reserved is what is read, whatever texts and numbers it has; the rest goes on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.ledger.rows.joined_texts import joined_texts, split_texts
from shared.ledger.rows.record_sizes import MOST_AMOUNT, MOST_GROUPS_BYTES, MOST_LEASE_BYTES
from shared.model.device import DeviceUse
from shared.model.ledger import (
    GangIncomplete,
    LedgerSnapshot,
    NoCapacity,
    Reservation,
    Reserved,
    TooLarge,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.request import Gang
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    device,
    facts,
    ledger,
    queued,
    report,
    reservation,
    share,
    uses,
    verdict,
)

SEPARATORS = [
    "",
    "a",
    "a\n",
    "\na",
    "a|b",
    "|",
    "\0",
    "\\",
    "\\n",
    "\\e",
    "a\\p",
    "[]{}",
    "é|\U0001f600",
]
ODD = st.one_of(st.sampled_from(SEPARATORS), st.text(max_size=20))
LONG = st.sampled_from(["x" * 317, "é" * 5_000, "y" * 30_000, "|\n" * 35_000, "z" * 140_000])
TEXTS = st.one_of(ODD, ODD, ODD, LONG)
NUMBERS = st.sampled_from([-(2**63), -5, 0, 1, 100, 2**31, 2**33, MOST_AMOUNT, 2**63, 2**70])


@st.composite
def odd_reservations(draw: st.DrawFn) -> Reservation:
    """A reservation on node `a`, any part of which may be anything."""
    odd = structs.replace(share("a", mib=draw(NUMBERS), cores=draw(NUMBERS)), container=draw(TEXTS))
    return replace(
        reservation("odd", odd),
        pod=PodUid("odd" + draw(TEXTS)),
        namespace=Namespace(draw(TEXTS)),
        name=draw(TEXTS),
        resources=draw(st.dictionaries(TEXTS, NUMBERS, max_size=3)),
        anti_affinity_groups=tuple(draw(st.lists(TEXTS, max_size=4, unique=True))),
        gang=draw(TEXTS),
        memo=draw(TEXTS),
        trace=draw(TEXTS),
        weighed=draw(TEXTS),
    )


@given(st.lists(TEXTS))
def test_joined_texts_are_the_same_when_they_are_split(texts: list[str]) -> None:
    assert split_texts(joined_texts(texts)) == texts
    assert joined_texts(texts).count("\n") == max(0, len(texts) - 1)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(wanted=odd_reservations())
def test_an_odd_pod_is_leased_as_it_is_or_refused_and_others_are_placed(
    url: str, wanted: Reservation
) -> None:
    asyncio.run(_reserve_and_release(url, wanted))


async def _reserve_and_release(url: str, wanted: Reservation) -> None:
    async with ledger(url) as leases:
        start = await leases.snapshot()
        [odd, plain] = await leases.reserve(
            [wanted, reservation("plain", share("a", 1))], now=NOW, ttl_s=30
        )

        assert isinstance(plain, Reserved)
        assert isinstance(odd, Reserved | NoCapacity | TooLarge)
        if isinstance(odd, Reserved):
            assert await leases.load([wanted.pod]) == [odd.lease]
            assert odd.lease.anti_affinity_groups == wanted.anti_affinity_groups
            assert odd.lease.resources == wanted.resources
            assert odd.lease.gang == wanted.gang
        await assert_sound(leases)
        mirror = await _followed(leases, start)
        assert {
            each.uuid: each.ledger_use for each in mirror.nodes[NodeName("a")].devices
        } == await uses(leases)

        await leases.waiting_pods.remove([wanted.pod])
        await leases.release([wanted.pod, PodUid("plain")], reason="gone")
        assert await assert_sound(leases) == []
        assert {replace_fence(use) for use in (await uses(leases)).values()} == {DeviceUse()}
        assert await leases.totals.gangs() == {}
        assert (await leases.totals.fair_share()).used == {}


def replace_fence(use: DeviceUse) -> DeviceUse:
    return structs.replace(use, fence=0)


async def _followed(leases: RedisLeases, start: LedgerSnapshot) -> ClusterMirror:
    """Return a mirror that has followed the feed from the snapshot on."""
    mirror = ClusterMirror()
    mirror.reset(start.nodes)
    async for changes in leases.changes(start.position):
        mirror.apply(changes)
        break
    return mirror


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(node=ODD, gpu=st.one_of(ODD, st.sampled_from(["x" * 95])), resource=ODD)
def test_nodes_devices_and_resources_of_any_name_are_used_and_freed(
    url: str, node: str, gpu: str, resource: str
) -> None:
    asyncio.run(_use_and_free(url, NodeName(node), DeviceUuid(gpu), resource))


async def _use_and_free(url: str, node: NodeName, gpu: DeviceUuid, resource: str) -> None:
    async with ledger(url, {"plain": 1}) as leases:
        start = await leases.snapshot()
        await leases.save_nodes([NodeFacts(name=node, allocatable={"pods": 9, resource: 7})])
        await leases.save_devices([replace(report("a", [device("a", 0, uuid=gpu)]), node=node)])
        odd = replace(
            reservation("odd", share("a", device=gpu), node=node),
            resources={"pods": 1, resource: 5},
        )
        plain = reservation("plain", share("plain"), node="plain")

        [of_odd, of_plain] = await leases.reserve([odd, plain], now=NOW, ttl_s=30)

        assert isinstance(of_plain, Reserved)
        assert isinstance(of_odd, Reserved if gpu else NoCapacity)
        await assert_sound(leases)
        mirror = await _followed(leases, start)
        assert mirror.nodes[node].used_resources.get(resource, 0) == (
            5 if isinstance(of_odd, Reserved) else 0
        )
        await leases.release([odd.pod, plain.pod], reason="gone")
        assert await assert_sound(leases) == []


async def test_a_group_that_is_too_long_is_refused_with_its_size_and_the_limit(url: str) -> None:
    async with ledger(url) as leases:
        wanted = [reservation("p", share("a"), tag="g" * 30_000), reservation("q", share("a"))]

        [refused, other] = await leases.reserve(wanted, now=NOW, ttl_s=30)

        assert isinstance(refused, TooLarge)
        assert refused.reason == (
            "the anti-affinity groups would have 30000 bytes, and the ledger stores at most "
            f"{MOST_GROUPS_BYTES}"
        )
        assert isinstance(other, Reserved)
        assert len(await assert_sound(leases)) == 1


async def test_a_lease_of_a_thousand_containers_is_refused_and_of_its_gang_nothing_is_reserved(
    url: str,
) -> None:
    async with ledger(url) as leases:
        shares = [share("a", mib=1, container=f"{n:0200}") for n in range(1_000)]
        wanted = [reservation("small", share("a")), reservation("large", *shares)]

        outcomes = await leases.reserve_gang(
            Gang(name="g", min_member=2), wanted, now=NOW, ttl_s=30
        )

        assert isinstance(outcomes[0], GangIncomplete)
        assert isinstance(outcomes[1], TooLarge)
        assert f"stores at most {MOST_LEASE_BYTES}" in outcomes[1].reason
        assert await assert_sound(leases) == []


@pytest.mark.parametrize(
    ("one", "other"), [("a0\nprod/train", "prod/train"), ("a|b", "a"), ("", "a"), ("a", "a\n")]
)
async def test_groups_and_gangs_are_compared_as_a_whole(url: str, one: str, other: str) -> None:
    async with ledger(url, {"a": 1}) as leases:
        first = replace(
            reservation("p", share("a"), tag=one), gang=one, anti_affinity_groups=(one,)
        )
        second = replace(reservation("q", share("a"), tag=other), gang=other)

        outcomes = await leases.reserve([first, second], now=NOW, ttl_s=30)

        assert all(isinstance(outcome, Reserved) for outcome in outcomes)
        assert await _gang_counts(leases, [one, other]) == [int(bool(one)), int(bool(other))]
        again = replace(first, pod=PodUid("r"))
        [refused] = await leases.reserve([again], now=NOW, ttl_s=30)
        assert isinstance(refused, NoCapacity)
        assert refused.reason.startswith("a: anti-affinity of ")


async def _gang_counts(leases: RedisLeases, gangs: Sequence[str]) -> list[int]:
    return [len(await leases.load_gang(gang)) if gang else 0 for gang in gangs]


async def test_the_lease_of_a_copy_with_impossible_numbers_is_not_restored(url: str) -> None:
    async with ledger(url) as leases:
        [outcome] = await leases.reserve([reservation("p", share("a"))], now=NOW, ttl_s=30)
        assert isinstance(outcome, Reserved)
        lease = outcome.lease
        await leases.release([lease.pod], reason="to be restored")
        impossible: list[dict[str, Any]] = [
            {"fence": 2**53},
            {"slot": 2**31 - 1},
            {"memory_mib": -5},
            {"cores_percent": 101},
            {"memory_mib": 2**70},
        ]
        copies = [
            structs.replace(
                lease, pod=PodUid(f"p{n}"), shares=(structs.replace(lease.shares[0], **numbers),)
            )
            for n, numbers in enumerate(impossible)
        ]
        copies.append(structs.replace(lease, version=2**60))

        refused = await leases.restore([*copies, lease], now=NOW)

        assert {each.pod for each, _ in refused} == {copy.pod for copy in copies}
        assert await assert_sound(leases) == [lease]


async def test_a_waiting_pod_that_is_too_large_is_left_out_and_others_wait(url: str) -> None:
    async with ledger(url) as leases:
        capacity = await leases.capacity()
        large = replace(queued("large"), labels={"a": "x" * 2_000_000})

        await leases.waiting_pods.enqueue(
            [verdict(large, capacity), verdict(queued("small", units=16_001), capacity)]
        )

        assert await leases.waiting_pods.uids() == ["small"]


async def test_a_node_with_too_many_resources_leaves_others_alone(url: str) -> None:
    async with ledger(url, {}) as leases:
        many = {f"example.com/{n}": 1 for n in range(5_000)}

        await leases.save_nodes([facts("many", **many), facts("few")])

        assert [each.facts.name for each in (await leases.snapshot()).nodes] == ["few"]
