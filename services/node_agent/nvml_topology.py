"""Where a GPU lies, and how it is linked to the others; blocking, for the door in `nvml.py` alone.

Everything here is between an `nvmlInit` and an `nvmlShutdown`. What a model or driver does not
know is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from services.node_agent.topology import (
    ACROSS_SOCKETS,
    ON_ONE_BOARD,
    ON_ONE_SOCKET,
    UNDER_HOST_BRIDGE,
    UNDER_ONE_SWITCH,
    UNDER_SWITCHES,
    bus_of,
    nvlinks_between,
    root_in,
    score,
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
    links: dict[DeviceUuid, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Links:
    """One GPU's NVLinks that work."""

    direct: tuple[str, ...] = ()
    """Addresses at their far ends."""
    switched: int = 0


def place_of(handle: Any, number: int, count: int) -> Place:
    """Return where the GPU with this number among `count` lies."""
    bus = _bus(handle)
    numa, pcie = _in_sysfs(bus) if bus else (None, "")
    if numa is None:
        numa = _asked(lambda: int(pynvml.nvmlDeviceGetNumaNodeId(handle)), None)
    own = _links(handle)
    pairs = [_pair(handle, own, other) for other in range(count) if other != number]
    return Place(bus=bus, pcie=pcie, numa=numa, links=dict(pair for pair in pairs if pair))


def _pair(handle: Any, own: _Links, number: int) -> tuple[DeviceUuid, int] | None:
    """Return another GPU's name and the pair's score, if they are told."""
    try:
        other = pynvml.nvmlDeviceGetHandleByIndex(number)
        name = pynvml.nvmlDeviceGetUUID(other)
        nearest = _NEAREST.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
    except pynvml.NVMLError:
        return None
    uuid = DeviceUuid(name.decode() if isinstance(name, bytes) else name)
    if nearest is None:
        return None
    theirs = _links(other)
    joined = nvlinks_between(own.direct, own.switched, _bus(other), theirs.switched)
    return uuid, score(nearest, joined)


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
    return bus_of(text.decode() if isinstance(text, bytes) else text)


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
    return numa if numa >= 0 else None, root_in(place)


def _asked(question: Callable[[], T], otherwise: T) -> T:
    try:
        return question()
    except (pynvml.NVMLError, AttributeError):
        return otherwise
