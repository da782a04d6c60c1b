"""The operator's settings for sharing the node's GPUs; pure."""

from dataclasses import dataclass, replace

from services.node_agent.mig.layouts import KNOWN_GEOMETRIES
from shared.dialects.volcano.device_config import DeviceConfig, MigGeometries
from shared.model.device import DeviceMode, Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig:
    """How GPUs are shared."""

    split_count: int = 10
    """Slots per device."""
    unit_mib: int = 1
    """MiB per unit in which pods request memory."""
    strategy: str = "auto"
    """How gpushare's memory is advertised; see `Strategy`."""
    geometries: tuple[MigGeometries, ...] = KNOWN_GEOMETRIES
    """MIG layouts by model; the first entry that names a model applies."""
    may_partition: bool = True
    """Layouts may be changed; otherwise a device offers only its current instances."""
    hidden: frozenset[str] = frozenset()
    """UUIDs, and indices as text, of devices that are not served."""
    isolation: Isolation = Isolation.SHARED
    """Which shares are offered of devices that are not partitioned."""
    expected_mode: DeviceMode | None = None
    """The mode that the configuration expects of the node's devices."""


def without_isolation(sharing: SharingConfig) -> SharingConfig:
    """Return how devices are shared while HAMi-core's library does not load."""
    if sharing.isolation is Isolation.STRICT:
        return sharing
    return replace(sharing, isolation=Isolation.UNHELD)


def merge_sharing(
    config: DeviceConfig, flags: SharingConfig, *, split: int | None, unit: int | None
) -> SharingConfig:
    """Merge flags with Volcano's device configuration.

    Flags (`split` and `unit`, None if not given) take precedence over the file for all nodes, and
    the node's own entry over both. The defaults are 10 slots and 1 MiB per unit.
    """
    return replace(
        flags,
        split_count=config.node_split_count or split or config.split_count or flags.split_count,
        unit_mib=unit or config.unit_mib or flags.unit_mib,
        geometries=(*config.geometries, *KNOWN_GEOMETRIES),
        hidden=config.excluded_devices,
        expected_mode=config.mode,
    )
