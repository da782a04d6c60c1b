"""Where pods in KAI's words are placed."""

import pytest

from shared.dialects.dialect import PodManifest, Rules
from shared.dialects.kai.words import POD_MODE, SM_SHARING, TIME_SLICING
from shared.dialects.pod_requests import parse_pod_request
from shared.model.devices.enforcers import Offer
from shared.model.leases.ledger import LedgerNode
from shared.model.requests.placement import Placement, Refusal
from tests.support.build import devices, gpu, ledger_node, request
from tests.support.placer.placing import Cluster
from tests.unit.dialects.kai.test_words import TRIGGER, completed, manifest


def cards(count: int, memory_mib: int = 15_360, other_manager: str = "") -> LedgerNode:
    return ledger_node(
        "n1", *devices(count, memory_mib=memory_mib), served=(TRIGGER,), other_manager=other_manager
    )


def pod(**notes: str) -> PodManifest:
    return completed(manifest({key.replace("_", "-"): text for key, text in notes.items()}))


def placed(cluster: Cluster, **notes: str) -> Placement | Refusal:
    return cluster.place(parse_pod_request(pod(**notes), Rules()))


def test_several_devices_are_different_ones_of_one_node_each_with_the_part() -> None:
    outcome = placed(Cluster(cards(4)), gpu_fraction="0.5", gpu_fraction_num_devices="3")

    assert isinstance(outcome, Placement)
    assert len({share.device for share in outcome.shares}) == 3
    assert {share.memory_mib for share in outcome.shares} == {7_680}


def test_with_fewer_devices_than_requested_the_pod_waits_with_that_reason() -> None:
    cluster = Cluster(cards(3))
    placed(cluster, gpu_fraction="0.9")

    outcome = placed(cluster, gpu_fraction="0.5", gpu_fraction_num_devices="3")

    assert isinstance(outcome, Refusal)
    assert "Insufficient GPU memory" in outcome.reason


def test_parts_fill_a_device_and_no_more() -> None:
    cluster = Cluster(cards(1))
    outcomes = [placed(cluster, gpu_fraction="0.3333333333") for _ in range(4)]

    assert [type(outcome) for outcome in outcomes] == [Placement, Placement, Placement, Refusal]


def test_less_than_a_percent_of_a_device_is_placed() -> None:
    outcome = placed(Cluster(cards(1, memory_mib=143_771)), gpu_fraction="0.005")

    assert isinstance(outcome, Placement)
    assert [share.memory_mib for share in outcome.shares] == [718]


def test_pods_by_mps_wait_where_no_device_offers_it() -> None:
    outcome = placed(Cluster(cards(1)), gpu_fraction="0.5", mps="true")

    assert isinstance(outcome, Refusal)
    assert "no GPU with the enforcer that the pod demands" in outcome.text


@pytest.mark.parametrize(
    ("first", "second"), [(TIME_SLICING, SM_SHARING), (SM_SHARING, TIME_SLICING)]
)
@pytest.mark.parametrize("key", ["nvidia.com/container.main.gpu-compute.mode", POD_MODE])
def test_words_17_pods_of_different_modes_never_share_a_gpu(
    key: str, first: str, second: str
) -> None:
    both = Offer(memory=("mps", "hami-core"), compute=("mps", "hami-core"))
    cluster = Cluster(ledger_node("n1", *devices(2, offer=both), served=(TRIGGER,)))

    def place(mode: str) -> Placement | Refusal:
        notes = {"gpu-fraction": "0.25", key: mode}
        return cluster.place(parse_pod_request(completed(manifest(notes)), Rules()))

    outcomes = [place(mode) for mode in (first, second, first, second)]

    gpus = [outcome.shares[0].device for outcome in outcomes if isinstance(outcome, Placement)]
    assert len(gpus) == 4
    assert set(gpus[::2]).isdisjoint(gpus[1::2])


def test_no_node_is_taken_where_another_manager_reads_the_same_annotations() -> None:
    node = cards(1, other_manager="condition gpu-fractioning.nvidia.com/Ready")

    refusal = placed(Cluster(node), gpu_fraction="0.5")
    other = Cluster(node).place(request(gpu(memory=1000), triggers=(TRIGGER,)))

    assert isinstance(refusal, Refusal)
    assert "1 node(s) had another manager that enforces parts of GPUs" in refusal.text
    assert "remove KAI and its node agents from node n1" in refusal.text
    assert isinstance(other, Placement)
