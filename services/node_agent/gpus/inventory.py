"""The GPUs that were found on the node, and the devices that are offered of them; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.node_agent.gpus.device_faults import NOT_LISTED, Fault
from services.node_agent.gpus.sharing_config import SharingConfig
from services.node_agent.mig.instances import MigInstance, MigState
from services.node_agent.mig.layouts import current_layouts, layouts_for
from shared.model.device import Device, DeviceMode, MigLayout
from shared.model.names import DeviceUuid

NO_FAULTS: Mapping[DeviceUuid, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One physical GPU as the driver reports it."""

    uuid: DeviceUuid
    index: int
    """Minor number."""
    model: str
    memory_mib: int
    fault: Fault | None = None
    """Its current fault, as far as the driver shows it."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded; None: not reported."""
    numa: int | None = None
    pcie: str = ""
    """Root complex; empty: unknown."""
    bus: str = ""
    """PCI address; empty: unknown."""
    links: Mapping[DeviceUuid, int] = field(default_factory=dict)
    """Link scores to the node's other GPUs; see `links.link_score`."""
    driver: str = ""
    """Version of its driver; empty: unknown."""
    mig: MigState | None = None
    """None: the model does not support MIG."""
    instances: tuple[MigInstance, ...] = ()
    """Its current instances; MIG mode only."""

    @property
    def mode(self) -> DeviceMode:
        """Its sharing mode: the MIG mode decides, which only an operator changes."""
        return DeviceMode.MIG if self.mig is not None and self.mig.enabled else DeviceMode.HAMI_CORE


def devices_of(
    gpus: Iterable[Gpu],
    sharing: SharingConfig,
    known: Iterable[Device] = (),
    faults: Mapping[DeviceUuid, str] = NO_FAULTS,
) -> tuple[Device, ...]:
    """Return the devices that are offered of GPUs, in the order of their minor numbers.

    `faults` are the messages of devices that are not healthy. A known device that is no longer
    found stays, unhealthy: the kubelet may have given its IDs to pods that still run, and an ID
    must never denote another device.
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
    """Return the GPUs that the configuration does not hide."""
    return [gpu for gpu in gpus if not sharing.hidden & {gpu.uuid, str(gpu.index)}]


def driver_version(gpus: Iterable[Gpu]) -> str:
    """Return the version of the GPUs' driver; empty: unknown."""
    return next((gpu.driver for gpu in gpus if gpu.driver), "")


def count_models(devices: Iterable[Device]) -> str:
    """Describe devices by model, such as `8x Tesla T4`."""
    counts = Counter(device.model for device in devices)
    return ", ".join(f"{count}x {model}" for model, count in counts.items())


def mode_warnings(gpus: Iterable[Gpu], sharing: SharingConfig) -> tuple[str, ...]:
    """Return warnings about the GPUs' modes and layouts."""
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
        if gpu.mig is not None and gpu.mig.enabled != gpu.mig.pending:
            to = "on" if gpu.mig.pending else "off"
            warnings.append(f"{where}: MIG is turned {to} by the next reset of the GPU")
        if gpu.mig is not None and gpu.mode is DeviceMode.MIG:
            _, layout_warnings = layouts_for(gpu.model, gpu.mig.profiles, sharing.geometries)
            warnings += layout_warnings
    return tuple(dict.fromkeys(warnings))


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


def _layouts(gpu: Gpu, sharing: SharingConfig) -> tuple[MigLayout, ...]:
    if gpu.mig is None or gpu.mode is not DeviceMode.MIG:
        return ()
    layouts, _ = layouts_for(gpu.model, gpu.mig.profiles, sharing.geometries)
    if sharing.may_partition:
        return layouts
    return current_layouts(gpu.instances, layouts, gpu.mig.profiles)
