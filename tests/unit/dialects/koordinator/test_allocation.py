"""What Koordinator's users see of pods and nodes, byte for byte, and what the audit finds."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.cli.audit import lease_checks as audit
from services.cli.audit.snapshot import Snapshot
from services.cli.pod_summary import PodSummary
from services.node_agent.isolation.region_image import region_path_of, seed_of
from shared.dialects.advertised import NodeSoftware
from shared.dialects.koordinator import dialect
from shared.dialects.koordinator.annotation import (
    AllocatedGpu,
    binary_text,
    decimal_text,
    encode_allocated,
    parse_allocated,
    ratio_of,
)
from shared.dialects.koordinator.dialect import describe_node
from shared.dialects.koordinator.requests import parse_part
from shared.model.devices.device import Device
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease, LeaseState
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.leases.ledger import NodeTotals
from shared.model.quantity import parse_count
from tests.support import build
from tests.support.dialects.builders import PATHS, container_with, device, koord, leased_on, read

GI = 1 << 30
CORE, MEMORY, RATIO = (
    f"koordinator.sh/gpu-{name}" for name in ("core", "memory", "memory-ratio")
)  # fmt: skip


def leased(*devices: Device, **amounts: int) -> Lease:
    """Return the lease of a pod of one container on these devices."""
    return leased_on(read(koord(**amounts)), devices)


def written(*devices: Device, **amounts: int) -> str:
    notes = dialect.binding_annotations(leased(*devices, **amounts), 1.0)
    return notes["scheduling.koordinator.sh/device-allocated"]


def resources(*devices: Device, **amounts: int) -> dict[str, str]:
    """Return the first GPU's resources in the annotation."""
    found: dict[str, str] = json.loads(written(*devices, **amounts))["gpu"][0]["resources"]
    return found


ALL_OF_IT = (
    '"resources":{"koordinator.sh/gpu-core":"100","koordinator.sh/gpu-memory":"80Gi",'
    '"koordinator.sh/gpu-memory-ratio":"100"}'
)
EIGHT_GI = '"resources":{"koordinator.sh/gpu-core":"50","koordinator.sh/gpu-memory":"8Gi",'
EIGHT_GI += '"koordinator.sh/gpu-memory-ratio":"10"}'
PUBLISHED: dict[str, tuple[tuple[Device, ...], dict[str, int], str]] = {
    "half of a gpu": (
        (device(3, 46068, uuid="GPU-57047317-c2d0-b5bd-37b9-522cf6d24591"),),
        {"shared": 1, "core": 50, "ratio": 50},
        '{"gpu":[{"minor":3,"resources":{"koordinator.sh/gpu-core":"50",'
        '"koordinator.sh/gpu-memory":"23034Mi","koordinator.sh/gpu-memory-ratio":"50"},'
        '"id":"GPU-57047317-c2d0-b5bd-37b9-522cf6d24591"}]}',
    ),
    "two whole gpus": (
        (device(0, 81920), device(1, 81920)),
        {"shared": 2, "core": 200, "ratio": 200},
        f'{{"gpu":[{{"minor":0,{ALL_OF_IT},"id":"GPU-0"}},{{"minor":1,{ALL_OF_IT},"id":"GPU-1"}}]}}',
    ),
    "in the order of choice, with the ratio derived": (
        (device(5, 81920), device(4, 81920)),
        {"shared": 2, "core": 100, "memory": 16 * GI},
        f'{{"gpu":[{{"minor":5,{EIGHT_GI},"id":"GPU-5"}},{{"minor":4,{EIGHT_GI},"id":"GPU-4"}}]}}',
    ),
}


@pytest.mark.parametrize(("devices", "amounts", "text"), PUBLISHED.values(), ids=PUBLISHED)
def test_koordinator_10_and_16_the_annotation_is_the_published_one_byte_for_byte(
    devices: tuple[Device, ...], amounts: dict[str, int], text: str
) -> None:
    assert written(*devices, **amounts) == text


@pytest.mark.parametrize(
    ("mib", "texts"),
    [
        (15360, ["1536Mi", "3840Mi", "5315022028", "7680Mi"]),
        (16384, ["1717986918", "4Gi", "5669356830", "8Gi"]),
        (24576, ["2576980377", "6Gi", "8504035246", "12Gi"]),
        (40960, ["4Gi", "10Gi", "14173392076", "20Gi"]),
        (46068, ["4830579916", "11517Mi", "15940913725", "23034Mi"]),
        (81559, ["8552080998", "20879104Ki", "28221867294", "41758208Ki"]),
        (81920, ["8Gi", "20Gi", "28346784153", "40Gi"]),
    ],
)
def test_koordinator_11_bytes_of_a_ratio_are_those_of_the_published_table(
    mib: int, texts: list[str]
) -> None:
    found = [resources(device(0, mib), shared=1, ratio=ratio)[MEMORY] for ratio in (10, 25, 33, 50)]

    assert found == texts


def test_koordinator_12_decimal_gigabytes_become_kibibytes() -> None:
    assert resources(device(0, 81920), shared=1, memory=parse_count("8G"))[MEMORY] == "7812500Ki"


@pytest.mark.parametrize(("percent", "ratio"), [(29, 28), (57, 56), (58, 57), (50, 50), (10, 10)])
def test_koordinator_13_a_derived_ratio_is_truncated(percent: int, ratio: int) -> None:
    total = 100 * GI

    assert ratio_of(percent * GI, total) == ratio
    assert ratio_of(1, total) == 0


def test_koordinator_14_compute_that_was_not_requested_is_left_out() -> None:
    assert resources(device(0, 46068), shared=1, memory=8 * GI) == {MEMORY: "8Gi", RATIO: "17"}


def test_koordinator_15_annotations_of_other_writers_are_parsed() -> None:
    text = json.dumps(
        {
            "gpu": [
                {
                    "minor": 1,
                    "resources": {"kubernetes.io/gpu-core": 50, MEMORY: "8Gi", RATIO: "1k"},
                    "surprise": {},
                },
                {"minor": 0, "id": "GPU-a"},
            ],
            "rdma": [{"minor": 0}],
        }
    )

    assert parse_allocated(text) == (
        AllocatedGpu(minor=1, resources={CORE: 50, MEMORY: 8 * GI, RATIO: 1000}),
        AllocatedGpu(minor=0, uuid="GPU-a"),
    )
    with pytest.raises(RequestError, match="device-allocated is malformed"):
        parse_allocated('{"gpu":[{"id":"GPU-a"}]}')


@given(st.integers(1, 99), st.integers(1, 200_000))
def test_the_enforced_limit_never_exceeds_the_annotated_amount(ratio: int, mib: int) -> None:
    lease = leased(device(0, mib), shared=1, ratio=ratio)
    shown: Mapping[str, Any] = parse_allocated(encode_allocated(lease))[0].resources or {}

    assert shown[RATIO] == ratio
    assert 0 <= shown[MEMORY] - lease.shares[0].limit_bytes < MIB


@given(st.integers(1, 200_000), st.data())
def test_bytes_are_written_and_enforced_exactly(mib: int, data: st.DataObject) -> None:
    requested = data.draw(st.integers(MIB, mib * MIB))
    lease = leased(device(0, mib), shared=1, memory=requested)
    shown: Mapping[str, Any] = parse_allocated(encode_allocated(lease))[0].resources or {}

    assert shown[MEMORY] == requested == lease.shares[0].limit_bytes
    assert lease.shares[0].memory_mib * MIB >= requested


@given(st.integers(0, 1 << 62))
def test_quantities_parse_back_to_the_same_amount(number: int) -> None:
    assert parse_count(binary_text(number)) == number == parse_count(decimal_text(number))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 200_000))
def test_koordinator_31_limits_of_shares_that_fit_a_gpu_never_exceed_it(
    ratios: list[int], mib: int
) -> None:
    shares = [leased(device(0, mib), shared=1, ratio=ratio).shares[0] for ratio in ratios]

    if sum(ratios) <= 100:
        assert sum(share.memory_mib for share in shares) <= mib
    assert all(share.limit_bytes <= share.memory_mib * MIB for share in shares)


def test_the_region_that_is_seeded_before_the_start_has_the_limit_of_every_gpu() -> None:
    lease = leased(device(0, 81920), device(1, 81920), shared=2, core=60, memory=16 * GI)
    setup = dialect.container_setup(lease, "c", {}, PATHS)

    seed = seed_of(setup.environment)
    place = region_path_of(setup)

    assert set(seed.memory_limits) == {8 * GI}
    assert set(seed.core_limits) == {30}
    assert str(place) == "/var/c/u1_c/u1_c.cache"


def test_koordinator_22_a_lease_that_is_rebuilt_from_its_pod_has_the_same_annotation() -> None:
    lease = leased(device(0, 46068), device(1, 46068), shared=2, core=100, memory=16 * GI)

    copied = load_lease(dump_lease(lease), namespace=lease.namespace, name=lease.name)

    assert encode_allocated(copied) == encode_allocated(lease)
    assert copied.shares == lease.shares


def test_a_gpu_of_an_init_container_is_one_entry_with_the_larger_amount() -> None:
    request = read(
        container_with("init", limits=koord(shared=1, ratio=60), init=True),
        container_with("main", limits=koord(shared=1, ratio=40)),
    )

    found = parse_allocated(encode_allocated(leased_on(request, (device(),), (device(),))))

    assert [(entry.minor, (entry.resources or {})[RATIO]) for entry in found] == [(0, 60)]


def test_the_audit_finds_a_changed_allocation() -> None:
    held = leased(device(3, uuid="GPU-x"), shared=1, core=50, ratio=50)
    held = structs.replace(held, dialect="koordinator", state=LeaseState.ACTIVE)
    true = dialect.binding_annotations(held, 1.0)
    forged = {key: text.replace("GPU-x", "GPU-y") for key, text in true.items()}

    def found(annotations: dict[str, str]) -> list[str]:
        pod = PodSummary(
            pod=held.pod,
            namespace=held.namespace,
            name=held.name,
            node=held.node,
            phase="Running",
            annotations=annotations,
        )
        account = NodeTotals(node=build.ledger_node(held.node), leases=(held,))
        facts = Snapshot(read_at=0.0, nodes=(account,), pods=(pod,))
        return [one.text for one in audit.annotation_views(facts)]

    assert found(true) == []
    assert "lists GPU 3 (GPU-y) instead of the lease" in found(forged)[0]
    assert "lists no GPU" in found({})[0]
    assert "is malformed" in found(dict.fromkeys(true, "x"))[0]


legal = st.one_of(
    st.fixed_dictionaries(
        {"shared": st.integers(1, 8)},
        optional={"core": st.integers(1, 800)},
    ).flatmap(
        lambda known: st.one_of(
            st.builds(lambda r: {**known, "ratio": r}, st.integers(1, 800)),
            st.builds(lambda m: {**known, "memory": m}, st.integers(8 * MIB, 640 * GI)),
        )
    )
)


@given(legal)
def test_the_parts_of_a_container_sum_up_to_its_request(amounts: dict[str, int]) -> None:
    try:
        found = parse_part("main", koord(**amounts))
    except RequestError:
        per_card = [
            amounts[name] / amounts["shared"] for name in ("core", "ratio") if name in amounts
        ]
        assert any(amount > 100 or amount % 1 for amount in per_card)
        return

    assert found is not None
    assert found.gpus == amounts["shared"]
    assert found.gpus * found.cores_percent == amounts.get("core", 0)
    ratio = 100 if found.whole else found.memory_percent or 0
    assert found.gpus * ratio == amounts.get("ratio", 0)
    rest = amounts.get("memory", 0) - found.gpus * (found.memory_bytes or 0)
    assert 0 <= rest < found.gpus


def test_labels_name_vendor_model_driver_and_isolation() -> None:
    one = device(model="NVIDIA H100 80GB HBM3")

    assert describe_node(
        (one,), NodeSoftware(driver_version="550.54.15", isolation_available=True)
    ).labels == {
        "node.koordinator.sh/gpu-vendor": "nvidia",
        "node.koordinator.sh/gpu-model": "H100-80GB-HBM3",
        "node.koordinator.sh/gpu-driver-version": "550.54.15",
        "koordinator.sh/gpu-isolation-provider": "HAMi-core",
    }


def test_koordinator_29_without_the_library_the_label_is_removed() -> None:
    label = "koordinator.sh/gpu-isolation-provider"

    assert describe_node((device(),), NodeSoftware(isolation_available=False)).labels[label] is None
    assert describe_node((), NodeSoftware(isolation_available=True)).labels[label] is None


def test_the_device_object_has_upstreams_fields() -> None:
    place = {"numa": 1, "pcie": "pci0000:3a", "bus": "0000:3b:00.0"}
    one = device(0, 81920, uuid="GPU-1111", model="NVIDIA A100-SXM4-80GB", **place)

    shown = describe_node((one,), NodeSoftware()).objects[0]

    assert shown.collection.startswith("/apis/scheduling.koordinator.sh/v1alpha1/")
    assert shown.devices == (
        {
            "type": "gpu",
            "id": "GPU-1111",
            "minor": 0,
            "health": True,
            "labels": {
                "node.koordinator.sh/gpu-vendor": "nvidia",
                "node.koordinator.sh/gpu-model": "A100-SXM4-80GB",
            },
            "resources": {CORE: "100", MEMORY: "80Gi", RATIO: "100"},
            "topology": {
                "socketID": -1,
                "nodeID": 1,
                "pcieID": "pci0000:3a",
                "busID": "0000:3b:00.0",
            },
        },
    )


def test_koordinator_20_an_unhealthy_gpu_has_a_condition_in_its_object() -> None:
    shown = describe_node((device(0, healthy=False), device(1)), NodeSoftware()).objects[0].devices

    assert shown[0]["health"] is False
    assert shown[0]["conditions"][0]["type"] == "Healthy"
    assert "conditions" not in shown[1]
