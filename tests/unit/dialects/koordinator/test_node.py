"""What a node advertises to Koordinator's users: amounts, labels, and its `Device`."""

from shared.dialects.advertised import NodeSoftware
from shared.dialects.koordinator.dialect import describe_node
from tests.support.dialects.builders import device
from tests.unit.dialects.koordinator.test_allocation import CORE, MEMORY, RATIO


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
