"""MIG instances by example: Volcano's table and sequence, and which pods can have one."""

from typing import Any

import pytest

from shared.dialects.dialect import ContainerManifest, PodManifest
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.volcano.device_register import NUMBER
from shared.dialects.volcano.vgpu import MEMORY, encode_shares
from shared.model.devices.device import DeviceMode, MigLayout
from shared.model.leases.lease import MigPlacement, RequestedUnits
from shared.model.leases.ledger import LedgerNode
from shared.model.names import Namespace
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import DeviceSelection, GpuRequest, PodRequest, SharingPolicy
from shared.placing.choice.device_choice import share_of
from shared.runtime.request_settings import RequestSettings, load_rules
from tests.support.build import device, gpu, ledger_node, mig_layout, request, use
from tests.support.placer.placing import Cluster

A30 = (
    mig_layout("group1", ("1g.6gb", 6144, 4)),
    mig_layout("group2", ("2g.12gb", 12288, 2)),
    mig_layout("group3", ("4g.24gb", 24576, 1)),
)
A100_40 = (
    mig_layout("group1", ("1g.5gb", 5120, 7)),
    mig_layout("group2", ("2g.10gb", 10240, 3), ("1g.5gb", 5120, 1)),
    mig_layout("group3", ("3g.20gb", 20480, 2)),
    mig_layout("group4", ("7g.40gb", 40960, 1)),
)
A100_80 = (
    mig_layout("group1", ("1g.10gb", 9728, 7)),
    mig_layout("group2", ("2g.20gb", 19968, 3), ("1g.10gb", 9728, 1)),
    mig_layout("group3", ("3g.40gb", 40192, 2)),
    mig_layout("group4", ("7g.80gb", 80896, 1)),
)
MIG = {"mode": DeviceMode.MIG, "model": "NVIDIA A100-SXM4-40GB"}


def card(index: int = 0, **fields: Any) -> Any:
    known: dict[str, Any] = {"memory_mib": 40960, "layouts": A100_40, **MIG}
    return device(f"GPU-m{index or ''}", index, **(known | fields))


def cluster(*cards: Any) -> Cluster:
    return Cluster(ledger_node("n1", *(cards or (card(),))))


def vgpu(memory: int | None = None, container: str = "main", **fields: Any) -> GpuRequest:
    return gpu(container, fields.pop("gpus", 1), memory, mig_allowed=True, **fields)


def ids(placed: Placement | Refusal) -> list[str]:
    """The ids of each container's devices, as Volcano's annotations have them."""
    if isinstance(placed, Refusal):
        return []
    return [encode_shares([share]).split(",")[0] for share in placed.shares]


@pytest.mark.parametrize(
    ("memory", "expected", "booked"),
    [
        (3000, "GPU-m[group1-0]", 5120),
        (5120, "GPU-m[group1-0]", 5120),
        (8000, "GPU-m[group2-0]", 10240),
        (15000, "GPU-m[group3-0]", 20480),
        (20481, "GPU-m[group4-0]", 40960),
        (40960, "GPU-m[group4-0]", 40960),
        (None, "GPU-m[group4-0]", 40960),
    ],
)
def test_item_42_an_idle_card_gets_the_first_layout_that_fits(
    memory: int | None, expected: str, booked: int
) -> None:
    placed = cluster().place(request(vgpu(memory, cores_percent=30)))

    assert isinstance(placed, Placement)
    [share] = placed.shares
    assert ids(placed) == [expected]
    assert share.memory_mib == booked
    assert share.requested_units == RequestedUnits(memory_mib=memory or 40960)
    assert share.device_mib == 40960
    assert encode_shares([share]) == f"{expected},NVIDIA,{memory or 40960},30:"


@pytest.mark.parametrize(
    ("layouts", "total", "memory", "place"),
    [
        (A30, 24576, 6144, MigPlacement(layout="group1", position=0, profile="1g.6gb")),
        (A30, 24576, 12000, MigPlacement(layout="group2", position=0, profile="2g.12gb")),
        (A30, 24576, None, MigPlacement(layout="group3", position=0, profile="4g.24gb")),
        (A100_80, 81920, 9728, MigPlacement(layout="group1", position=0, profile="1g.10gb")),
        (A100_80, 81920, 9729, MigPlacement(layout="group2", position=0, profile="2g.20gb")),
        (A100_80, 81920, 40000, MigPlacement(layout="group3", position=0, profile="3g.40gb")),
        (A100_80, 81920, 80896, MigPlacement(layout="group4", position=0, profile="7g.80gb")),
    ],
)
def test_item_42_the_layouts_of_other_models(
    layouts: tuple[MigLayout, ...], total: int, memory: int | None, place: MigPlacement
) -> None:
    placed = cluster(card(memory_mib=total, layouts=layouts)).place(request(vgpu(memory)))

    assert isinstance(placed, Placement)
    assert [share.mig for share in placed.shares] == [place]


def test_item_43_a_partitioned_card_gives_its_smallest_instance_that_fits() -> None:
    one = cluster()
    sequence = [ids(one.place(request(vgpu(n)))) for n in (8000, 3000, 8000, 8000)]

    assert sequence == [
        ["GPU-m[group2-0]"],
        ["GPU-m[group2-3]"],
        ["GPU-m[group2-1]"],
        ["GPU-m[group2-2]"],
    ]
    refusal = one.place(request(vgpu(8000)))
    assert isinstance(refusal, Refusal)
    assert refusal.counts == (("GpuInstancesTaken", 1),)
    assert not refusal.permanent
    assert refusal.hint == "wait until pods on node n1 have ended"
    assert refusal.nearest_nodes[0].devices[0].reason == (
        "an instance of 8000 MiB or more is needed, leased instances require its layout group2, "
        "and none is free there"
    )


def test_item_44_two_containers_of_a_pod_never_share_a_position() -> None:
    one = cluster()
    pair = request(vgpu(8000, "a"), vgpu(8000, "b"))

    assert ids(one.place(pair)) == ["GPU-m[group2-0]", "GPU-m[group2-1]"]
    assert ids(one.place(pair)) == []
    assert ids(one.place(request(vgpu(8000)))) == ["GPU-m[group2-2]"]


def test_item_46_only_an_idle_card_changes_its_layout() -> None:
    one = cluster()
    one.place(request(vgpu(8000)))

    assert ids(one.place(request(vgpu(15000)))) == []
    one.end("uid-1")
    assert ids(one.place(request(vgpu(15000)))) == ["GPU-m[group3-0]"]


def test_item_48_no_requested_memory_gets_the_largest_instance() -> None:
    eighty = cluster(card(memory_mib=81920, layouts=A100_80))
    everything = request(vgpu(None, memory_percent=100))

    assert ids(eighty.place(request(vgpu(None)))) == ["GPU-m[group4-0]"]
    eighty.end("uid-1")
    assert ids(eighty.place(everything)) == ["GPU-m[group4-0]"]


def test_item_48_more_than_the_largest_instance_never_fits() -> None:
    refusal = cluster(card(memory_mib=81920, layouts=A100_80)).place(request(vgpu(81000)))

    assert isinstance(refusal, Refusal)
    assert refusal.permanent
    assert "set volcano.sh/vgpu-memory: 80896," in refusal.hint
    assert "the largest in its layouts has 80896 MiB" in (
        refusal.nearest_nodes[0].devices[0].reason
    )


def test_percentages_apply_to_the_cards_memory_and_cores_are_ignored() -> None:
    one = cluster()

    assert ids(one.place(request(vgpu(None, memory_percent=20, cores_percent=60)))) == [
        "GPU-m[group2-0]"
    ]
    assert ids(one.place(request(vgpu(3000, cores_percent=60)))) == ["GPU-m[group2-3]"]
    alone = vgpu(8000, cores_percent=100, sharing=SharingPolicy.EXCLUSIVE)
    placed = one.place(request(alone))
    assert ids(placed) == ["GPU-m[group2-1]"]
    assert isinstance(placed, Placement)
    assert placed.shares[0].sharing is SharingPolicy.SHARED
    assert ids(one.place(request(vgpu(8000)))) == ["GPU-m[group2-2]"]


def test_a_card_with_shares_is_not_partitioned() -> None:
    refusal = cluster((card(), use(1000))).place(request(vgpu(3000)))

    assert isinstance(refusal, Refusal)
    assert refusal.counts == (("GpuNotPartitioned", 1),)


def test_item_27_without_a_required_mode_either_mode_is_used() -> None:
    nodes = (ledger_node("cut", card()), ledger_node("shared", device()))
    either = request(vgpu(8000))

    def node_of(wanted: PodRequest, *there: LedgerNode) -> str:
        placed = Cluster(*there).place(wanted)
        return placed.node if isinstance(placed, Placement) else placed.counts[0][0]

    assert node_of(either, *nodes) == "shared"
    assert node_of(either, nodes[0]) == "cut"
    assert node_of(request(vgpu(8000), prefer_mig=True), *nodes) == "cut"
    assert node_of(request(vgpu(8000), prefer_mig=True), nodes[1]) == "shared"
    assert node_of(request(vgpu(8000), selection=DeviceSelection(mode="mig")), *nodes) == "cut"
    for selection in (DeviceSelection(mode="hami-core"), DeviceSelection(mode="MIG")):
        assert node_of(request(vgpu(8000), selection=selection), nodes[0]) == "GpuModeMismatch"
    assert node_of(request(gpu(memory=8000)), nodes[0]) == "GpuModeMismatch"
    assert node_of(request(vgpu(None, whole=True)), nodes[0]) == "GpuModeMismatch"


def test_a_tighter_node_is_preferred_and_an_idle_card_is_not_partitioned() -> None:
    nodes = (ledger_node("idle", card()), ledger_node("cut", card(1)))
    one = Cluster(*nodes)
    first = one.place(request(vgpu(8000)))
    second = one.place(request(vgpu(8000)))

    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert first.node == second.node


def test_a_refusal_names_what_the_instances_of_each_device_lack() -> None:
    live_use = use(10240, shares=1)
    pinned = (
        card(1),
        type(live_use)(memory_mib=10240, shares=1, fence=1, slots_taken="1", layout="group2"),
    )
    cards = (
        pinned,
        card(2, layouts=()),
        card(3, healthy=False),
        device("GPU-h", 4, memory_mib=9000),
    )
    refusal = cluster(*cards).place(request(vgpu(15_000)))

    assert isinstance(refusal, Refusal)
    assert {v.index: v.reason for v in refusal.nearest_nodes[0].devices} == {
        1: "an instance of 15000 MiB or more is needed, leased instances require its layout "
        "group2, and the largest free instance there has 10240 MiB",
        2: "it is in MIG mode, and no layout for it is known",
        3: "it is unhealthy",
        4: "15000 MiB are requested, 9000 of 9000 MiB are free",
    }


def test_a_share_of_an_instance_reserves_all_of_it_and_no_cores() -> None:
    place = MigPlacement(layout="group2", position=1, profile="2g.10gb")
    share = share_of(vgpu(8000, cores_percent=40), card(), 10240, place)

    assert (share.memory_mib, share.booked_cores, share.cores_percent) == (10240, 0, 40)
    assert share.limit_bytes == 10240 << 20


def test_a_setting_decides_which_mode_is_tried_first() -> None:
    limits = {NUMBER: 1, MEMORY: 1000}
    pod = PodManifest(
        namespace=Namespace("default"), containers=(ContainerManifest(name="c", limits=limits),)
    )

    def first(**settings: Any) -> bool:
        return parse_pod_request(pod, load_rules(RequestSettings(**settings))).prefer_mig

    assert [first(), first(mode_first="hami-core"), first(mode_first="mig")] == [False, False, True]


def test_a_device_split_count_does_not_limit_instances() -> None:
    one = cluster(card(slots=1))

    assert [ids(one.place(request(vgpu(3000)))) for _ in range(7)] == [
        [f"GPU-m[group1-{n}]"] for n in range(7)
    ]
    assert ids(one.place(request(vgpu(3000)))) == []


def test_a_layout_that_fits_all_containers_is_preferred_to_the_first_that_fits_one() -> None:
    pod = request(vgpu(3000, "a"), vgpu(8000, "b"))
    first = request(vgpu(3000, "first", init=True), vgpu(8000, "a"))

    assert ids(cluster().place(pod)) == ["GPU-m[group2-3]", "GPU-m[group2-0]"]
    assert ids(cluster().place(first)) == ["GPU-m[group2-3]", "GPU-m[group2-0]"]
    assert ids(cluster(card(), card(1)).place(pod)) == ["GPU-m1[group1-0]", "GPU-m[group2-0]"]


def test_pods_of_an_anti_affinity_group_do_not_share_a_card_by_instances() -> None:
    one = cluster()
    wanted = request(vgpu(3000), anti_affinity_groups=("default/group",))

    assert ids(one.place(wanted)) == ["GPU-m[group1-0]"]
    assert ids(one.place(wanted)) == []


def test_a_pod_gets_an_instance_where_no_share_of_the_node_is_left() -> None:
    one = cluster(device("GPU-h", 0, memory_mib=10_000), card(1))
    wanted = request(vgpu(8000))

    assert [ids(one.place(wanted)) for _ in range(2)] == [["GPU-h"], ["GPU-m1[group2-0]"]]


def test_all_devices_of_a_pod_are_of_one_mode() -> None:
    mixed = cluster(device("GPU-h", 0), card(1))

    assert ids(mixed.place(request(vgpu(8000, gpus=2)))) == []
    assert ids(mixed.place(request(vgpu(30_000, "a"), vgpu(30_000, "b")))) == []
