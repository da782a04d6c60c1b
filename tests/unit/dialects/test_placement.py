"""Parsing and placement of pods in gpu-manager's and HAMi's dialects."""

import pytest

from shared.dialects.dialect import PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.model.device import Device, DeviceMode, MigLayout, MigProfile
from shared.model.ledger import LedgerNode
from shared.model.names import DeviceUuid
from shared.model.placement import Placement, Refusal
from tests.support.build import device, devices, ledger_node
from tests.support.dialects.builders import RULES, container_with, pod
from tests.support.placer.placing import Cluster

SERVED = ("tencent.com/vcuda-core", "nvidia.com/gpu", "volcano.sh/vgpu-number")
HALVES = MigLayout(name="halves", profiles=(MigProfile(name="3g.40gb", memory_mib=40448, count=2),))


def node(name: str, *held: Device) -> LedgerNode:
    return ledger_node(name, *held, served=SERVED)


def vcuda(core: int, memory: int = 0) -> PodManifest:
    return pod(
        container_with(limits={"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": memory})
    )


def hami(notes: dict[str, str] | None = None, /, **amounts: int) -> PodManifest:
    return pod(
        container_with(limits={f"nvidia.com/{k}": n for k, n in amounts.items()}), notes=notes
    )


def policy(text: str) -> dict[str, str]:
    return {"hami.io/gpu-scheduler-policy": text}


def test_gpusharing_1_the_fullest_gpu_with_enough_of_both_is_taken() -> None:
    cluster = Cluster(node("n1", *devices(3, memory_mib=16384)))
    for core, memory, card in ((60, 8, 0), (50, 8, 1), (45, 8, 1), (30, 8, 0), (50, 60, 2)):
        assert cluster.indices(parse_pod_request(vcuda(core, memory), RULES)) == [card]


def test_gpusharing_4_whole_gpus_are_idle_before_and_exclusive_afterwards() -> None:
    cluster = Cluster(node("n1", *devices(3, memory_mib=16384)))
    assert cluster.indices(parse_pod_request(vcuda(1, 1), RULES)) == [0]

    assert cluster.indices(parse_pod_request(vcuda(200), RULES)) == [1, 2]

    assert cluster.indices(parse_pod_request(vcuda(99, 1), RULES)) == [0]
    assert isinstance(cluster.place(parse_pod_request(vcuda(1, 1), RULES)), Refusal)


def test_a_worked_example_that_never_fits_by_blocks_fits_by_bytes_or_not_at_all() -> None:
    cluster = Cluster(node("n1", device(memory_mib=16160)))

    assert isinstance(cluster.place(parse_pod_request(vcuda(10, 64), RULES)), Refusal)
    assert cluster.indices(parse_pod_request(vcuda(10, 63), RULES)) == [0]


def test_hami_spreads_by_slots_cores_and_memory_together() -> None:
    cluster = Cluster(node("n1", *devices(2, memory_mib=10000)))
    assert cluster.indices(parse_pod_request(hami(gpu=1, gpumem=6000), RULES)) == [0]
    assert cluster.indices(parse_pod_request(hami(gpu=1, gpumem=1000, gpucores=90), RULES)) == [1]

    assert cluster.indices(parse_pod_request(hami(gpu=1, gpumem=100), RULES)) == [0], (
        "70 of 300 against 110"
    )
    heavy = {"hami.io/device-scoring-weights": "slot=0,core=0,memory=1"}
    assert cluster.indices(parse_pod_request(hami(heavy, gpu=1, gpumem=100), RULES)) == [1]


@pytest.mark.parametrize(("chain", "card"), [("binpack", 0), ("spread", 1), ("mutex", 1)])
def test_hami_policies_choose_between_a_used_and_an_idle_device(chain: str, card: int) -> None:
    cluster = Cluster(node("n1", *devices(2, memory_mib=10000)))
    assert cluster.indices(parse_pod_request(hami(gpu=1, gpumem=1000), RULES)) == [0]

    assert cluster.indices(parse_pod_request(hami(policy(chain), gpu=1, gpumem=1000), RULES)) == [
        card
    ]


def test_hami_other_pods_may_share_a_device_that_mutex_chose() -> None:
    cluster = Cluster(node("n1", device(memory_mib=10000)))
    mutex = parse_pod_request(hami(policy("mutex"), gpu=1, gpumem=1000), RULES)

    assert cluster.indices(mutex) == [0]
    assert cluster.indices(parse_pod_request(hami(gpu=1, gpumem=1000), RULES)) == [0]
    assert isinstance(cluster.place(mutex), Refusal)


@pytest.mark.parametrize("order", ["cores first", "none first"])
def test_hami_all_cores_make_a_share_exclusive(order: str) -> None:
    cluster = Cluster(node("n1", device(memory_mib=10000)))
    pair = [hami(gpu=1, gpumem=100, gpucores=100), hami(gpu=1, gpumem=100)]
    first, second = pair if order == "cores first" else pair[::-1]

    assert cluster.indices(parse_pod_request(first, RULES)) == [0]
    assert isinstance(cluster.place(parse_pod_request(second, RULES)), Refusal)


def test_hami_numa_bind_keeps_devices_together_or_refuses() -> None:
    split = [device(f"GPU-{n}", index=n, numa=n % 2) for n in range(4)]
    bind = {"nvidia.com/numa-bind": "true"}
    cluster = Cluster(node("n1", *split))

    chosen = cluster.indices(parse_pod_request(hami(bind, gpu=2, gpumem=1000), RULES))

    assert chosen in ([0, 2], [1, 3])
    assert isinstance(
        cluster.place(parse_pod_request(hami(bind, gpu=3, gpumem=1000), RULES)), Refusal
    )
    assert len(cluster.indices(parse_pod_request(hami(gpu=3, gpumem=1000), RULES))) == 3


def test_hami_topology_aware_avoids_devices_with_good_links() -> None:
    names = [DeviceUuid(f"GPU-{n}") for n in range(3)]
    scores = {(0, 1): 160, (0, 2): 10, (1, 2): 10}
    linked = [
        device(
            names[n],
            index=n,
            links={names[m]: scores[min(n, m), max(n, m)] for m in range(3) if m != n},
        )
        for n in range(3)
    ]

    def chosen(gpus: int) -> list[int]:
        cluster = Cluster(node("n1", *linked))
        manifest = hami(policy("topology-aware"), gpu=gpus, gpumem=1000)
        return sorted(cluster.indices(parse_pod_request(manifest, RULES)))

    assert chosen(1) == [2]
    assert chosen(2) == [0, 1]


@pytest.mark.parametrize(
    ("rules", "chosen"), [(RULES, "n1"), (Rules(node_scheduler_policy="spread"), "n2")]
)
def test_hami_nodes_are_packed_or_spread_as_configured(rules: Rules, chosen: str) -> None:
    cluster = Cluster(node("n1", device("GPU-1")), node("n2", device("GPU-2")))
    cluster.place(
        parse_pod_request(hami({"nvidia.com/use-gpuuuid": "GPU-1"}, gpu=1, gpumem=1000), RULES)
    )

    placed = cluster.place(parse_pod_request(hami(gpu=1, gpumem=1000), rules))

    assert isinstance(placed, Placement)
    assert placed.node == chosen


def mig() -> Device:
    return device("GPU-9", index=9, memory_mib=81920, mode=DeviceMode.MIG, layouts=(HALVES,))


def test_hami_a_mig_instance_serves_a_share_and_in_mig_mode_a_whole_request() -> None:
    demand = {"nvidia.com/vgpu-mode": "mig"}
    cluster = Cluster(node("n1", mig()))

    assert isinstance(cluster.place(parse_pod_request(hami(gpu=1), RULES)), Refusal)
    for notes, amounts in (({}, {"gpumem": 1000}), (demand, {})):
        placed = cluster.place(parse_pod_request(hami(notes, gpu=1, **amounts), RULES))
        assert isinstance(placed, Placement)
        assert [share.memory_mib for share in placed.shares] == [40448]
        assert all(share.mig for share in placed.shares)


def test_gpu_manager_gets_no_mig_instances() -> None:
    assert isinstance(
        Cluster(node("n1", mig())).place(parse_pod_request(vcuda(10, 4), RULES)), Refusal
    )
