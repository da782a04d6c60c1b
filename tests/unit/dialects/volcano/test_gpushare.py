"""Volcano gpushare: requests, annotations and container setup; the checklist by number."""

import re
from dataclasses import replace

import pytest

from shared.dialects.advertised import Strategy
from shared.dialects.dialect import ContainerManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.volcano.gpushare import MAX_UNITS, amount_changes
from shared.model.device import required_memory_mib
from shared.model.errors import RequestError
from shared.model.lease import Share, bookings
from shared.model.names import DeviceUuid
from shared.model.request import DeviceOrder, GpuRequest
from tests.support.dialects.builders import PATHS, device
from tests.support.dialects.volcano import SHARE, gpushare, lease, manifest_of, share


def test_item_1_eight_gpus_of_11178_mib_show_89424_memory_and_8_gpus() -> None:
    shown = SHARE.advertise([device(n, 11178) for n in range(8)], Strategy.AUTO)

    assert shown.node_status == {"volcano.sh/gpu-memory": 89424, "volcano.sh/gpu-number": 8}
    assert shown.served.keys() == {"leasehold.dev/share"}
    assert len({entry.id for entry in shown.served["leasehold.dev/share"]}) == 800


def test_item_2_number_mode_still_publishes_memory_of_zero() -> None:
    shown = SHARE.advertise([device(0, 11178)], Strategy.NUMBER)

    assert [entry.id for entry in shown.served["volcano.sh/gpu-number"]] == ["GPU-0"]
    assert shown.node_status == {"volcano.sh/gpu-memory": 0}


def test_item_3_a_bound_share_carries_its_index_and_nanoseconds() -> None:
    notes = SHARE.binding_annotations(lease(share("c", "GPU-0", 1024, 0)), 1593764466.550835304)

    assert notes["volcano.sh/gpu-index"] == "0"
    assert re.fullmatch(r"\d{19}", notes["volcano.sh/predicate-time"])


def test_item_5_init_containers_of_5000_and_3000_need_5000() -> None:
    request = parse_pod_request(
        manifest_of(gpushare("a", init=True, memory=5000), gpushare("b", init=True, memory=3000)),
        Rules(),
    )
    shares = [
        Share(
            container=c.container,
            device=DeviceUuid("GPU-0"),
            index=0,
            device_mib=11_178,
            memory_mib=required_memory_mib(c, device(0, 11178)),
            cores_percent=0,
            init=c.init,
            slotted=c.slotted,
        )
        for c in request.containers
    ]

    assert request.same_device
    assert [booking.memory_mib for booking in bookings(shares)] == [5000]


def test_item_7_whole_gpus_are_written_in_ascending_order() -> None:
    request = parse_pod_request(manifest_of(gpushare(number=2)), Rules())
    notes = SHARE.binding_annotations(
        lease(share("c", "GPU-5", 1, 0, 5), share("c", "GPU-2", 1, 0, 2)), 1.0
    )

    assert request.containers == (GpuRequest(container="c", gpus=2, whole=True, slotted=False),)
    assert request.device_order is DeviceOrder.FIRST
    assert notes["volcano.sh/gpu-index"] == "2,5"


def test_item_8_the_environment_is_the_guides_three_variables() -> None:
    card = device(0, 11178, unit_mib=10)
    memory = required_memory_mib(GpuRequest(container="c", gpus=1, memory_units=1024), card)
    held = lease(
        Share(
            container="c",
            device=card.uuid,
            index=0,
            device_mib=11_178,
            memory_mib=memory,
            cores_percent=0,
            unit_mib=10,
            slotted=False,
        )
    )

    setup = SHARE.container_setup(held, "c", {card.uuid: card}, PATHS)

    assert setup.environment == {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "VOLCANO_GPU_ALLOCATED": "10240",
        "VOLCANO_GPU_MEMORY_TOTAL": "11178",
    }
    assert setup.mounts == ()


def test_item_9_a_pod_is_marked_assigned_once_all_its_containers_are() -> None:
    held = lease(share("a", "GPU-0", 1, 0), share("b", "GPU-0", 1, 0))

    assert SHARE.allocated_annotations(held, frozenset({"a"})) == {}
    assert SHARE.allocated_annotations(held, frozenset({"a", "b"})) == {
        "volcano.sh/gpu-assigned": "true"
    }


def test_item_10_memory_counts_where_both_are_requested() -> None:
    request = parse_pod_request(manifest_of(gpushare(memory=1024, number=2)), Rules())

    assert [(c.gpus, c.memory_units) for c in request.containers] == [(1, 1024)]


def test_item_17_too_many_units_name_the_factor_needed() -> None:
    cards = [device(n, 81920) for n in range(8)]

    with pytest.raises(RequestError, match=r"--memory-factor (\d+)") as refused:
        SHARE.advertise(cards, Strategy.SHARE)

    factor = int(re.findall(r"--memory-factor (\d+)", str(refused.value))[0])
    fitting = [device(n, 81920, unit_mib=factor) for n in range(8)]
    units = SHARE.advertise(fitting, Strategy.SHARE).served["volcano.sh/gpu-memory"]
    assert len({entry.id for entry in units}) == 8 * (81920 // factor) <= MAX_UNITS
    with pytest.raises(RequestError):
        SHARE.advertise([device(n, 81920, unit_mib=factor - 1) for n in range(8)], Strategy.SHARE)


@pytest.mark.parametrize(
    ("amounts", "added"),
    [
        ({"volcano.sh/gpu-memory": 1024}, {"leasehold.dev/share": 1}),
        ({"volcano.sh/gpu-memory": 1024, "leasehold.dev/share": 1}, {}),
        ({"volcano.sh/gpu-memory": 1024, "leasehold.dev/share": 0}, {}),
        ({"volcano.sh/gpu-memory": 0}, {}),
        ({"volcano.sh/gpu-number": 1}, {}),
    ],
)
def test_admission_adds_the_trigger_to_containers_with_memory(
    amounts: dict[str, int], added: dict[str, int]
) -> None:
    assert amount_changes(amounts) == added


def test_memory_needs_the_trigger_where_all_containers_request_it() -> None:
    triggered = [
        ContainerManifest(name=name, limits={"volcano.sh/gpu-memory": 10, "leasehold.dev/share": 1})
        for name in "ab"
    ]

    assert parse_pod_request(manifest_of(*triggered), Rules()).triggers == ("leasehold.dev/share",)
    for other in (
        gpushare("b", memory=10),
        replace(triggered[1], limits={**triggered[1].limits, "leasehold.dev/share": 2}),
    ):
        partly = parse_pod_request(manifest_of(triggered[0], other), Rules())
        assert partly.triggers == ("volcano.sh/gpu-memory",)
