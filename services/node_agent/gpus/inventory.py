"""The GPUs of the node, and the devices that are offered of them; pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.node_agent.gpus.device_faults import EXCLUDED, NOT_LISTED, Fault, replaced_by
from services.node_agent.mig.instances import MigInstance, MigState
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, current_layouts, layouts_for
from shared.dialects.volcano.device_config import DeviceConfig, MigGeometries
from shared.model.bounds import MOST_MIB, check_bounds
from shared.model.devices.device import (
    Device,
    DeviceMode,
    Hardware,
    Isolation,
    MigLayout,
    UnreadDevice,
)
from shared.model.devices.replicas import Replicas
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid

_UUID = re.compile(r"[\w.-]{1,56}", re.ASCII)
"""IDs for the kubelet, which end in a slot, have at most 63 characters."""
PER_NVLINK = 100
NO_FAULTS: Mapping[DeviceUuid, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig:
    split_count: int = 10
    unit_mib: int = 1
    strategy: str = "auto"
    geometries: tuple[MigGeometries, ...] = KNOWN_GEOMETRIES
    """The first entry that names a model applies."""
    may_partition: bool = True
    """Otherwise a device offers only its current instances."""
    hidden: frozenset[str] = frozenset()
    """UUIDs, and indices as text."""
    isolation: Isolation = Isolation.SHARED
    unified_mib: int | None = None
    """Memory to share of a GPU whose driver does not report it, as it is the host's."""
    expected_mode: DeviceMode | None = None
    replicas: Replicas | None = None

    def merged(
        self, config: DeviceConfig, *, split: int | None, unit: int | None
    ) -> "SharingConfig":
        """The node's own entry comes before the flags `split` and `unit`."""
        return replace(
            self,
            split_count=config.node_split_count or split or config.split_count or self.split_count,
            unit_mib=unit or config.unit_mib or self.unit_mib,
            geometries=(*config.geometries, *KNOWN_GEOMETRIES),
            hidden=config.excluded_devices,
            expected_mode=config.mode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    uuid: DeviceUuid
    index: int
    model: str
    memory_mib: int
    reserved_mib: int = 0
    measured: bool = True
    """False if its memory is the host's, which the driver does not report."""
    fault: Fault | None = None
    ecc_errors: int | None = None
    numa: int | None = None
    pcie: str = ""
    bus: str = ""
    power_limit_w: int = 0
    """0 if it is unknown."""
    links: Mapping[DeviceUuid, int] = field(default_factory=dict)
    driver: str = ""
    exclusive_process: bool = False
    mig: MigState | None = None
    """None if the model does not support MIG."""
    instances: tuple[MigInstance, ...] = ()

    @property
    def usable_mib(self) -> int:
        """Of a GPU in MIG mode, memory of its instances."""
        return self.memory_mib - (0 if self.mode is DeviceMode.MIG else self.reserved_mib)

    @property
    def mode(self) -> DeviceMode:
        return DeviceMode.MIG if self.mig is not None and self.mig.enabled else DeviceMode.HAMI_CORE


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    pid: int
    memory_bytes: int | None = None
    busy_percent: int | None = 0
    instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    device: DeviceUuid
    index: int
    model: str
    used_bytes: int = 0
    memory_bytes: int | None = None
    """None if it is the machine's."""
    busy_percent: int | None = None
    memory_busy_percent: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    hardware: Hardware | None = None
    sampled_at_s: float | None = None
    """Seconds since the machine booted."""


def problem_of(gpu: Gpu) -> str:
    if not _UUID.fullmatch(gpu.uuid):
        return (
            f"the driver reports the UUID {gpu.uuid[:64]!r}, which is none: check `nvidia-smi -L`"
        )
    if not 0 < gpu.memory_mib <= MOST_MIB:
        return (
            f"the driver reports {gpu.memory_mib} MiB of memory, which must be 1 to {MOST_MIB}: "
            "check `nvidia-smi`"
        )
    try:
        check_bounds(_device(gpu, SharingConfig(), "", 0), f"GPU {gpu.uuid}")
    except RequestError as error:
        return str(error)
    return ""


def devices_of(
    gpus: Iterable[Gpu],
    sharing: SharingConfig,
    recorded: Iterable[Device] = (),
    faults: Mapping[DeviceUuid, str] = NO_FAULTS,
    held: Mapping[DeviceUuid, int] | None = None,
) -> tuple[Device, ...]:
    """Return the devices that are offered of GPUs, by minor number.

    A recorded device that is no longer found stays, unhealthy: running pods may have its IDs, and
    an ID must never denote another device. One that was excluded or replaced stays while it is
    `held` (None if unknown).
    """
    visible = visible_gpus(gpus, sharing)
    offered = {
        gpu.uuid: _device(gpu, sharing, faults.get(gpu.uuid, ""), (held or {}).get(gpu.uuid, 0))
        for gpu in visible
    }
    places = {gpu.bus: gpu.uuid for gpu in visible if gpu.bus}
    lost: dict[DeviceUuid, Device] = {}
    for device in recorded:
        removed = _removed(device, sharing, places)
        if removed is None or held is None or device.uuid in held:
            fault = str(removed) if removed else faults.get(device.uuid, str(NOT_LISTED))
            lost[device.uuid] = as_offered(replace(device, healthy=False, fault=fault), sharing)
    return tuple(sorted((lost | offered).values(), key=lambda device: (device.index, device.uuid)))


def _removed(
    device: Device, sharing: SharingConfig, places: Mapping[str, DeviceUuid]
) -> Fault | None:
    if _is_hidden(device, sharing):
        return EXCLUDED
    other = places.get(device.bus)
    return None if other is None else replaced_by(other)


def visible_gpus(gpus: Iterable[Gpu], sharing: SharingConfig) -> list[Gpu]:
    return [gpu for gpu in gpus if not _is_hidden(gpu, sharing)]


def unread_devices(
    unread: Iterable[UnreadDevice], devices: Iterable[Device], sharing: SharingConfig
) -> tuple[UnreadDevice, ...]:
    uuids = {device.uuid for device in devices}
    return tuple(gpu for gpu in unread if gpu.uuid not in uuids and not _is_hidden(gpu, sharing))


def _is_hidden(gpu: Gpu | Device | UnreadDevice, sharing: SharingConfig) -> bool:
    return bool(sharing.hidden & {gpu.uuid, str(gpu.index)})


def driver_version(gpus: Iterable[Gpu]) -> str:
    return next((gpu.driver for gpu in gpus if gpu.driver), "")


def count_models(devices: Iterable[Device]) -> str:
    counts = Counter(device.model for device in devices)
    return ", ".join(f"{count}x {model}" for model, count in counts.items())


def mode_warnings(gpus: Iterable[Gpu], sharing: SharingConfig) -> tuple[str, ...]:
    warnings: list[str] = []
    for gpu in visible_gpus(gpus, sharing):
        where = f"GPU {gpu.index} ({gpu.model})"
        if sharing.expected_mode not in {None, gpu.mode}:
            remedy = (
                f"`nvidia-smi -i {gpu.index} -mig 1` enables MIG once nothing uses the GPU"
                if gpu.mig is not None and gpu.mode is DeviceMode.HAMI_CORE
                else "the mode of the hardware applies"
            )
            warnings.append(
                f"{where} is in {gpu.mode} mode, and operatingmode is {sharing.expected_mode}: "
                f"{remedy}"
            )
        if not gpu.measured:
            warnings.append(
                f"{where}: the driver does not report its memory, as it is the host's "
                f"({gpu.memory_mib} MiB): "
                + (
                    f"shares of {sharing.unified_mib} MiB are given, as --unified-memory-mib says"
                    if sharing.unified_mib
                    else "pods get it whole, or without a limit; to give shares of it, set "
                    "--unified-memory-mib to what the host can spare"
                )
            )
        if gpu.mig is not None and gpu.mig.enabled != gpu.mig.pending:
            to = "on" if gpu.mig.pending else "off"
            warnings.append(f"{where}: MIG is turned {to} by the next reset of the GPU")
        if gpu.mig is not None and gpu.mode is DeviceMode.MIG:
            _, layout_warnings = layouts_for(gpu.model, gpu.mig.profiles, sharing.geometries)
            warnings += layout_warnings
    return tuple(dict.fromkeys(warnings))


def _device(gpu: Gpu, sharing: SharingConfig, fault: str, slots: int) -> Device:
    layouts = _layouts(gpu, sharing)
    device = Device(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.usable_mib if gpu.measured else sharing.unified_mib or gpu.memory_mib,
        slots=max([slots, sharing.split_count, *(len(layout.positions) for layout in layouts)]),
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
        power_limit_w=gpu.power_limit_w,
    )
    return as_offered(device, sharing)


def as_offered(device: Device, sharing: SharingConfig) -> Device:
    if device.mode is DeviceMode.MIG or device.replicas == sharing.replicas:
        return device
    replicas = sharing.replicas
    return replace(
        device,
        mode=DeviceMode.HAMI_CORE if replicas is None else DeviceMode.REPLICAS,
        replicas=replicas,
        slots=sharing.split_count if replicas is None else replicas.number,
    )


def _layouts(gpu: Gpu, sharing: SharingConfig) -> tuple[MigLayout, ...]:
    if gpu.mig is None or gpu.mode is not DeviceMode.MIG:
        return ()
    layouts, _ = layouts_for(gpu.model, gpu.mig.profiles, sharing.geometries)
    if sharing.may_partition:
        return layouts
    return current_layouts(gpu.instances, layouts, gpu.mig.profiles)
