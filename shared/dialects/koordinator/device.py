"""A node's labels and its object of kind `Device`, as Koordinator's users know them; pure.

Both are views of what the agent reports. Deleting the object has no effect on leases, and the agent
writes it again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shared.dialects.advertised import Advertisement, NodeObject, NodeSoftware
from shared.dialects.koordinator.amounts import CORE, FULL, MEMORY, PREFIX, RATIO
from shared.dialects.koordinator.annotation import binary_text, decimal_text
from shared.dialects.koordinator.hints import MODEL_LABEL, VENDOR, VENDOR_LABEL
from shared.model.device import LABEL_LENGTH, Device, DeviceMode, model_label
from shared.model.lease import MIB

ISOLATION_LABEL = "koordinator.sh/gpu-isolation-provider"
HAMI_CORE = "HAMi-core"
DRIVER_LABEL = "node.koordinator.sh/gpu-driver-version"
NODE_LABELS = frozenset({ISOLATION_LABEL, DRIVER_LABEL, VENDOR_LABEL, MODEL_LABEL})

COLLECTION = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
KIND = "Device"
UNHEALTHY = "DeviceUnhealthy"


def describe_node(devices: Sequence[Device], software: NodeSoftware) -> Advertisement:
    """Return a node's labels and its object.

    The isolation label is set only while isolation works: pods whose share is limited run only on
    nodes that have it.
    """
    gpus = shared_devices(devices)
    labels = labels_of(gpus, software)
    return Advertisement(
        labels=labels
        | {ISOLATION_LABEL: HAMI_CORE if gpus and software.isolation_available else None},
        objects=(
            NodeObject(
                collection=COLLECTION,
                kind=KIND,
                labels=labels,
                devices=tuple(_entry(device) for device in gpus),
            ),
        ),
    )


def shared_devices(devices: Sequence[Device]) -> list[Device]:
    """Return the devices without those in MIG mode, which Koordinator does not know."""
    return [device for device in devices if device.mode is DeviceMode.HAMI_CORE]


def labels_of(devices: Sequence[Device], software: NodeSoftware) -> dict[str, str | None]:
    """Return vendor, model and driver; as upstream, the model is that of the first device."""
    if not devices:
        return dict.fromkeys((VENDOR_LABEL, MODEL_LABEL, DRIVER_LABEL))
    return {
        VENDOR_LABEL: VENDOR,
        MODEL_LABEL: model_label(devices[0].model),
        DRIVER_LABEL: software.driver_version[:LABEL_LENGTH] or None,
    }


def device_resources(device: Device) -> dict[str, int]:
    """Return the amounts of one GPU, in bytes and percent."""
    return {
        PREFIX + CORE: FULL,
        PREFIX + MEMORY: device.memory_mib * MIB,
        PREFIX + RATIO: FULL,
    }


def _entry(device: Device) -> dict[str, Any]:
    amounts = device_resources(device)
    return {
        "type": "gpu",
        "id": device.uuid,
        "minor": device.index,
        "health": device.healthy,
        "labels": {VENDOR_LABEL: VENDOR, MODEL_LABEL: model_label(device.model)},
        "resources": {
            name: binary_text(amount) if name == PREFIX + MEMORY else decimal_text(amount)
            for name, amount in amounts.items()
        },
        **_topology(device),
        **({} if device.healthy else {"conditions": [_condition(device)]}),
    }


def _topology(device: Device) -> Mapping[str, Any]:
    """Return the GPU's PCIe and NUMA location, or nothing if it is unknown."""
    if not device.pcie:
        return {}
    place = {"socketID": -1, "nodeID": max(device.numa or 0, 0), "pcieID": device.pcie}
    return {"topology": place | ({"busID": device.bus} if device.bus else {})}


def _condition(device: Device) -> dict[str, str]:
    return {
        "type": "Healthy",
        "status": "False",
        "reason": UNHEALTHY,
        "message": f"GPU {device.index} is {device.fault or 'not healthy'}: see `leasehold gpus`, "
        "nvidia-smi and the kernel's log of the node",
    }
