"""What a node has and shows: devices from what NVML found, and lists from devices; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.dialects.dialect import Dialect, ServedId
from shared.model.device import Device
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid
from shared.model.node import AGENT_ANNOTATION

MAX_LIST_BYTES = 4_000_000
"""The kubelet receives at most 4 MiB in one message; a little room is left."""
MAX_ID_LENGTH = 63
_HEALTH_LENGTHS = {True: len("Healthy"), False: len("Unhealthy")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One physical GPU as found."""

    uuid: DeviceUuid
    index: int
    """Minor number."""
    model: str
    memory_mib: int
    healthy: bool = True
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The operator's choices of how GPUs are shared."""

    split_count: int = 10
    """Slots per device."""
    unit_mib: int = 1
    """MiB per unit in which pods ask for memory."""
    strategy: str = "auto"
    """How gpushare's memory reaches the kubelet; see `Strategy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the node shows for all its dialects together."""

    served: Mapping[str, Mapping[str, ServedId]] = field(default_factory=dict)
    """By resource and ID, in the order of the list."""
    patched: Mapping[str, int] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our entries in annotations that others write too."""

    @property
    def healthy_counts(self) -> dict[str, int]:
        """How many devices the kubelet should call allocatable, by served resource."""
        return {
            resource: sum(served.healthy for served in ids.values())
            for resource, ids in self.served.items()
        }


def check_division(division: Division, strategies: Sequence[str]) -> None:
    """Raise RequestError naming the setting that no node can be divided by."""
    if division.split_count < 1:
        raise RequestError(f"--device-split-count must be 1 or more, got {division.split_count}")
    if division.unit_mib < 1:
        raise RequestError(f"--memory-factor must be 1 MiB or more, got {division.unit_mib}")
    if division.strategy not in strategies:
        raise RequestError(
            f"--gpu-strategy must be one of {', '.join(strategies)}, got {division.strategy!r}"
        )


def devices_of(
    gpus: Iterable[Gpu], division: Division, known: Iterable[Device] = ()
) -> tuple[Device, ...]:
    """Divide GPUs into devices, in order of their minor number.

    A known device that is not found any more stays, unhealthy: the kubelet may have given its IDs
    to pods that still run, and an ID must never come to mean another device.
    """
    found = {gpu.uuid: _device(gpu, division) for gpu in gpus}
    lost = {device.uuid: replace(device, healthy=False) for device in known}
    return tuple(sorted((lost | found).values(), key=lambda device: (device.index, device.uuid)))


def _device(gpu: Gpu, division: Division) -> Device:
    return Device(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        slots=division.split_count,
        unit_mib=division.unit_mib,
        healthy=gpu.healthy,
        numa=gpu.numa,
    )


def shown_by(dialects: Iterable[Dialect], devices: Sequence[Device], strategy: str) -> Shown:
    """Put together what all dialects show of the devices.

    Raises RequestError where a list is too long for the kubelet or an ID is.
    """
    served: dict[str, Mapping[str, ServedId]] = {}
    patched: dict[str, int] = {}
    annotations: dict[str, str | None] = {AGENT_ANNOTATION: "true"}
    lists: dict[str, tuple[str, ...]] = {}
    for dialect in dialects:
        advertised = dialect.advertised(devices, strategy)
        for resource, ids in advertised.served.items():
            check_list(resource, ids)
            served[resource] = {entry.text: entry for entry in ids}
        patched |= advertised.patched
        annotations |= advertised.annotations
        lists |= advertised.lists
    return Shown(served=served, patched=patched, annotations=annotations, lists=lists)


def check_list(resource: str, ids: Sequence[ServedId]) -> None:
    """Raise RequestError if the kubelet would not take a list, with its size."""
    size = list_bytes(ids)
    if size > MAX_LIST_BYTES:
        raise RequestError(
            f"the list of {len(ids)} devices for {resource} has {size} bytes, and the kubelet "
            f"takes {MAX_LIST_BYTES}: raise --memory-factor to "
            f"{-(-size // MAX_LIST_BYTES)} times what it is, or use --gpu-strategy auto"
        )
    long = next((entry.text for entry in ids if len(entry.text) > MAX_ID_LENGTH), None)
    if long is not None:
        raise RequestError(
            f"the device ID {long} for {resource} has {len(long)} characters, at most "
            f"{MAX_ID_LENGTH} are allowed"
        )


def list_bytes(ids: Iterable[ServedId]) -> int:
    """Return the exact size of a ListAndWatch message.

    Every device is a field of tag, length, then ID and health, each with tag and length; all of
    these lengths are below 128 and take one byte.
    """
    return sum(6 + len(entry.text) + _HEALTH_LENGTHS[entry.healthy] for entry in ids)
