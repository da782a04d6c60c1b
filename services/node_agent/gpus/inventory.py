"""What a node has and shows: devices from what NVML found, and lists from devices; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.node_agent.gpus.device_faults import NOT_LISTED, Fault
from services.node_agent.mig.instances import MigInstance, MigState
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, current_layouts, layouts_for
from shared.dialects.advertised import (
    NodeObject,
    NodeSoftware,
    PluginDeviceId,
)
from shared.dialects.dialect import Dialect
from shared.dialects.volcano.device_config import MigGeometries
from shared.model.device import Device, DeviceMode, Isolation, MigLayout
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid
from shared.model.node import AGENT_ANNOTATION

MAX_LIST_BYTES = 4_000_000
"""The kubelet receives at most 4 MiB in one message; a little room is left."""
MAX_ID_LENGTH = 63
UNKNOWN_HOST = NodeSoftware()
NO_FAULTS: Mapping[DeviceUuid, str] = {}
_HEALTH_LENGTHS = {True: len("Healthy"), False: len("Unhealthy")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One physical GPU as found."""

    uuid: DeviceUuid
    index: int
    """Minor number."""
    model: str
    memory_mib: int
    fault: Fault | None = None
    """What is wrong with it now, as far as it can be seen from outside."""
    ecc_errors: int | None = None
    """Memory errors that could not be corrected, since the driver was loaded; None: not told."""
    numa: int | None = None
    pcie: str = ""
    """Root complex; empty: unknown."""
    bus: str = ""
    """PCI address; empty: unknown."""
    links: Mapping[DeviceUuid, int] = field(default_factory=dict)
    """How well it is linked to others of the node; see `topology.score`."""
    driver: str = ""
    """Version of its driver; empty: unknown."""
    mig: MigState | None = None
    """None: the model has no MIG."""
    instances: tuple[MigInstance, ...] = ()
    """What it is partitioned into at present; MIG mode only."""

    @property
    def mode(self) -> DeviceMode:
        """How it is divided: MIG's own mode decides, which only an operator changes."""
        return DeviceMode.MIG if self.mig is not None and self.mig.enabled else DeviceMode.HAMI_CORE


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig:
    """The operator's choices of how GPUs are shared."""

    split_count: int = 10
    """Slots per device."""
    unit_mib: int = 1
    """MiB per unit in which pods ask for memory."""
    strategy: str = "auto"
    """How gpushare's memory reaches the kubelet; see `Strategy`."""
    geometries: tuple[MigGeometries, ...] = KNOWN_GEOMETRIES
    """MIG layouts by model; the first table that is about a model counts."""
    may_partition: bool = True
    """Layouts may be changed; otherwise what is on a device is all there is."""
    hidden: frozenset[str] = frozenset()
    """UUIDs, and indices as text, of devices that are not served."""
    isolation: Isolation = Isolation.SHARED
    """Which shares are offered of devices that are not partitioned."""
    expected_mode: DeviceMode | None = None
    """The mode that the configuration expects of the node's devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdvertisement:
    """What the node shows for all its dialects together."""

    served: Mapping[str, Mapping[str, PluginDeviceId]] = field(default_factory=dict)
    """By resource and ID, in the order of the list."""
    patched: Mapping[str, int] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our entries in annotations that others write too."""
    objects: tuple[NodeObject, ...] = ()

    @property
    def healthy_counts(self) -> dict[str, int]:
        """How many devices the kubelet should call allocatable, by served resource."""
        return {
            resource: sum(served.healthy for served in ids.values())
            for resource, ids in self.served.items()
        }

    def with_more(self, more: Mapping[str, int]) -> "NodeAdvertisement":
        """Return the same with more of those resources that are written into node status."""
        patched = {name: amount + more.get(name, 0) for name, amount in self.patched.items()}
        return replace(self, patched=patched)


def check_sharing_config(sharing: SharingConfig, strategies: Sequence[str]) -> None:
    """Raise RequestError naming the setting that no node can be divided by."""
    if sharing.split_count < 1:
        raise RequestError(f"--device-split-count must be 1 or more, got {sharing.split_count}")
    if sharing.unit_mib < 1:
        raise RequestError(f"--memory-factor must be 1 MiB or more, got {sharing.unit_mib}")
    if sharing.strategy not in strategies:
        raise RequestError(
            f"--gpu-strategy must be one of {', '.join(strategies)}, got {sharing.strategy!r}"
        )


def devices_of(
    gpus: Iterable[Gpu],
    sharing: SharingConfig,
    known: Iterable[Device] = (),
    faults: Mapping[DeviceUuid, str] = NO_FAULTS,
) -> tuple[Device, ...]:
    """Divide GPUs into devices, in order of their minor number; `ills` says what is wrong.

    A known device that is not found any more stays, unhealthy: the kubelet may have given its IDs
    to pods that still run, and an ID must never come to mean another device.
    """
    found = {
        gpu.uuid: _device(gpu, sharing, faults.get(gpu.uuid, ""))
        for gpu in visible_gpus(gpus, sharing)
    }
    lost = {
        device.uuid: replace(device, healthy=False, fault=faults.get(device.uuid, str(NOT_LISTED)))
        for device in known
    }
    return tuple(sorted((lost | found).values(), key=lambda device: (device.index, device.uuid)))


def visible_gpus(gpus: Iterable[Gpu], sharing: SharingConfig) -> list[Gpu]:
    """Leave out the GPUs that the configuration hides."""
    return [gpu for gpu in gpus if not sharing.hidden & {gpu.uuid, str(gpu.index)}]


def driver_version(gpus: Iterable[Gpu]) -> str:
    """Return the version of the GPUs' driver; empty: unknown."""
    return next((gpu.driver for gpu in gpus if gpu.driver), "")


def count_models(devices: Iterable[Device]) -> str:
    """Count devices by model, for people."""
    counts = Counter(device.model for device in devices)
    return ", ".join(f"{count}x {model}" for model, count in counts.items())


def mode_warnings(gpus: Iterable[Gpu], sharing: SharingConfig) -> tuple[str, ...]:
    """Say what an operator should know of the GPUs' modes and layouts, a sentence each."""
    notes: list[str] = []
    for gpu in visible_gpus(gpus, sharing):
        where = f"GPU {gpu.index} ({gpu.model})"
        if sharing.expected_mode not in {None, gpu.mode}:
            remedy = (
                f"`nvidia-smi -i {gpu.index} -mig 1` turns it on once nothing uses the GPU"
                if gpu.mig is not None and gpu.mode is DeviceMode.HAMI_CORE
                else "the mode of the hardware counts"
            )
            notes.append(
                f"{where} is in {gpu.mode} mode, and operatingmode is {sharing.expected_mode}: "
                f"{remedy}"
            )
        if gpu.mig is not None and gpu.mig.enabled != gpu.mig.pending:
            to = "on" if gpu.mig.pending else "off"
            notes.append(f"{where}: MIG goes {to} with the next reset of the GPU")
        if gpu.mig is not None and gpu.mode is DeviceMode.MIG:
            _, said = layouts_for(gpu.model, gpu.mig.profiles, sharing.geometries)
            notes += said
    return tuple(dict.fromkeys(notes))


def _device(gpu: Gpu, sharing: SharingConfig, fault: str) -> Device:
    layouts = _layouts(gpu, sharing)
    return Device(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        slots=max([sharing.split_count, *(len(layout.positions) for layout in layouts)]),
        unit_mib=sharing.unit_mib,
        mode=gpu.mode,
        healthy=not fault,
        fault=fault,
        numa=gpu.numa,
        pcie=gpu.pcie,
        bus=gpu.bus,
        links=gpu.links,
        layouts=layouts,
        isolation=sharing.isolation,
    )


def parse_isolation(word: str) -> Isolation:
    """Read an operator's choice. Raises RequestError for a word that is none."""
    if word not in {Isolation.SHARED.value, Isolation.STRICT.value}:
        raise RequestError(
            f"--isolation must be {Isolation.SHARED} or {Isolation.STRICT}, got {word!r}"
        )
    return Isolation(word)


def without_isolation(sharing: SharingConfig) -> SharingConfig:
    """Return how devices are shared while HAMi-core's library does not load."""
    if sharing.isolation is Isolation.STRICT:
        return sharing
    return replace(sharing, isolation=Isolation.UNHELD)


def _layouts(gpu: Gpu, sharing: SharingConfig) -> tuple[MigLayout, ...]:
    if gpu.mig is None or gpu.mode is not DeviceMode.MIG:
        return ()
    layouts, _ = layouts_for(gpu.model, gpu.mig.profiles, sharing.geometries)
    return (
        layouts
        if sharing.may_partition
        else current_layouts(gpu.instances, layouts, gpu.mig.profiles)
    )


def advertisement_of(
    dialects: Iterable[Dialect],
    devices: Sequence[Device],
    strategy: str,
    host: NodeSoftware = UNKNOWN_HOST,
) -> NodeAdvertisement:
    """Put together what all dialects show of the devices and their host.

    Raises RequestError where a list is too long for the kubelet or an ID is.
    """
    served: dict[str, Mapping[str, PluginDeviceId]] = {}
    patched: dict[str, int] = {}
    annotations: dict[str, str | None] = {AGENT_ANNOTATION: "true"}
    labels: dict[str, str | None] = {}
    lists: dict[str, tuple[str, ...]] = {}
    objects: list[NodeObject] = []
    for dialect in dialects:
        described = dialect.describe_node(devices, host)
        for advertised in (dialect.advertise(devices, strategy), described):
            for resource, ids in advertised.served.items():
                check_list(resource, ids)
                served[resource] = {entry.id: entry for entry in ids}
            patched |= advertised.node_status
            annotations |= advertised.annotations
            labels |= advertised.labels
            lists |= advertised.annotation_entries
            objects += advertised.objects
    return NodeAdvertisement(
        served=served,
        patched=patched,
        annotations=annotations,
        labels=labels,
        lists=lists,
        objects=tuple(objects),
    )


def check_list(resource: str, ids: Sequence[PluginDeviceId]) -> None:
    """Raise RequestError if the kubelet would not take a list, with its size."""
    size = list_size_bytes(ids)
    if size > MAX_LIST_BYTES:
        raise RequestError(
            f"the list of {len(ids)} devices for {resource} has {size} bytes, and the kubelet "
            f"takes {MAX_LIST_BYTES}: raise --memory-factor to "
            f"{-(-size // MAX_LIST_BYTES)} times what it is, or use --gpu-strategy auto"
        )
    long = next((entry.id for entry in ids if len(entry.id) > MAX_ID_LENGTH), None)
    if long is not None:
        raise RequestError(
            f"the device ID {long} for {resource} has {len(long)} characters, at most "
            f"{MAX_ID_LENGTH} are allowed"
        )


def list_size_bytes(ids: Iterable[PluginDeviceId]) -> int:
    """Return the exact size of a ListAndWatch message.

    Every device is a field of tag, length, then ID and health, each with tag and length; all of
    these lengths are below 128 and take one byte.
    """
    return sum(6 + len(entry.id) + _HEALTH_LENGTHS[entry.healthy] for entry in ids)
