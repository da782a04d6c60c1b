"""Replicas of GPUs by example: which pods get one, what it takes, and who waits for what."""

from typing import Any

import pytest
from msgspec import structs

from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.nvidia.replica_labels import labels_of
from shared.dialects.pod_requests import parse_pod_request
from shared.model.devices.device import Device, DeviceMode
from shared.model.devices.enforcers import Offer
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import bookings
from shared.model.leases.ledger import LedgerNode
from shared.model.names import Namespace
from shared.model.requests.placement import Placement
from shared.model.requests.request import NodeRequirements, PodRequest
from tests.support.build import device, ledger_node, use
from tests.support.placer.placing import Cluster, placed, refused

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
MPS = Offer(memory=("mps",), compute=("mps",))


def replica_card(index: int = 0, number: int = 4, **fields: Any) -> Device:
    """A GPU of 15,360 MiB that is offered as replicas by time-slicing, unless changed."""
    of_replicas: dict[str, Any] = {
        "strategy": "time-slicing",
        "resource": GPU,
        "one_per_container": False,
    }
    of_replicas |= {key: fields.pop(key) for key in of_replicas if key in fields}
    replicas = Replicas(number=number, **of_replicas)
    known = {"memory_mib": 15_360, "mode": DeviceMode.REPLICAS, "slots": number}
    return device(f"GPU-r{index}", index, replicas=replicas, **(known | fields))


def node(*cards: Device, name: str = "n1", resource: str = GPU) -> LedgerNode:
    return ledger_node(name, *cards, served=(resource,))


def pod(annotations: dict[str, str] | None = None, **limits: int) -> PodRequest:
    """A pod of one container, with limits of `nvidia.com/NAME`."""
    amounts = {f"nvidia.com/{name.replace('_', '.')}": amount for name, amount in limits.items()}
    container = ContainerManifest(name="main", limits=amounts)
    manifest = PodManifest(
        namespace=Namespace("ml"), containers=(container,), annotations=annotations or {}
    )
    return parse_pod_request(manifest, Rules())


def test_words_24_a_turn_takes_its_part_of_the_gpu_and_nothing_holds_it() -> None:
    [share] = placed(pod(gpu=1), node(replica_card())).shares

    assert (share.memory_mib, share.cores_percent, share.whole) == (3_840, 25, False)
    assert share.held_text == "memory not held, cores not held"
    assert share.mode == "time-slicing"


def test_words_24_a_replica_by_mps_is_held_to_its_part() -> None:
    card = replica_card(number=7, strategy="mps", offer=MPS)

    [share] = placed(pod(gpu=1), node(card)).shares

    assert (share.memory_mib, share.cores_percent) == (2_194, 14), "15,360 / 7 and 100 / 7, cut"
    assert share.held_text == "memory by MPS, cores by MPS"
    assert share.mode == "mps-replicas"


@pytest.mark.parametrize("number", [2, 3, 7, 10, 64, 100, 101])
def test_words_30_a_gpu_has_as_many_replicas_as_configured_and_no_more(number: int) -> None:
    cluster = Cluster(node(replica_card(number=number)))

    shares = [share for _ in range(number) for share in _placed(cluster, pod(gpu=1)).shares]

    [booking] = bookings(shares)
    assert (booking.shares, booking.memory_mib) == (number, 15_360 // number * number)
    assert cluster.indices(pod(gpu=1)) == []


def test_the_next_pod_waits_with_the_reason() -> None:
    full = structs.replace(use(15_360, 100, 4), mode="time-slicing")

    refusal = refused(pod(gpu=1), ledger_node("n1", (replica_card(), full), served=(GPU,)))

    assert refusal.counts == (("GpuReplicasTaken", 1),)
    [verdict] = refusal.nearest_nodes[0].devices
    assert verdict.reason == "all 4 of its replicas are taken"


def test_a_pod_that_names_amounts_waits_where_all_gpus_are_replicas() -> None:
    for wanted in (pod(gpu=1, gpumem=1000), pod(gpu=1, gpucores=10), pod(gpu=1, gpucores=100)):
        [verdict] = refused(wanted, node(replica_card())).nearest_nodes[0].devices

        assert verdict.reason == (
            "it is offered as 4 replicas by time-slicing, for pods that request a number of "
            "nvidia.com/gpu and no amounts"
        )


def test_whole_gpus_come_before_replicas() -> None:
    whole = node(device("GPU-w"), name="n2")
    cluster = Cluster(node(replica_card()), whole)

    nodes = [_placed(cluster, pod(gpu=1)).node for _ in range(3)]

    assert nodes == ["n2", "n1", "n1"]


def test_renamed_replicas_are_for_their_own_name_only() -> None:
    renamed = node(replica_card(resource=SHARED), resource=SHARED)
    both = ledger_node("n1", replica_card(resource=SHARED), served=(GPU, SHARED))

    [share] = placed(pod(gpu_shared=1), renamed).shares

    assert share.memory_mib == 3_840
    assert refused(pod(gpu=1), renamed).counts == (("ResourceNotServed", 1),)
    assert refused(pod(gpu=1), both).counts == (("GpuReplicasOnly", 1),)
    assert refused(pod(gpu_shared=1), node(device())).counts == (("ResourceNotServed", 1),)


def test_words_25_several_replicas_of_a_container_are_of_different_gpus() -> None:
    two = node(replica_card(0), replica_card(1))

    shares = placed(pod(gpu=2), two).shares

    assert sorted(share.index for share in shares) == [0, 1]
    assert refused(pod(gpu=3), two).counts == (("NotEnoughGpus", 1),)


def test_words_25_a_container_with_several_waits_where_one_is_the_most() -> None:
    cards = [replica_card(index, one_per_container=True) for index in range(2)]

    refusal = refused(pod(gpu=2), node(*cards))

    assert refusal.counts == (("GpuReplicasTogether", 1),)
    assert refusal.nearest_nodes[0].devices[0].reason == (
        "a container may have one of its replicas, and 2 are requested (failRequestsGreaterThanOne)"
    )


@pytest.mark.parametrize(("clients", "fits"), [("4", True), ("3", False)])
def test_selectors_of_gke_choose_nodes_with_as_many_replicas(clients: str, fits: bool) -> None:
    """Nodes have GKE's labels, so that its manifests run unchanged where they fit."""
    card = replica_card()
    selector = (
        ("cloud.google.com/gke-gpu-sharing-strategy", "time-sharing"),
        ("cloud.google.com/gke-max-shared-clients-per-gpu", clients),
    )
    wanted = structs.replace(pod(gpu=1), node_requirements=NodeRequirements(selector=selector))
    shared = ledger_node("n1", card, served=(GPU,), labels=labels_of([card]))

    if fits:
        assert placed(wanted, shared).node == "n1"
    else:
        assert "didn't match Pod's node affinity/selector" in refused(wanted, shared).reason


def test_a_pod_that_demands_strict_isolation_gets_no_replica() -> None:
    strict = pod({"leasehold.dev/isolation": "strict"}, gpu=1)

    assert refused(strict, node(replica_card())).counts == (("GpuIsolationStrict", 1),)


def test_a_gpu_without_mps_offers_no_replicas_by_it() -> None:
    card = replica_card(strategy="mps", offer=Offer(memory=(), compute=()))

    assert refused(pod(gpu=1), node(card)).counts == (("GpuNotIsolated", 1),)


def test_leases_of_amounts_keep_replicas_away_until_they_end() -> None:
    in_parts = ledger_node("n1", (replica_card(), use(100, 10)), served=(GPU,))

    [verdict] = refused(pod(gpu=1), in_parts).nearest_nodes[0].devices

    assert verdict.reason == (
        "its leases share it in mode hami-core, which changes when the last of them ends"
    )


def _placed(cluster: Cluster, wanted: PodRequest) -> Placement:
    placement = cluster.place(wanted)
    assert isinstance(placement, Placement), placement
    return placement
