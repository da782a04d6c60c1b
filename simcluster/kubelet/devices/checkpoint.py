"""The kubelet's own record of devices, `kubelet_internal_checkpoint`, in the real file's form."""

import base64
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from simcluster.kubelet.devices.device_state import DeviceAllocation, DeviceState
from simcluster.kubelet.settings import replace_file

FILE_NAME = "kubelet_internal_checkpoint"


_NO_NUMA = "-1"


_COMPACT = (",", ":")


def encode_checkpoint(ledger: DeviceState) -> bytes:
    """Return the file's content; agents read it as a last resort, so its form is the real one."""
    entries = json.dumps(
        [
            {
                "PodUID": holding.pod_uid,
                "ContainerName": holding.container,
                "ResourceName": holding.resource,
                "DeviceIDs": {_NO_NUMA: sorted(holding.devices)},
                "AllocResp": base64.b64encode(holding.response).decode(),
            }
            for holding in ledger.allocations.values()
        ],
        separators=_COMPACT,
    )
    registered = ",".join(
        f"{json.dumps(name)}:{_listed(found)}" for name, found in ledger.healthy.items()
    )
    data = f'{{"PodDeviceEntries":{entries},"RegisteredDevices":{{{registered}}}}}'.encode()
    return b'{"Data":%s,"Checksum":%d}' % (data, zlib.crc32(data))


@lru_cache(maxsize=64)
def _listed(devices: frozenset[str]) -> str:
    """Encode a list once: a plugin may report many devices, and every allocation saves them all."""
    return json.dumps(sorted(devices), separators=_COMPACT)


def decode_checkpoint(content: bytes) -> DeviceState:
    """Read a checkpoint; every resource in it is listed without devices until its plugin is back.

    Raises ValueError when the content does not match its checksum.
    """
    document: dict[str, Any] = json.loads(content)
    data = document["Data"]
    if zlib.crc32(json.dumps(data, separators=_COMPACT).encode()) != document["Checksum"]:
        raise ValueError(f"{FILE_NAME}: the checksum {document['Checksum']} does not match")
    ledger = DeviceState()
    for entry in data["PodDeviceEntries"] or ():
        devices = frozenset(device for ids in entry["DeviceIDs"].values() for device in ids)
        ledger.record(
            DeviceAllocation(
                entry["PodUID"],
                entry["ContainerName"],
                entry["ResourceName"],
                devices,
                base64.b64decode(entry["AllocResp"]),
            )
        )
    for resource in data["RegisteredDevices"] or {}:
        ledger.list_without_devices(resource)
    return ledger


def save_checkpoint(directory: Path, ledger: DeviceState) -> None:
    """Replace the checkpoint in `directory` in one step."""
    replace_file(directory / FILE_NAME, encode_checkpoint(ledger))


def load_checkpoint(directory: Path) -> DeviceState | None:
    """Return what the checkpoint says, or None where there is none."""
    path = directory / FILE_NAME
    return decode_checkpoint(path.read_bytes()) if path.exists() else None
