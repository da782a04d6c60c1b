"""Placing by example: the items of Volcano's acceptance list that placing decides."""

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from shared.model.devices.device import Device, DeviceMode, numa_cpus_name
from shared.model.leases.ledger import LedgerNode, reservation_for
from shared.model.names import DeviceUuid, NodeName
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import (
    DeviceOrder,
    DeviceSelection,
    PodRequest,
    SharingPolicy,
    TopologyScope,
)
from shared.placing.choice.container_choice import best_linked_set
from shared.placing.mirror.node_mirror import MirroredNode
from tests.support.build import (
    V100_MIB,
    device,
    devices,
    gpu,
    ledger_node,
    pod_queued,
    request,
    use,
)
from tests.support.placer.placing import Cluster, index_of, placed, refused
from tests.support.placer.placing import chosen_devices as chosen

SHARED = {"slotted": False}


def gpushare(*memories: int, init: tuple[int, ...] = (), **fields: Any) -> PodRequest:
    containers = [gpu(f"i{n}", 1, units, init=True, **SHARED) for n, units in enumerate(init)]
    containers += [gpu(f"c{n}", 1, units, **SHARED) for n, units in enumerate(memories)]
    return request(
        *containers, same_device=True, device_order=DeviceOrder.FIRST, triggers=(), **fields
    )


def eight_cards(**fields: Any) -> LedgerNode:
    return ledger_node("n1", *devices(8, memory_mib=11178, **fields))


def two_cards(**fields: Any) -> LedgerNode:
    return ledger_node("n1", device("GPU-aaaa", 0, **fields), device("GPU-bbbb", 1, **fields))


def test_item_03_successive_gpushare_pods_share_card_0() -> None:
    cluster = Cluster(eight_cards())

    assert [cluster.indices(gpushare(1024)) for _ in range(2)] == [[0], [0]]


def test_item_04_a_pod_that_no_longer_fits_card_0_gets_card_1() -> None:
    cluster = Cluster(eight_cards())
    cluster.place(gpushare(1024))

    assert cluster.indices(gpushare(11178)) == [1]


def test_item_04_containers_of_one_pod_never_split_over_cards() -> None:
    refusal = refused(gpushare(10000, 10000), eight_cards())

    assert refusal.permanent
    assert refusal.reason == "0/1 nodes are available: 1 Insufficient GPU memory."


def test_item_05_init_containers_count_by_the_largest() -> None:
    cluster = Cluster(ledger_node("n1", device(memory_mib=5000)))

    assert cluster.indices(gpushare(init=(5000, 3000))) == [0, 0]
    assert cluster.indices(gpushare(1)) == []


def test_item_06_unhealthy_cards_are_never_chosen() -> None:
    two_unhealthy = [device(f"GPU-{n}", n, healthy=n > 1) for n in range(4)]

    assert Cluster(ledger_node("n1", *two_unhealthy)).indices(gpushare(1024)) == [2]


def test_item_06_cordoned_cards_are_never_chosen() -> None:
    cluster = Cluster(ledger_node("n1", *devices(4), excluded_devices=(0, 1)))

    assert cluster.indices(gpushare(1024)) == [2]


def test_item_07_whole_cards_are_idle_distinct_and_ascending() -> None:
    cluster = Cluster(eight_cards())
    cluster.place(gpushare(1024))
    number = request(gpu(gpus=2, whole=True), device_order=DeviceOrder.LAST)

    assert cluster.indices(number) == [6, 7]
    assert cluster.indices(number) == [4, 5]
    assert cluster.indices(gpushare(11178)) == [1]


def test_item_10_one_pod_one_card_by_the_memory_rule() -> None:
    assert Cluster(eight_cards()).indices(gpushare(1000, 2000)) == [0, 0]


def test_item_18_two_gpus_are_two_different_cards_in_order_of_choice() -> None:
    placement = placed(request(gpu(gpus=2, memory=3000, cores_percent=50)), two_cards())

    assert [(s.device, s.memory_mib, s.cores_percent) for s in placement.shares] == [
        ("GPU-bbbb", 3000, 50),
        ("GPU-aaaa", 3000, 50),
    ]


@pytest.mark.parametrize(
    ("wanted", "memory_mib"),
    [
        pytest.param(gpu(), V100_MIB, id="item 19: all of the card"),
        pytest.param(gpu(memory_percent=20), 6553, id="item 20: a percentage"),
        pytest.param(gpu(memory=3000, memory_percent=33), 10813, id="item 21: percentage wins"),
    ],
)
def test_items_19_to_21_a_share_has_the_requested_memory(wanted: Any, memory_mib: int) -> None:
    placement = placed(request(wanted), two_cards())

    assert [(s.memory_mib, s.cores_percent) for s in placement.shares] == [(memory_mib, 0)]


def test_memory_units_and_percentages_count_in_units_of_the_node() -> None:
    node = ledger_node("n1", device(memory_mib=32760, unit_mib=10))
    by_units = Cluster(node).place(request(gpu(memory=300)))
    by_percent = Cluster(node).place(request(gpu(memory_percent=33)))

    assert isinstance(by_units, Placement)
    assert isinstance(by_percent, Placement)
    assert by_units.shares[0].memory_mib == 3000
    assert by_percent.shares[0].memory_mib == 3276 * 33 // 100 * 10


def test_a_percentage_below_one_unit_gets_a_unit_as_no_share_can_be_without_memory() -> None:
    coarse = ledger_node("n1", device(memory_mib=16_384, unit_mib=1024))

    assert [
        share.memory_mib for share in placed(request(gpu(memory_percent=5)), coarse).shares
    ] == [1024]


def test_a_fraction_below_one_percent_fits_where_less_than_one_percent_is_free() -> None:
    wanted = gpu(memory_percent=1, memory_billionths=1_000_000)
    nearly_full = ledger_node("n1", (device(), use(V100_MIB - 100)))

    assert [share.memory_mib for share in placed(request(wanted), nearly_full).shares] == [32]


def test_item_22_all_cores_require_an_idle_card_and_make_it_exclusive() -> None:
    cluster = Cluster(ledger_node("n1", device()))

    assert cluster.indices(
        request(gpu(memory=10, cores_percent=100, sharing=SharingPolicy.EXCLUSIVE))
    ) == [0]
    assert cluster.indices(request(gpu(memory=10, cores_percent=0))) == []
    assert cluster.indices(request(gpu(memory=10, cores_percent=1))) == []


def test_item_22_more_than_all_cores_never_fit() -> None:
    refusal = refused(request(gpu(memory=10, cores_percent=101)), two_cards())

    assert refusal.permanent


def test_item_23_the_eleventh_share_of_ten_is_refused() -> None:
    cluster = Cluster(ledger_node("n1", device(slots=10)))
    wanted = request(gpu(memory=100))

    assert [cluster.indices(wanted) for _ in range(10)] == [[0]] * 10
    refusal = cluster.place(wanted)
    assert isinstance(refusal, Refusal)
    assert refusal.nearest_nodes[0].devices[0].reason == "all 10 of its shares are taken"


def test_item_24_more_gpus_than_cards_names_the_check() -> None:
    refusal = refused(request(gpu(gpus=3, memory=10)), two_cards())

    assert refusal.counts == (("NotEnoughGpus", 1),)
    assert "3 different GPUs requested, 2 present" in refusal.nearest_nodes[0].reason
    assert "in container main set volcano.sh/vgpu-number: 2," in refusal.hint
    assert refusal.permanent


@pytest.mark.parametrize(
    ("selection", "fits"),
    [
        (DeviceSelection(types=("v100",)), True),
        (DeviceSelection(types=("NVIDIA-tesla",)), True),
        (DeviceSelection(types=("A100", "V100")), True),
        (DeviceSelection(types=("A100",)), False),
        (DeviceSelection(not_types=("V100",)), False),
        (DeviceSelection(not_types=("A100",)), True),
    ],
)
def test_item_25_types_are_contained_whatever_the_case(
    selection: DeviceSelection, fits: bool
) -> None:
    assert bool(Cluster(two_cards()).indices(request(gpu(memory=1), selection=selection))) == fits


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (DeviceSelection(uuids=("GPU-aaaa",)), [0]),
        (DeviceSelection(not_uuids=("GPU-bbbb",)), [0]),
        (DeviceSelection(uuids=("GPU-aaaa",), not_uuids=("GPU-aaaa",)), []),
        (DeviceSelection(uuids=("gpu-AAAA",)), []),
    ],
)
def test_item_26_uuids_match_exactly_and_deny_wins(
    selection: DeviceSelection, indices: list[int]
) -> None:
    assert Cluster(two_cards()).indices(request(gpu(memory=1), selection=selection)) == indices


@pytest.mark.parametrize(
    ("mode", "node_mode", "fits"),
    [
        ("mig", DeviceMode.HAMI_CORE, False),
        ("hami-core", DeviceMode.MIG, False),
        ("HAMi-core", DeviceMode.HAMI_CORE, False),
        ("", DeviceMode.HAMI_CORE, False),
        ("hami-core", DeviceMode.HAMI_CORE, True),
        (None, DeviceMode.HAMI_CORE, True),
    ],
)
def test_item_27_a_required_mode_must_be_the_mode_of_the_node(
    mode: str | None, node_mode: DeviceMode, fits: bool
) -> None:
    wanted = request(gpu(memory=1), selection=DeviceSelection(mode=mode))

    assert bool(Cluster(two_cards(mode=node_mode)).indices(wanted)) == fits


def test_item_28_pods_of_a_spread_group_never_share_a_card() -> None:
    cluster = Cluster(two_cards())
    wanted = request(gpu(memory=1), anti_affinity_groups=("default/group",))

    assert [cluster.indices(wanted) for _ in range(3)] == [[1], [0], []]


@pytest.mark.parametrize(
    ("order", "indices"),
    [
        (DeviceOrder.LAST, [[1], [1]]),
        (DeviceOrder.FIRST, [[0], [0]]),
        (DeviceOrder.BINPACK, [[0], [0]]),
        (DeviceOrder.SPREAD, [[0], [1]]),
    ],
)
def test_item_29_the_policy_orders_the_cards(order: DeviceOrder, indices: list[list[int]]) -> None:
    cluster = Cluster(two_cards())
    wanted = request(gpu(memory=100), device_order=order)

    assert [cluster.indices(wanted) for _ in range(2)] == indices


def test_item_30_containers_of_one_pod_may_share_a_card() -> None:
    placement = placed(
        request(gpu("a", memory=3000, cores_percent=10), gpu("b", memory=5000, cores_percent=20)),
        two_cards(),
    )

    assert [(s.container, s.device, s.memory_mib) for s in placement.shares] == [
        ("a", "GPU-bbbb", 3000),
        ("b", "GPU-bbbb", 5000),
    ]


def test_item_34_a_node_without_devices_or_without_an_agent_never_gets_a_vgpu_pod() -> None:
    cluster = Cluster(ledger_node("bare"), ledger_node("agentless", device(), served=()))

    refusal = cluster.place(request(gpu(memory=1)))

    assert isinstance(refusal, Refusal)
    assert dict(refusal.counts) == {"NoGpus": 1, "ResourceNotServed": 1}


def test_a_pod_without_a_gpu_prefers_nodes_without_devices() -> None:
    cluster = Cluster(ledger_node("gpus", device()), ledger_node("bare"))

    placement = cluster.place(request())

    assert isinstance(placement, Placement)
    assert placement.node == "bare"
    assert placement.shares == ()


def one(order: DeviceOrder, weights: tuple[int, int, int] = (0, 0, 1), **fields: Any) -> PodRequest:
    return request(gpu(memory=1000), device_order=order, allocation_weights=weights, **fields)


def cards(*uses: Any) -> list[Any]:
    return [(device(f"GPU-{n}", n), used) for n, used in enumerate(uses)]


@pytest.mark.parametrize(
    ("weights", "least", "most"),
    [
        pytest.param((0, 0, 1), 2, 0, id="memory"),
        pytest.param((0, 1, 0), 0, 1, id="cores"),
        pytest.param((1, 0, 0), 1, 2, id="slots"),
        pytest.param((1, 1, 1), 2, 1, id="all alike"),
    ],
)
def test_orders_by_allocated_fraction_weigh_slots_cores_and_memory(
    weights: tuple[int, int, int], least: int, most: int
) -> None:
    node_devices = cards(use(16_000, 10, 2), use(8_000, 60, 1), use(1_000, 20, 3))

    assert chosen(one(DeviceOrder.LEAST_ALLOCATED, weights), *node_devices) == [least]
    assert chosen(one(DeviceOrder.MOST_ALLOCATED, weights), *node_devices) == [most]


@pytest.mark.parametrize(
    ("order", "indices"),
    [
        (DeviceOrder.LAST, [1, 1]),
        (DeviceOrder.FIRST, [0, 0]),
        (DeviceOrder.BINPACK, [0, 0]),
        (DeviceOrder.SPREAD, [0, 1]),
        (DeviceOrder.MOST_ALLOCATED, [0, 0]),
        (DeviceOrder.LEAST_ALLOCATED, [0, 1]),
        (DeviceOrder.TIGHTEST, [0, 0]),
    ],
)
def test_item_29_the_order_for_the_second_container_counts_the_first(
    order: DeviceOrder, indices: list[int]
) -> None:
    pair = request(gpu("a", memory=1000), gpu("b", memory=1000), device_order=order)

    assert chosen(pair, *cards(use(0, 0, 0), use(0, 0, 0))) == indices


def test_item_22_an_exclusive_container_shares_its_card_with_no_container_of_its_pod() -> None:
    alone = {"cores_percent": 100, "sharing": SharingPolicy.EXCLUSIVE}
    both = request(gpu("a", memory=10, **alone), gpu("b", memory=10))
    late = request(gpu("b", memory=10), gpu("a", memory=10, **alone))

    assert chosen(both, device("GPU-0", 0), device("GPU-1", 1)) == [1, 0]
    assert chosen(late, device("GPU-0", 0), device("GPU-1", 1)) == [1, 0]
    assert chosen(both, device("GPU-0", 0)) == []


def test_item_23_containers_of_one_pod_take_a_slot_each() -> None:
    pair = request(gpu("a", memory=10), gpu("b", memory=10))

    assert chosen(pair, device("GPU-0", 0, slots=2)) == [0, 0]
    assert chosen(pair, device("GPU-0", 0, slots=1)) == []


def test_item_24_each_container_may_have_as_many_gpus_as_the_node_has_cards() -> None:
    two = [device(f"GPU-{n}", n) for n in range(2)]

    assert chosen(request(gpu("a", 2, 10), gpu("b", 2, 10)), *two) == [1, 0, 1, 0]
    refusal = refused(request(gpu("a", 1, 10), gpu("b", 3, 10)), ledger_node("n1", *two))
    assert refusal.counts == (("NotEnoughGpus", 1),)


def test_item_28_containers_of_one_pod_of_a_spread_group_may_share_a_card() -> None:
    pair = request(gpu("a", memory=10), gpu("b", memory=10), anti_affinity_groups=("default/g",))

    assert chosen(pair, *cards(use(0, 0, 0), use(0, 0, 0))) == [1, 1]
    assert chosen(pair, *cards(use(0, 0, 0), use(10, 0, 1, 1, "default/g"))) == [0, 0]


def test_tightest_is_by_cores_then_by_memory_then_by_index() -> None:
    tightest = DeviceOrder.TIGHTEST

    assert chosen(one(tightest), *cards(use(9_000, 10), use(1_000, 50))) == [1]
    assert chosen(one(tightest), *cards(use(1_000, 50), use(9_000, 50))) == [1]
    assert chosen(one(tightest), *cards(use(1_000, 50), use(1_000, 50))) == [0]


BRIDGE = 30
SWITCH = 50
NVLINK = 250


def linked(count: int, links: dict[tuple[int, int], int], **fields: Any) -> list[Device]:
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


def asking(gpus: int, exclusive_cpus: int = 0, **fields: Any) -> PodRequest:
    container = gpu(gpus=gpus, memory=1000, exclusive_cpus=exclusive_cpus)
    return request(container, **({"device_order": DeviceOrder.FIRST} | fields))


def test_the_pair_with_the_best_link_comes_before_the_order_of_devices() -> None:
    four = linked(4, {(1, 3): NVLINK, (0, 2): SWITCH})

    assert chosen(asking(2), *four) == [1, 3]
    assert chosen(asking(2, device_order=DeviceOrder.LAST), *four) == [3, 1]
    assert chosen(asking(2, prefer_links=False), *four) == [0, 1]
    assert chosen(asking(4), *four) == [0, 1, 2, 3]
    assert chosen(asking(1), *four) == [0]


def test_a_device_of_unknown_location_is_in_no_scope_and_the_refusal_names_it() -> None:
    known = device("GPU-0", 0, numa=0)
    unknown = device("GPU-1", 1)

    refusal = refused(
        asking(2, topology_scope=TopologyScope.NUMA), ledger_node("n1", known, unknown)
    )

    assert refusal.permanent
    assert [(v.index, v.reason) for v in refusal.nearest_nodes[0].devices] == [
        (1, "its NUMA node is not known, and the pod requires all its GPUs on one")
    ]
    assert chosen(asking(1, topology_scope=TopologyScope.NUMA), known, unknown) == [0]
    assert chosen(asking(1, topology_scope=TopologyScope.NUMA), unknown) == []


def test_devices_that_fit_in_different_scopes_are_counted_in_the_refusal() -> None:
    apart = [device(f"GPU-{n}", n, pcie=f"pci{n}") for n in range(2)]

    refusal = refused(asking(2, topology_scope=TopologyScope.PCIE), ledger_node("n1", *apart))

    assert refusal.counts == (("GpusDoNotFitTogether", 1),)
    assert "on one PCIe root" in refusal.reason
    assert refusal.permanent


def test_a_pod_gets_no_gpu_where_the_kubelet_has_too_few_cpus_for_it() -> None:
    full = device("GPU-0", 0, numa=0, numa_cpus=1)
    free = device("GPU-1", 1, numa=1, numa_cpus=4)

    assert chosen(asking(1), full, free) == [0]
    assert chosen(asking(1, exclusive_cpus=4), full, free) == [1]
    assert chosen(asking(1, exclusive_cpus=4), replace(full, numa_cpus=None)) == [0]
    refusal = refused(asking(1, exclusive_cpus=5), ledger_node("n1", full, free))
    assert refusal.counts == (("InsufficientNumaCpus", 1),)
    assert "too few free CPUs" in refusal.reason
    assert not refusal.permanent
    assert [v.reason for v in refusal.nearest_nodes[0].devices] == [
        f"5 CPUs are requested exclusively, {n} are free on its NUMA node" for n in (1, 4)
    ]


def test_pods_take_the_cpus_beside_their_gpus() -> None:
    cards = [device(f"GPU-{n}", n, numa=n, numa_cpus=5) for n in range(2)]
    cluster = Cluster(ledger_node("n1", *cards))

    assert [cluster.indices(asking(1, exclusive_cpus=3)) for _ in range(3)] == [[0], [1], []]
    cluster.end("uid-1")
    assert cluster.indices(asking(2, exclusive_cpus=2)) == [1, 0]
    assert cluster.indices(asking(1, exclusive_cpus=1)) == [0]
    assert [cluster.indices(asking(1, exclusive_cpus=n)) for n in (3, 2)] == [[], [0]]


@pytest.mark.parametrize("order", DeviceOrder)
def test_the_numa_node_with_the_fewest_cpus_that_suffice_comes_first(order: DeviceOrder) -> None:
    for free in ((3, 4), (4, 3)):
        cards = [device(f"GPU-{n}", n, numa=n, numa_cpus=cpus) for n, cpus in enumerate(free)]
        cluster = Cluster(ledger_node("n1", *cards))

        found = [
            cluster.indices(asking(1, exclusive_cpus=cpus, device_order=order))
            for cpus in (3, 2, 2)
        ]

        tight = free.index(3)
        wide = free.index(4)
        assert found == [[tight], [wide], [wide]]


@pytest.mark.parametrize("order", [DeviceOrder.FIRST, DeviceOrder.LAST, DeviceOrder.BINPACK])
def test_a_numa_node_with_cpus_for_all_containers_comes_first(order: DeviceOrder) -> None:
    two = request(*(gpu(n, 1, 1000, exclusive_cpus=2) for n in "ab"), device_order=order)
    for free in ((3, 4), (4, 3)):
        cards = [device(f"GPU-{n}", n, numa=n, numa_cpus=cpus) for n, cpus in enumerate(free)]

        assert chosen(two, *cards) == [free.index(4)] * 2


def test_only_candidates_that_take_the_same_cpus_as_the_first_are_reserved() -> None:
    nodes = [
        ledger_node(f"n{number}", device(f"GPU-{number}", 0, numa=numa, numa_cpus=4))
        for number, numa in enumerate((0, 0, 1))
    ]
    event = pod_queued("uid-1", asking(1, exclusive_cpus=3))
    places = [placed(event.request, node) for node in nodes]

    wanted = reservation_for(event, (places[1], places[2], places[0]))

    assert [each.node for each in wanted.candidates] == ["n1", "n0"]
    assert wanted.resources == event.request.resources | {numa_cpus_name(0): 3}


def test_the_containers_of_a_pod_take_cpus_together() -> None:
    card = device("GPU-0", 0, numa=0, numa_cpus=5)

    def wanting(*inits: bool) -> PodRequest:
        return request(
            *(gpu(f"c{n}", 1, 1000, exclusive_cpus=3, init=i) for n, i in enumerate(inits))
        )

    assert placed(wanting(True, False), ledger_node("n1", card)).numa_cpus == {numa_cpus_name(0): 3}
    refusal = refused(wanting(False, False), ledger_node("n1", card))
    assert refusal.counts == (("GpusDoNotFitTogether", 1),)


def test_a_container_gets_gpus_of_one_numa_node_where_the_kubelet_requires_it() -> None:
    three = [device(f"GPU-{n}", n, numa=n % 2, one_numa=True) for n in range(3)]
    loose = [replace(each, one_numa=False) for each in three]

    assert chosen(asking(2), *three) == [0, 2]
    assert chosen(asking(3), *loose) == [0, 1, 2]
    missing = device("GPU-3", 3, healthy=False)
    refusal = refused(asking(3), ledger_node("n1", *three, missing))
    assert refusal.counts == (("GpusDoNotFitTogether", 1),)
    assert "on one NUMA node" in refusal.reason
    assert refusal.permanent
    containers = [gpu(f"c{n}", gpus=1, memory=20_000) for n in range(3)]
    assert chosen(request(*containers), *three) == [2, 1, 0]


def mirrored(node_devices: list[Device]) -> MirroredNode:
    mirror = index_of(ledger_node("n1", *node_devices)).mirror
    return mirror.nodes[NodeName("n1")]


def test_the_greedy_search_over_sixteen_devices_finds_the_best_set() -> None:
    boards = {(a, b): NVLINK for a, b in combinations(range(16), 2) if a // 8 == b // 8}
    node = mirrored(linked(16, boards))

    places = best_linked_set(asking(4), node.devices[5:], 4)

    assert places is not None
    assert {node.devices[5 + place].index // 8 for place in places} == {1}


@pytest.mark.parametrize("wanted", [4, 40])
def test_of_a_node_that_reports_more_devices_than_any_has_the_first_are_compared(
    wanted: int,
) -> None:
    last = dict.fromkeys(combinations(range(40, 48), 2), NVLINK)
    node = mirrored(linked(48, last))

    assert best_linked_set(asking(wanted), node.devices, wanted) == tuple(range(wanted))


def test_the_greedy_search_reaches_95_percent_of_the_best_links() -> None:
    dice = random.Random(3)  # noqa: S311
    found = 0
    best = 0
    for _ in range(30):
        links = {pair: dice.choice((10, 30, 50, 150)) for pair in combinations(range(9), 2)}
        node = mirrored(linked(9, links))
        places = best_linked_set(asking(3), node.devices, 3)
        assert places is not None
        found += sum(links[pair] for pair in combinations(places, 2))
        best += max(
            sum(links[pair] for pair in combinations(three, 2))
            for three in combinations(range(9), 3)
        )

    assert found > 0.95 * best
