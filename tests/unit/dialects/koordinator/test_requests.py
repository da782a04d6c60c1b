"""Requests in the Koordinator dialect; the checklist by number, and more."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.koordinator import dialect
from shared.dialects.koordinator.amounts import (
    FULL,
    GpuPart,
    amount_changes,
    parse_part,
    reads_nvidia_gpus,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.request import DeviceOrder, NodeOrder, PodRequest, SharingPolicy
from tests.support.dialects.builders import koord

GI = 1 << 30
LABEL = "koordinator.sh/gpu-isolation-provider"
CARDS = {"nvidia.com/gpu": 2}


def container(name: str = "main", /, **amounts: int) -> ContainerManifest:
    return ContainerManifest(name=name, limits=koord(**amounts))


def pod(*containers: ContainerManifest, **facts: Any) -> PodManifest:
    known = {"scheduler": "koord-scheduler", "namespace": Namespace("ns"), "containers": containers}
    return PodManifest(**(known | facts))


def read(*containers: ContainerManifest, rules: Rules | None = None, **facts: Any) -> PodRequest:
    request = dialect.parse(pod(*containers, **facts), rules or Rules())
    assert request is not None
    return request


def part(**amounts: int) -> GpuPart | None:
    return parse_part("main", koord(**amounts))


def test_koordinator_1_two_nvidia_gpus_are_two_whole_gpus() -> None:
    found = parse_part("main", CARDS)

    assert found == GpuPart(gpus=2, core_percent=100, ratio_percent=100)
    assert found is not None
    assert found.whole


def test_koordinator_2_the_shorthand_is_replaced_by_what_it_stands_for() -> None:
    assert amount_changes({"koordinator.sh/gpu": 50, "cpu": 1}) == {
        "koordinator.sh/gpu": None,
        **koord(core=50, ratio=50, shared=1),
    }


@pytest.mark.parametrize("amount", [1, 100, 200])
def test_koordinator_3_percent_of_a_gpu_or_whole_gpus_are_accepted(amount: int) -> None:
    assert part(gpu=amount) == GpuPart(
        gpus=max(amount // 100, 1),
        core_percent=min(amount, 100),
        ratio_percent=min(amount, 100),
    )


def test_koordinator_3_one_and_a_half_gpus_are_refused() -> None:
    with pytest.raises(RequestError, match=r"main: koordinator\.sh/gpu must be .* got 150"):
        part(gpu=150)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (koord(core=50), "gpu-core 50: memory is missing"),
        (koord(shared=1), "gpu.shared 1: memory is missing"),
        (koord(shared=1, core=50), "memory is missing"),
        (koord(shared=1, memory=GI, ratio=50), "in bytes or as a ratio"),
        (koord(gpu=50, core=50), "must be alone"),
        (koord(gpu=100, shared=1), "must be alone"),
        ({**CARDS, **koord(shared=1, ratio=50)}, "not with both"),
        ({"huawei.com/npu-core": 1, **koord(memory=GI)}, "NPUs"),
    ],
)
def test_koordinator_4_illegal_combinations_are_refused_by_name(
    limits: dict[str, int], text: str
) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        parse_part("train", limits)

    assert "container train" in str(refused.value)


def test_koordinator_5_a_ratio_is_divided_over_two_gpus() -> None:
    assert part(shared=2, ratio=100) == GpuPart(gpus=2, ratio_percent=50)
    with pytest.raises(RequestError, match=r"multiple of koordinator\.sh/gpu\.shared 2, got 101"):
        part(shared=2, ratio=101)
    with pytest.raises(RequestError, match="150 percent of each GPU"):
        part(shared=2, ratio=300)


def test_koordinator_6_bytes_are_divided_without_rest() -> None:
    assert part(shared=3, memory=10 * GI) == GpuPart(gpus=3, memory_bytes=3579139413)


def test_koordinator_7_two_containers_of_a_half_need_two_gpus() -> None:
    request = read(
        container("a", shared=1, core=50, ratio=50), container("b", shared=1, core=50, ratio=50)
    )

    assert request.distinct_devices
    assert [
        (c.container, c.gpus, c.memory_percent, c.cores_percent) for c in request.containers
    ] == [
        ("a", 1, 50, 50),
        ("b", 1, 50, 50),
    ]


def test_koordinator_8_zero_counts_as_absent() -> None:
    assert part(shared=0, core=0, ratio=0) is None
    assert dialect.parse(pod(container(shared=0, ratio=0)), Rules()) is None
    assert part(shared=1, core=0, ratio=50) == GpuPart(gpus=1, ratio_percent=50)


def test_koordinator_9_names_of_before_1_0_are_read() -> None:
    old = {"kubernetes.io/gpu-core": 50, "kubernetes.io/gpu-memory-ratio": 20}

    assert parse_part("main", old) == GpuPart(gpus=1, core_percent=50, ratio_percent=20)
    assert amount_changes(old) == koord(shared=1)
    with pytest.raises(RequestError, match=r"repeats koordinator\.sh/gpu-core"):
        parse_part("main", {**old, **koord(core=50)})


@pytest.mark.parametrize(
    ("amounts", "wanted"),
    [
        ({"gpu": 50}, (1, 50, 50, None)),
        ({"core": 200, "ratio": 200}, (2, 100, 100, None)),
        ({"core": 50, "ratio": 200}, (2, 25, 100, None)),
        ({"shared": 2, "core": 100, "ratio": 100}, (2, 50, 50, None)),
        ({"shared": 2, "core": 100, "memory": 16 * GI}, (2, 50, None, 8 * GI)),
        ({"shared": 4, "memory": 160 * GI}, (4, None, None, 40 * GI)),
        ({"shared": 1, "core": 30, "ratio": 100}, (1, 30, 100, None)),
        ({"ratio": 60}, (1, None, 60, None)),
        ({"memory": 8 * GI}, (1, None, None, 8 * GI)),
        ({"core": 200, "memory": 64 * GI}, (2, 100, None, 32 * GI)),
    ],
)
def test_the_published_examples_of_requests(
    amounts: dict[str, int], wanted: tuple[int, int | None, int | None, int | None]
) -> None:
    found = part(**amounts)

    assert found is not None
    assert (
        found.gpus,
        found.core_percent,
        found.ratio_percent,
        found.memory_bytes,
    ) == wanted
    assert found.whole is (wanted[1:3] == (100, 100))


def test_more_compute_than_one_gpu_has_is_refused_because_it_would_wait_for_ever() -> None:
    with pytest.raises(RequestError, match="200 percent of each GPU"):
        part(core=200, ratio=50)


def test_the_hyphen_of_some_tutorials_is_refused_with_the_right_name() -> None:
    with pytest.raises(RequestError, match=r"the name has a dot: koordinator\.sh/gpu\.shared"):
        parse_part("main", {"koordinator.sh/gpu-shared": 1, **koord(core=50, ratio=50)})


@pytest.mark.parametrize(
    ("amounts", "added"),
    [
        ({"core": 100, "ratio": 50}, {"shared": 1}),
        ({"core": 100, "ratio": 200}, {"shared": 2}),
        ({"core": 200, "memory": GI}, {"shared": 2}),
        ({"shared": 1, "ratio": 50}, {}),
        ({"core": 50}, {}),
    ],
)
def test_admission_adds_the_gpu_count(amounts: dict[str, int], added: dict[str, int]) -> None:
    assert amount_changes(koord(**amounts)) == koord(**added)


@pytest.mark.parametrize("amounts", [{"core": 50, "ratio": 50}, {"gpu": 200}])
def test_a_container_that_would_start_without_allocate_is_refused(
    amounts: dict[str, int],
) -> None:
    with pytest.raises(RequestError, match=r"gpu\.shared is missing") as refused:
        read(container(**amounts))

    completed = {**koord(**amounts), **amount_changes(koord(**amounts))}
    limits = {name: n for name, n in completed.items() if n is not None}
    assert f"add koordinator.sh/gpu.shared: {limits['koordinator.sh/gpu.shared']}" in str(
        refused.value
    )
    assert read(ContainerManifest(name="main", limits=limits)).triggers == (
        "koordinator.sh/gpu.shared",
    )


legal = st.one_of(
    st.fixed_dictionaries(
        {"shared": st.integers(1, 8)},
        optional={"core": st.integers(1, 800)},
    ).flatmap(
        lambda known: st.one_of(
            st.builds(lambda r: {**known, "ratio": r}, st.integers(1, 800)),
            st.builds(lambda m: {**known, "memory": m}, st.integers(8, 640 * GI)),
        )
    )
)


@given(legal)
def test_the_parts_of_a_container_sum_up_to_its_request(amounts: dict[str, int]) -> None:
    try:
        found = part(**amounts)
    except RequestError:
        per_card = [
            amounts[name] / amounts["shared"] for name in ("core", "ratio") if name in amounts
        ]
        assert any(amount > FULL or amount % 1 for amount in per_card)
        return

    assert found is not None
    assert found.gpus == amounts["shared"]
    assert found.gpus * (found.core_percent or 0) == amounts.get("core", 0)
    assert found.gpus * (found.ratio_percent or 0) == amounts.get("ratio", 0)
    rest = amounts.get("memory", 0) - found.gpus * (found.memory_bytes or 0)
    assert 0 <= rest < found.gpus


def test_ratio_and_bytes_in_one_pod_are_refused() -> None:
    with pytest.raises(
        RequestError, match="container a requests memory as a ratio and container b"
    ):
        read(container("a", shared=1, ratio=50), container("b", shared=1, memory=GI))


def test_vendor_and_koordinator_names_in_one_pod_are_refused() -> None:
    with pytest.raises(RequestError, match="one of the two for all containers"):
        read(container("a", shared=1, ratio=50), ContainerManifest(name="b", limits=CARDS))


def test_the_sharing_policy_follows_from_the_compute() -> None:
    whole = read(container(shared=1, core=100, ratio=100)).containers[0]
    all_cores = read(container(shared=1, core=100, ratio=50)).containers[0]
    memory_only = read(container(shared=1, ratio=50)).containers[0]

    assert (whole.whole, whole.sharing) == (True, SharingPolicy.EXCLUSIVE)
    assert (all_cores.whole, all_cores.sharing) == (False, SharingPolicy.SHARED)
    assert (memory_only.cores_percent, memory_only.sharing) == (0, SharingPolicy.BEST_EFFORT)


@pytest.mark.parametrize("scheduler", ["koord-scheduler", "leasehold"])
def test_nvidia_gpus_belong_to_this_dialect_only_for_koordinators_scheduler(scheduler: str) -> None:
    manifest = pod(ContainerManifest(name="main", limits=CARDS), scheduler=scheduler)
    ours = scheduler == "koord-scheduler"

    request = dialect.parse(manifest, Rules())

    assert (request is not None) is ours is reads_nvidia_gpus(manifest, Rules())
    assert not reads_nvidia_gpus(manifest, Rules(disabled=("koordinator",)))
    assert not reads_nvidia_gpus(manifest, Rules(enabled=("volcano-vgpu",)))
    if request is not None:
        assert request.triggers == ("nvidia.com/gpu",)
        assert (request.containers[0].gpus, request.containers[0].whole) == (2, True)


@pytest.mark.parametrize("value", ["HAMi-core", "hami-core", "HAMI-CORE"])
def test_the_isolation_label_is_accepted_in_any_case(value: str) -> None:
    request = read(container(shared=1, ratio=50), labels={LABEL: value})

    assert request.node_requirements.selector == ((LABEL, "HAMi-core"),)


def test_another_provider_of_isolation_is_refused() -> None:
    with pytest.raises(RequestError, match=r"must be HAMi-core, got 'hami'"):
        read(container(shared=1, ratio=50), labels={LABEL: "hami"})


def test_koordinator_29_limited_containers_need_a_node_with_isolation() -> None:
    part_of_it = read(container(shared=1, ratio=50))
    capped = read(container(shared=1, core=30, ratio=100))
    whole = read(container(shared=1, core=100, ratio=100), labels={LABEL: "HAMi-core"})

    assert (
        part_of_it.node_requirements.selector
        == capped.node_requirements.selector
        == ((LABEL, "HAMi-core"),)
    )
    assert whole.node_requirements.selector == ()


def test_koordinator_18_the_strategy_decides_the_order_of_devices_and_nodes() -> None:
    one = container(shared=1, ratio=10)
    least, most = read(one), read(one, rules=Rules(scoring_strategy="MostAllocated"))

    assert (least.device_order, least.node_order) == (
        DeviceOrder.LEAST_ALLOCATED,
        NodeOrder.SPREAD,
    )
    assert (most.device_order, most.node_order) == (DeviceOrder.MOST_ALLOCATED, NodeOrder.BINPACK)
    assert least.allocation_weights == most.allocation_weights == (0, 0, 1)


def test_koordinator_25_a_forged_allocation_requests_nothing() -> None:
    forged = {"scheduling.koordinator.sh/device-allocated": '{"gpu":[{"minor":0}]}'}

    assert dialect.parse(pod(ContainerManifest(name="main"), annotations=forged), Rules()) is None
    assert read(container(shared=1, ratio=50), annotations=forged) == read(
        container(shared=1, ratio=50)
    )
    assert not dialect.DIALECT.request_annotations.intersection(forged)
