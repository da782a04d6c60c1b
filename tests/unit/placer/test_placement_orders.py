"""In which order devices are tried: by what is in use, with earlier containers counted."""

from typing import Any

import pytest

from shared.model.placement import Refusal
from shared.model.request import DeviceOrder, PodRequest, SharingPolicy
from tests.support.build import device, gpu, ledger_node, request, use
from tests.support.placer.placing import Cluster
from tests.support.placer.placing import chosen_devices as chosen


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
    refusal = Cluster(ledger_node("n1", *two)).place(request(gpu("a", 1, 10), gpu("b", 3, 10)))
    assert isinstance(refusal, Refusal)
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
