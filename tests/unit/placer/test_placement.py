"""Placing by example: the items of Volcano's acceptance list that placing decides."""

from typing import Any

import pytest

from shared.model.device import DeviceMode
from shared.model.ledger import LedgerNode
from shared.model.placement import Placement, Refusal
from shared.model.request import DeviceOrder, DeviceSelection, PodRequest, SharingPolicy
from tests.support.build import V100_MIB, device, devices, gpu, ledger_node, request
from tests.support.placer.placing import Cluster

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
    refusal = Cluster(eight_cards()).place(gpushare(10000, 10000))

    assert isinstance(refusal, Refusal)
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
    placement = Cluster(two_cards()).place(request(gpu(gpus=2, memory=3000, cores_percent=50)))

    assert isinstance(placement, Placement)
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
    placement = Cluster(two_cards()).place(request(wanted))

    assert isinstance(placement, Placement)
    assert [(s.memory_mib, s.cores_percent) for s in placement.shares] == [(memory_mib, 0)]


def test_memory_units_and_percentages_count_in_units_of_the_node() -> None:
    node = ledger_node("n1", device(memory_mib=32760, unit_mib=10))
    by_units = Cluster(node).place(request(gpu(memory=300)))
    by_percent = Cluster(node).place(request(gpu(memory_percent=33)))

    assert isinstance(by_units, Placement)
    assert isinstance(by_percent, Placement)
    assert by_units.shares[0].memory_mib == 3000
    assert by_percent.shares[0].memory_mib == 3276 * 33 // 100 * 10


def test_item_22_all_cores_require_an_idle_card_and_make_it_exclusive() -> None:
    cluster = Cluster(ledger_node("n1", device()))

    assert cluster.indices(
        request(gpu(memory=10, cores_percent=100, sharing=SharingPolicy.EXCLUSIVE))
    ) == [0]
    assert cluster.indices(request(gpu(memory=10, cores_percent=0))) == []
    assert cluster.indices(request(gpu(memory=10, cores_percent=1))) == []


def test_item_22_more_than_all_cores_never_fit() -> None:
    refusal = Cluster(two_cards()).place(request(gpu(memory=10, cores_percent=101)))

    assert isinstance(refusal, Refusal)
    assert refusal.permanent


def test_item_23_the_eleventh_share_of_ten_is_refused() -> None:
    cluster = Cluster(ledger_node("n1", device(slots=10)))
    wanted = request(gpu(memory=100))

    assert [cluster.indices(wanted) for _ in range(10)] == [[0]] * 10
    refusal = cluster.place(wanted)
    assert isinstance(refusal, Refusal)
    assert refusal.nearest_nodes[0].devices[0].reason == "all 10 share slots are taken"


def test_item_24_more_gpus_than_cards_names_the_check() -> None:
    refusal = Cluster(two_cards()).place(request(gpu(gpus=3, memory=10)))

    assert isinstance(refusal, Refusal)
    assert refusal.counts == (("NotEnoughGpus", 1),)
    assert "3 different GPUs requested, 2 present" in refusal.nearest_nodes[0].reason
    assert refusal.hint == "request at most 2 GPUs in one container, as node n1 has"
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
    placement = Cluster(two_cards()).place(
        request(gpu("a", memory=3000, cores_percent=10), gpu("b", memory=5000, cores_percent=20))
    )

    assert isinstance(placement, Placement)
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
