"""A GPU's location on the PCI bus, and its links to other GPUs; blocking.

Call these functions through `with_nvml`. What a model or driver does not report is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from services.node_agent.gpus.links import (
    ACROSS_SOCKETS,
    ON_ONE_BOARD,
    ON_ONE_SOCKET,
    UNDER_HOST_BRIDGE,
    UNDER_ONE_SWITCH,
    UNDER_SWITCHES,
    NvLinks,
    PciLocation,
    link_score,
    parse_pci_address,
    root_complex_in,
)
from services.node_agent.gpus.nvml.calls import text_of, value_or
from shared.model.bounds import HIGHEST_INDEX
from shared.model.names import DeviceUuid

SYSFS = Path("/sys/bus/pci/devices")

_ANCESTOR_SCORES: Mapping[Any, int] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: ON_ONE_BOARD,
    pynvml.NVML_TOPOLOGY_SINGLE: UNDER_ONE_SWITCH,
    pynvml.NVML_TOPOLOGY_MULTIPLE: UNDER_SWITCHES,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: UNDER_HOST_BRIDGE,
    pynvml.NVML_TOPOLOGY_NODE: ON_ONE_SOCKET,
    pynvml.NVML_TOPOLOGY_SYSTEM: ACROSS_SOCKETS,
}


@dataclass(frozen=True, slots=True)
class _LinkedGpu:
    """One GPU of a pair."""

    uuid: DeviceUuid
    handle: Any
    address: str
    nvlinks: NvLinks


def location_of(handle: Any) -> PciLocation:
    """Return the location of a GPU; queries no other GPU."""
    address = _address_of(handle)
    numa, root_complex = _read_sysfs(address) if address else (None, "")
    if numa is None:
        numa = value_or(lambda: int(pynvml.nvmlDeviceGetNumaNodeId(handle)), None)
    if numa is not None and not 0 <= numa <= HIGHEST_INDEX:
        numa = None
    return PciLocation(address=address, root_complex=root_complex, numa=numa)


def links_among(uuids: Iterable[DeviceUuid]) -> dict[DeviceUuid, Mapping[DeviceUuid, int]]:
    """Return the score of each pair of these GPUs, where NVML reports it.

    A GPU that hangs blocks this call, so pass only GPUs that have just responded.
    """
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
    return link_score(nearest, own.nvlinks.count_to(other.address, other.nvlinks))


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
    """Return the NUMA node and the root complex that the kernel reports."""
    device = SYSFS / address
    try:
        numa = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        numa = -1
    try:
        path = str(device.resolve(strict=True))
    except OSError:
        path = ""
    return numa if numa >= 0 else None, root_complex_in(path)
