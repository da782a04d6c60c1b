"""Ports of nodes in the ledger: of two pods that reserve one at once, one gets it."""

import asyncio
from dataclasses import replace

from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.leases.ledger import NoCapacity, Reservation, ReservedLease
from shared.model.names import NodeName, PodUid
from shared.model.requests.host_ports import HOST_PORT_PARTS, host_ports
from shared.model.requests.request import NodeRequirements
from tests.support.placer.ledger import (
    NOW,
    assert_sound,
    facts,
    queued,
    refusal,
    reservation,
    reserve,
    share,
    verdict,
)

PORT = "host port TCP/80"
ANYWHERE = ("TCP", 80, "")


def on_ports(pod: str, *ports: tuple[str, int, str]) -> Reservation:
    wanted = reservation(pod, share("a"))
    return structs.replace(wanted, resources=wanted.resources | dict(host_ports(ports)))


async def test_one_of_twenty_pods_gets_a_port(leases: RedisLeases) -> None:
    wanted = [on_ports(f"p{number}", ANYWHERE) for number in range(20)]

    outcomes = await asyncio.gather(
        *(leases.reserve([reservation], now=NOW, ttl_s=30) for reservation in wanted)
    )

    granted = [outcome for [outcome] in outcomes if isinstance(outcome, ReservedLease)]
    refused = [outcome for [outcome] in outcomes if isinstance(outcome, NoCapacity)]
    [lease] = await assert_sound(leases)
    assert (len(granted), len(refused)) == (1, 19)
    assert lease.resources[PORT] == HOST_PORT_PARTS
    assert refused[0].nodes[NodeName("a")].used[PORT] == HOST_PORT_PARTS
    assert f"resource:{PORT}" in refused[0].reason

    await leases.release([lease.pod], reason="it ended")
    await reserve(leases, on_ports("next", ANYWHERE))


async def test_a_port_of_one_address_conflicts_with_the_same_and_with_all(
    leases: RedisLeases,
) -> None:
    first = ("TCP", 80, "10.0.0.1")
    other = ("TCP", 80, "10.0.0.2")
    await reserve(leases, on_ports("first", first), on_ports("other", other))

    await refusal(leases, on_ports("same", first))
    await refusal(leases, on_ports("all", ANYWHERE))
    await leases.release([PodUid("first"), PodUid("other")], reason="they ended")
    await reserve(leases, on_ports("all", ANYWHERE))
    await refusal(leases, on_ports("one", first))


async def test_ports_of_pods_without_a_lease_are_taken_until_the_watcher_says_otherwise(
    leases: RedisLeases,
) -> None:
    node = facts("a")
    await leases.save_nodes([replace(node, used_by_others={PORT: HOST_PORT_PARTS})])
    await refusal(leases, on_ports("p", ANYWHERE))
    event = queued("p")
    needs = NodeRequirements(host_ports=host_ports([ANYWHERE]))
    waits = replace(event, request=structs.replace(event.request, node_requirements=needs))
    await leases.waiting_pods.enqueue([verdict(waits, await leases.capacity())])
    assert (await leases.waiting_pods.choose_offers(now=NOW)).pods == ()

    await leases.save_nodes([node])

    offered = await leases.waiting_pods.choose_offers(now=NOW)
    assert [pod.pod for pod in offered.pods] == [PodUid("p")]
    await reserve(leases, on_ports("p", ANYWHERE))


async def test_a_port_that_a_lease_takes_is_kept_when_the_facts_of_its_node_change(
    leases: RedisLeases,
) -> None:
    await reserve(leases, on_ports("p", ANYWHERE))

    await leases.save_nodes([facts("a", memory=1 << 30)])

    await refusal(leases, on_ports("q", ANYWHERE))
    await assert_sound(leases)
