"""The device manager's checkpoint, `kubelet_internal_checkpoint`, in a real kubelet's format."""

import base64
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from simcluster.kubelet.devices.kubelet_devices import KubeletDevices, PluginAllocation
from simcluster.kubelet.settings import replace_file

FILE_NAME = "kubelet_internal_checkpoint"
_NO_NUMA = "-1"
_COMPACT = (",", ":")


def encode_checkpoint(kubelet_devices: KubeletDevices) -> bytes:
    """Return the file's content; node agents read it, so the format is a real kubelet's."""
    entries = json.dumps(
        [
            {
                "PodUID": allocation.pod_uid,
                "ContainerName": allocation.container,
                "ResourceName": allocation.resource,
                "DeviceIDs": {_NO_NUMA: sorted(allocation.devices)},
                "AllocResp": base64.b64encode(allocation.response).decode(),
            }
            for allocation in kubelet_devices.allocations.values()
        ],
        separators=_COMPACT,
    )
    registered = ",".join(
        f"{json.dumps(name)}:{_encode_devices(device_ids)}"
        for name, device_ids in kubelet_devices.healthy.items()
    )
    data = f'{{"PodDeviceEntries":{entries},"RegisteredDevices":{{{registered}}}}}'.encode()
    return b'{"Data":%s,"Checksum":%d}' % (data, zlib.crc32(data))


@lru_cache(maxsize=64)
def _encode_devices(devices: frozenset[str]) -> str:
    """Encode a device list; cached, because each allocation saves the lists of all resources."""
    return json.dumps(sorted(devices), separators=_COMPACT)


def decode_checkpoint(content: bytes) -> KubeletDevices:
    """Decode a checkpoint; its resources have no devices until their plugins are back.

    Raises ValueError if the checksum does not match.
    """
    document: dict[str, Any] = json.loads(content)
    data = document["Data"]
    if zlib.crc32(json.dumps(data, separators=_COMPACT).encode()) != document["Checksum"]:
        raise ValueError(f"{FILE_NAME}: the checksum {document['Checksum']} does not match")
    kubelet_devices = KubeletDevices()
    for entry in data["PodDeviceEntries"] or ():
        devices = frozenset(device for ids in entry["DeviceIDs"].values() for device in ids)
        kubelet_devices.record(
            PluginAllocation(
                entry["PodUID"],
                entry["ContainerName"],
                entry["ResourceName"],
                devices,
                base64.b64decode(entry["AllocResp"]),
            )
        )
    for resource in data["RegisteredDevices"] or {}:
        kubelet_devices.list_without_devices(resource)
    return kubelet_devices


def save_checkpoint(directory: Path, kubelet_devices: KubeletDevices) -> None:
    """Replace the checkpoint in `directory` atomically."""
    replace_file(directory / FILE_NAME, encode_checkpoint(kubelet_devices))


def load_checkpoint(directory: Path) -> KubeletDevices | None:
    """Return the checkpoint's content; None if there is no file."""
    path = directory / FILE_NAME
    return decode_checkpoint(path.read_bytes()) if path.exists() else None
