"""Several devices of one container: within one scope, and linked as well as may be."""

import random
from itertools import combinations
from typing import Any

from shared.model.device import Device
from shared.model.names import DeviceUuid, NodeName
from shared.model.placement import Refusal
from shared.model.request import DeviceOrder, PodRequest, TopologyScope
from shared.placing.choice.container_choice import best_linked_set
from shared.placing.mirror.node_mirror import MirroredNode
from tests.support.build import device, gpu, ledger_node, request
from tests.support.placer.placing import Cluster, index_of
from tests.support.placer.placing import chosen_devices as chosen

BRIDGE, SWITCH, NVLINK = 30, 50, 250


def cards(count: int, links: dict[tuple[int, int], int], **fields: Any) -> list[Device]:
    """Devices of which some pairs are linked better than by the host's bridge."""
    return [
        device(
            f"GPU-{one}",
            one,
            links={
                DeviceUuid(f"GPU-{other}"): links.get((min(one, other), max(one, other)), BRIDGE)
                for other in range(count)
                if other != one
            },
            **fields,
        )
        for one in range(count)
    ]


def asking(gpus: int, **fields: Any) -> PodRequest:
    return request(gpu(gpus=gpus, memory=1000), **({"device_order": DeviceOrder.FIRST} | fields))


def test_the_pair_with_the_best_link_comes_before_the_order_of_devices() -> None:
    four = cards(4, {(1, 3): NVLINK, (0, 2): SWITCH})

    assert chosen(asking(2), *four) == [1, 3]
    assert chosen(asking(2, device_order=DeviceOrder.LAST), *four) == [3, 1]
    assert chosen(asking(2, prefer_links=False), *four) == [0, 1]
    assert chosen(asking(4), *four) == [0, 1, 2, 3]
    assert chosen(asking(1), *four) == [0]


def test_a_device_of_unknown_location_is_in_no_scope_and_the_refusal_names_it() -> None:
    known, unknown = device("GPU-0", 0, numa=0), device("GPU-1", 1)

    refusal = Cluster(ledger_node("n1", known, unknown)).place(
        asking(2, topology_scope=TopologyScope.NUMA)
    )

    assert isinstance(refusal, Refusal)
    assert refusal.permanent
    assert [(v.index, v.reason) for v in refusal.nearest_nodes[0].devices] == [
        (1, "its NUMA node is not known, and the pod requires all its GPUs on one")
    ]
    assert chosen(asking(1, topology_scope=TopologyScope.NUMA), known, unknown) == [0]
    assert chosen(asking(1, topology_scope=TopologyScope.NUMA), unknown) == []


def test_devices_that_fit_in_different_scopes_are_counted_in_the_refusal() -> None:
    apart = [device(f"GPU-{n}", n, pcie=f"pci{n}") for n in range(2)]

    refusal = Cluster(ledger_node("n1", *apart)).place(asking(2, topology_scope=TopologyScope.PCIE))

    assert isinstance(refusal, Refusal)
    assert refusal.counts == (("GpusDoNotFitTogether", 1),)
    assert "on one PCIe root" in refusal.reason
    assert refusal.permanent


def mirrored(node_devices: list[Device]) -> MirroredNode:
    mirror = index_of(ledger_node("n1", *node_devices)).mirror
    return mirror.nodes[NodeName("n1")]


def test_the_greedy_search_over_sixteen_devices_finds_the_best_set() -> None:
    boards = {(a, b): NVLINK for a, b in combinations(range(16), 2) if a // 8 == b // 8}
    node = mirrored(cards(16, boards))

    places = best_linked_set(asking(4), node.devices[5:], 4)

    assert places is not None
    assert {node.devices[5 + place].index // 8 for place in places} == {1}


def test_the_greedy_search_reaches_95_percent_of_the_best_links() -> None:
    dice = random.Random(3)  # noqa: S311
    found = best = 0
    for _ in range(30):
        links = {pair: dice.choice((10, 30, 50, 150)) for pair in combinations(range(9), 2)}
        node = mirrored(cards(9, links))
        places = best_linked_set(asking(3), node.devices, 3)
        assert places is not None
        found += sum(links[pair] for pair in combinations(places, 2))
        best += max(
            sum(links[pair] for pair in combinations(three, 2))
            for three in combinations(range(9), 3)
        )

    assert found > 0.95 * best
