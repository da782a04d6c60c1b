"""A GPU's location on the PCI bus, and its links to others; called through `with_nvml`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from services.node_agent.gpus.inventory import PER_NVLINK
from services.node_agent.gpus.nvml.calls import text_of, value_or
from shared.model.bounds import HIGHEST_INDEX
from shared.model.names import DeviceUuid

_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
SYSFS = Path("/sys/bus/pci/devices")

_ANCESTOR_SCORES: Mapping[Any, int] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: 60,
    pynvml.NVML_TOPOLOGY_SINGLE: 50,
    pynvml.NVML_TOPOLOGY_MULTIPLE: 40,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: 30,
    pynvml.NVML_TOPOLOGY_NODE: 20,
    pynvml.NVML_TOPOLOGY_SYSTEM: 10,
}
"""On one board; below one switch, several switches, or one host bridge; on one socket, or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLocation:
    address: str = ""
    root_complex: str = ""
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinks:
    direct: tuple[str, ...] = ()
    switched: int = 0
    """NVSwitches connect all GPUs."""

    def count_to(self, address: str, other: "NvLinks") -> int:
        return sum(end == address for end in self.direct) + min(self.switched, other.switched)


def parse_pci_address(text: str) -> str:
    """Return a PCI address as the kernel writes it, or an empty text if it is invalid.

    >>> parse_pci_address("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    match = _ADDRESS.fullmatch(text.strip("\0 "))
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def root_complex_in(path: str) -> str:
    """Return the root complex in a device's sysfs path, or an empty text.

    >>> root_complex_in("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0")
    'pci0000:3a'
    """
    return next((part for part in path.split("/") if _ROOT_COMPLEX.fullmatch(part)), "")


@dataclass(frozen=True, slots=True)
class _LinkedGpu:
    uuid: DeviceUuid
    handle: Any
    address: str
    nvlinks: NvLinks


def location_of(handle: Any) -> PciLocation:
    address = _address_of(handle)
    numa, root_complex = _read_sysfs(address) if address else (None, "")
    if numa is None:
        numa = value_or(lambda: int(pynvml.nvmlDeviceGetNumaNodeId(handle)), None)
    if numa is not None and not 0 <= numa <= HIGHEST_INDEX:
        numa = None
    return PciLocation(address=address, root_complex=root_complex, numa=numa)


def links_among(uuids: Iterable[DeviceUuid]) -> dict[DeviceUuid, Mapping[DeviceUuid, int]]:
    """Pass only GPUs that have just responded: one that hangs blocks this call."""
    gpus = [gpu for uuid in uuids if (gpu := _linked_gpu(uuid)) is not None]
    return {
        own.uuid: {
            other.uuid: score
            for other in gpus
            if other is not own and (score := _pair_score(own, other)) is not None
        }
        for own in gpus
    }


def _linked_gpu(uuid: DeviceUuid) -> _LinkedGpu | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None
    return _LinkedGpu(uuid, handle, _address_of(handle), _nvlinks_of(handle))


def _pair_score(own: _LinkedGpu, other: _LinkedGpu) -> int | None:
    get_ancestor = pynvml.nvmlDeviceGetTopologyCommonAncestor
    ancestor = value_or(lambda: get_ancestor(own.handle, other.handle), None)
    nearest = _ANCESTOR_SCORES.get(ancestor)
    if nearest is None:
        return None
    return nearest + PER_NVLINK * own.nvlinks.count_to(other.address, other.nvlinks)


def _nvlinks_of(handle: Any) -> NvLinks:
    direct: list[str] = []
    switched = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                switched += 1
            elif kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                info = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
                direct.append(_address_in(info))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                break
    return NvLinks(direct=tuple(direct), switched=switched)


def _address_of(handle: Any) -> str:
    return value_or(lambda: _address_in(pynvml.nvmlDeviceGetPciInfo(handle)), "")


def _address_in(info: Any) -> str:
    return parse_pci_address(text_of(info.busId))


def _read_sysfs(address: str) -> tuple[int | None, str]:
    device = SYSFS / address
    try:
        numa = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        numa = -1
    try:
        path = str(device.readlink())
    except OSError:
        path = ""
    return numa if numa >= 0 else None, root_complex_in(path)
