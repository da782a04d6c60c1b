"""Where a GPU lies, and how it is linked to the others; blocking, for the door in `nvml.py` alone.

Everything here is between an `nvmlInit` and an `nvmlShutdown`. What a model or driver does not
know is left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from services.node_agent.gpus.links import (
    ACROSS_SOCKETS,
    ON_ONE_BOARD,
    ON_ONE_SOCKET,
    UNDER_HOST_BRIDGE,
    UNDER_ONE_SWITCH,
    UNDER_SWITCHES,
    count_nvlinks,
    link_score,
    parse_pci_address,
    root_complex_in,
)
from shared.model.names import DeviceUuid

SYSFS = Path("/sys/bus/pci/devices")
T = TypeVar("T")

_NEAREST = {
    pynvml.NVML_TOPOLOGY_INTERNAL: ON_ONE_BOARD,
    pynvml.NVML_TOPOLOGY_SINGLE: UNDER_ONE_SWITCH,
    pynvml.NVML_TOPOLOGY_MULTIPLE: UNDER_SWITCHES,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: UNDER_HOST_BRIDGE,
    pynvml.NVML_TOPOLOGY_NODE: ON_ONE_SOCKET,
    pynvml.NVML_TOPOLOGY_SYSTEM: ACROSS_SOCKETS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one GPU lies."""

    bus: str = ""
    pcie: str = ""
    numa: int | None = None


@dataclass(frozen=True, slots=True)
class _Links:
    """One GPU's NVLinks that work."""

    direct: tuple[str, ...] = ()
    """Addresses at their far ends."""
    switched: int = 0


def place_of(handle: Any) -> Place:
    """Return where a GPU lies; no other is asked."""
    bus = _bus(handle)
    numa, pcie = _in_sysfs(bus) if bus else (None, "")
    if numa is None:
        numa = _asked(lambda: int(pynvml.nvmlDeviceGetNumaNodeId(handle)), None)
    return Place(bus=bus, pcie=pcie, numa=numa)


def links_among(uuids: Iterable[DeviceUuid]) -> dict[DeviceUuid, Mapping[DeviceUuid, int]]:
    """Return the score of each pair of these GPUs, as far as it is told.

    One that hangs holds this up: only those are to be named that have just answered.
    """
    there = [end for uuid in uuids if (end := _end_of(uuid)) is not None]
    return {
        own.uuid: {
            other.uuid: points
            for other in there
            if other is not own and (points := _score(own, other)) is not None
        }
        for own in there
    }


@dataclass(frozen=True, slots=True)
class _End:
    """One GPU of a pair."""

    uuid: DeviceUuid
    handle: Any
    bus: str
    links: _Links


def _end_of(uuid: DeviceUuid) -> _End | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None
    return _End(uuid, handle, _bus(handle), _links(handle))


def _score(own: _End, other: _End) -> int | None:
    ask = pynvml.nvmlDeviceGetTopologyCommonAncestor
    nearest = _NEAREST.get(_asked(lambda: ask(own.handle, other.handle), None))
    if nearest is None:
        return None
    joined = count_nvlinks(own.links.direct, own.links.switched, other.bus, other.links.switched)
    return link_score(nearest, joined)


def _links(handle: Any) -> _Links:
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
                direct.append(_address(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                break
    return _Links(tuple(direct), switched)


def _bus(handle: Any) -> str:
    return _asked(lambda: _address(pynvml.nvmlDeviceGetPciInfo(handle)), "")


def _address(info: Any) -> str:
    text = info.busId
    return parse_pci_address(text.decode() if isinstance(text, bytes) else text)


def _in_sysfs(bus: str) -> tuple[int | None, str]:
    """Return what the kernel says: the NUMA node, and the root complex; each if it does."""
    device = SYSFS / bus
    try:
        numa = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        numa = -1
    try:
        place = str(device.resolve(strict=True))
    except OSError:
        place = ""
    return numa if numa >= 0 else None, root_complex_in(place)


def _asked(question: Callable[[], T], otherwise: T) -> T:
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return otherwise
