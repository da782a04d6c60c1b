"""Pods of kube-scheduler with required anti-affinity, before the watcher has reported them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm, LabelRequirement, NodeRevision
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NoCapacity, Reservation, ReservedLease
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    facts,
    queued,
    reservation,
    reservation_among,
    reserve,
    share,
    verdict,
)

QUIET = PodUid("quiet")
A = NodeName("a")


def term(key: str = HOSTNAME, **fields: Any) -> AntiAffinityTerm:
    selector = (LabelRequirement("app", "In", ("noisy",)),)
    given = {"namespaces": (Namespace("default"),)} | fields
    return AntiAffinityTerm(topology_key=key, selector=selector, **given)


pytestmark = pytest.mark.nodes(a=1, b=1)


async def start_quiet(
    leases: RedisLeases, of: AntiAffinityTerm | None = None, mib: int = 4_000
) -> Lease:
    """Reserve node `a` for a pod that kube-scheduler places."""
    wanted = structs.replace(reservation("quiet", share("a", mib=mib)), repels=(of or term(),))
    [lease] = await reserve(leases, wanted)
    return lease


async def read_version(leases: RedisLeases) -> int:
    return (await leases.snapshot()).version


async def choose(leases: RedisLeases, read: int, *nodes: str, pod: str = "plain") -> str:
    """Reserve for a pod what was chosen at a version; return the node, or why there is none."""
    candidates = [(node, [share(node)]) for node in nodes]
    wanted: Reservation = structs.replace(reservation_among(pod, candidates), read_version=read)
    [outcome] = await leases.reserve([wanted], now=NOW, ttl_s=30)
    if isinstance(outcome, ReservedLease):
        return outcome.lease.node
    assert isinstance(outcome, NoCapacity)
    return outcome.reason


async def terms_read(leases: RedisLeases) -> dict[str, tuple[AntiAffinityTerm, ...]]:
    nodes = (await leases.snapshot()).nodes
    return {node.facts.name: node.facts.anti_affinity for node in nodes}


async def report(leases: RedisLeases, *pods: PodUid, revision: int = 5) -> None:
    """Save what a watcher reports of node `a`."""
    seen = replace(facts("a"), anti_affinity=(term(),) if pods else (), repelling_pods=pods)
    await leases.save_nodes([seen], [NodeRevision(5, revision)])


async def test_a_choice_made_without_knowledge_of_the_pod_is_given_another_node_alone(
    leases: RedisLeases,
) -> None:
    read = await read_version(leases)
    await start_quiet(leases)

    assert await choose(leases, read, "a") == "a: anti-affinity-unknown"
    assert await choose(leases, read, "a", "b") == "b"
    assert await choose(leases, await read_version(leases), "a", pod="other") == "a"
    await assert_sound(leases)


@pytest.mark.parametrize("wide", [term("zone"), term(namespaces=(), all_namespaces=True)])
async def test_a_choice_made_without_knowledge_of_a_pod_that_repels_others_elsewhere_is_repeated(
    leases: RedisLeases, wide: AntiAffinityTerm
) -> None:
    read = await read_version(leases)
    await start_quiet(leases, wide)

    assert await choose(leases, read, "b") == "b: anti-affinity-unknown"


async def test_who_follows_the_ledger_reads_the_anti_affinity_until_the_lease_ends(
    leases: RedisLeases,
) -> None:
    position = (await leases.snapshot()).position
    await start_quiet(leases)
    started = await terms_read(leases)
    await leases.release([QUIET], reason="it was not bound")

    changes = [change async for batch in _first(leases, position) for change in batch]

    assert started == {"a": (term(),), "b": ()}
    assert [node.facts.anti_affinity for each in changes for node in each.nodes] == [(term(),), ()]
    assert await terms_read(leases) == {"a": (), "b": ()}


async def _first(leases: RedisLeases, position: str) -> AsyncIterator[Any]:
    async with asyncio.timeout(30):
        async for batch in leases.changes(position):
            yield batch
            return


async def test_what_the_watcher_reports_takes_the_place_of_the_anti_affinity_of_the_reservation(
    leases: RedisLeases,
) -> None:
    read = await read_version(leases)
    await start_quiet(leases, term(namespaces=(), all_namespaces=True))
    await report(leases, revision=6)
    unreported = await terms_read(leases)
    await report(leases, QUIET, revision=7)
    reported = await terms_read(leases)
    await report(leases, revision=6)

    assert unreported["a"] == (term(namespaces=(), all_namespaces=True),)
    assert reported["a"] == (await terms_read(leases))["a"] == (term(),)
    assert await choose(leases, read, "a") == "a: anti-affinity-unknown"
    assert await choose(leases, await read_version(leases), "a") == "a"


async def test_a_report_counts_although_a_pod_with_the_same_term_ran_there_before(
    leases: RedisLeases,
) -> None:
    await report(leases, PodUid("first"), revision=6)
    await start_quiet(leases, term("zone"))

    await report(leases, PodUid("first"), QUIET, revision=7)

    assert await terms_read(leases) == {"a": (term(),), "b": ()}


async def test_an_expired_reservation_repels_nothing_any_more(leases: RedisLeases) -> None:
    read = await read_version(leases)
    await start_quiet(leases, term("zone"))

    await leases.expire(NOW + 31)

    assert await terms_read(leases) == {"a": (), "b": ()}
    assert await choose(leases, read, "a") == "a"


async def test_the_anti_affinity_of_pods_that_start_on_one_node_is_bounded(
    leases: RedisLeases,
) -> None:
    many = tuple(Namespace(f"{number:060}") for number in range(500))
    large = tuple(term(namespaces=many) for _ in range(4))
    outcomes = [
        await leases.reserve(
            [structs.replace(reservation(f"q{number}", share("a", mib=100)), repels=large)],
            now=NOW,
            ttl_s=30,
        )
        for number in range(4)
    ]

    assert [isinstance(each, ReservedLease) for [each] in outcomes] == [True, True, False, False]
    [refused] = outcomes[-1]
    assert isinstance(refused, NoCapacity)
    assert refused.reason.startswith(
        "a: the anti-affinity of pods that are being bound there would"
    )
    assert refused.reason.endswith("bytes, and the ledger stores at most 262144")


@pytest.mark.parametrize("ends", ["released", "reported"])
async def test_a_pod_that_was_repelled_from_all_nodes_is_decided_again_once_that_ends(
    leases: RedisLeases, ends: str
) -> None:
    await reserve(leases, reservation("large", share("a", mib=14_000)))
    await start_quiet(leases, term("zone", namespaces=(), all_namespaces=True), mib=1_000)
    await leases.waiting_pods.choose_offers(now=NOW)
    waiting = verdict(queued("plain", units=4_000), await leases.capacity())
    await leases.waiting_pods.enqueue([waiting])
    before = await leases.waiting_pods.choose_offers(now=NOW)

    if ends == "released":
        await leases.release([QUIET], reason="it was not bound")
    else:
        await report(leases, QUIET)
    after = await leases.waiting_pods.choose_offers(now=NOW)

    assert before.pods == ()
    assert [pod.pod for pod in after.pods] == ["plain"]
