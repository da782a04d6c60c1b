"""Volcano's two ConfigMaps for its vGPU device plugin, as far as they concern a node; pure.

`volcano-vgpu-device-config` has settings for all nodes and the MIG layouts;
`volcano-vgpu-node-config` has settings of single nodes. Invalid entries are ignored with a warning.
No content makes the agent stop.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.dialects.volcano import vgpu
from shared.dialects.volcano.device_register import NUMBER
from shared.model.device import DeviceMode, MigLayout, MigProfile

NAMESPACES = ("kube-system", "volcano-system")
"""Where the ConfigMaps may be; the first namespace that has one counts."""
DEVICE_MAP, DEVICE_KEY = "volcano-vgpu-device-config", "device-config.yaml"
NODE_MAP, NODE_KEY = "volcano-vgpu-node-config", "config.json"
SECTION = "nvidia"
MAX_SPLIT_COUNT = 4096
"""Slots per device: the kubelet gets an ID for each."""
MAX_UNIT_MIB = 1 << 20
"""1 TiB, more than a device has."""
SPLIT_COUNT, FACTOR, GEOMETRIES = "deviceSplitCount", "gpuMemoryFactor", "knownMigGeometries"
NAMES: Mapping[str, str] = {
    "resourceCountName": NUMBER,
    "resourceMemoryName": vgpu.MEMORY,
    "resourceMemoryPercentageName": vgpu.PERCENTAGE,
    "resourceCoreName": vgpu.CORES,
}
"""Resource names in the configuration that must be these."""
WITHOUT_EFFECT: Mapping[str, object] = {
    "deviceCoreScaling": 1,
    "deviceMemoryScaling": 1,
    "disableCoreLimit": False,
    "defaultMemory": 0,
    "defaultCores": 0,
    "defaultGPUNum": 1,
    "overwriteEnv": False,
    "resourcePriorityName": "",
    "passDeviceSpecs": False,
}
"""Keys without effect here. There is a warning for any other than these default values."""
NODE_KEYS = ("name", "operatingmode", "devicesplitcount", "filterdevices")
NODE_WITHOUT_EFFECT: Mapping[str, object] = {
    "devicecorescaling": 1,
    "devicememoryscaling": 1,
    "migstrategy": "none",
}
FORBIDDEN = "-[],:;"
"""Characters that separate fields in annotations with a group's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGeometries:
    """The layouts of a family of devices, in order of preference."""

    models: tuple[str, ...]
    """Parts of product names; `NVIDIA-` before the name counts, too."""
    layouts: tuple[MigLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The settings of both ConfigMaps for one node; None and empty: not set."""

    split_count: int | None = None
    unit_mib: int | None = None
    geometries: tuple[MigGeometries, ...] = ()
    node_split_count: int | None = None
    """For this node only; overrides everything, including flags."""
    mode: DeviceMode | None = None
    excluded_devices: frozenset[str] = frozenset()
    """UUIDs, and indices as text, of devices that are not served."""
    warnings: tuple[str, ...] = ()
    """Invalid entries, a sentence each."""


def parse_device_config(device: object, node: object, name: str) -> DeviceConfig:
    """Parse both documents (None: there is none) for the node of this name."""
    warnings: list[str] = []
    config = _parse_device_map(device, warnings)
    config = _parse_node_map(config, node, name, warnings)
    return replace(config, warnings=tuple(warnings))


def _parse_device_map(document: object, warnings: list[str]) -> DeviceConfig:
    if document is None:
        return DeviceConfig()
    whole = _mapping(document, "the device configuration", warnings)
    section = _mapping(whole.get(SECTION, {}), f"section {SECTION}", warnings)
    _warn_of_unknown_keys(whole, (SECTION,), "the device configuration", warnings)
    keys = (SPLIT_COUNT, FACTOR, GEOMETRIES, *NAMES, *WITHOUT_EFFECT)
    _warn_of_unknown_keys(section, keys, f"section {SECTION}", warnings)
    for key, ours in NAMES.items():
        if section.get(key, ours) != ours:
            warnings.append(f"{key} is {section[key]!r}: Leasehold serves it as {ours}")
    _warn_of_keys_without_effect(section, WITHOUT_EFFECT, warnings)
    return DeviceConfig(
        split_count=_positive(section, SPLIT_COUNT, warnings),
        unit_mib=_positive(section, FACTOR, warnings),
        geometries=tuple(_geometries(section.get(GEOMETRIES) or (), warnings)),
    )


def _geometries(listed: object, warnings: list[str]) -> Iterable[MigGeometries]:
    for number, entry in enumerate(_sequence(listed, GEOMETRIES, warnings)):
        where = f"{GEOMETRIES}[{number}]"
        table = _mapping(entry, where, warnings)
        _warn_of_unknown_keys(table, ("models", "allowedGeometries"), where, warnings)
        models = tuple(
            str(model)
            for model in _sequence(table.get("models"), f"{where}.models", warnings)
            if model
        )
        listed_layouts = _sequence(
            table.get("allowedGeometries"), f"{where}.allowedGeometries", warnings
        )
        layouts: dict[str, MigLayout] = {}
        for order, layout in enumerate(listed_layouts):
            read = _layout(layout, f"{where}.allowedGeometries[{order}]", warnings)
            if read is not None and read.name in layouts:
                warnings.append(f"{where} has group {read.name!r} twice: the first one counts")
            elif read is not None:
                layouts[read.name] = read
        if models and layouts:
            yield MigGeometries(models=models, layouts=tuple(layouts.values()))


def _layout(entry: object, where: str, warnings: list[str]) -> MigLayout | None:
    layout = _mapping(entry, where, warnings)
    _warn_of_unknown_keys(layout, ("group", "geometries"), where, warnings)
    name = layout.get("group")
    if not isinstance(name, str) or not name or set(name) & set(FORBIDDEN):
        warnings.append(
            f"{where}.group is {name!r}: a group needs a name, without any of "
            f"{' '.join(FORBIDDEN)}; it is ignored"
        )
        return None
    profiles: dict[str, MigProfile] = {}
    listed = _sequence(layout.get("geometries"), f"{where}.geometries", warnings)
    for number, one in enumerate(listed):
        profile = _profile(one, f"{where}.geometries[{number}]", warnings)
        if profile is None:
            warnings.append(f"group {name} is ignored, because one of its instances is invalid")
            return None
        if profile.name in profiles:
            warnings.append(
                f"{where} has {profile.name} twice: list it once, with the sum as count"
            )
            return None
        profiles[profile.name] = profile
    return MigLayout(name=name, profiles=tuple(profiles.values())) if profiles else None


def _profile(entry: object, where: str, warnings: list[str]) -> MigProfile | None:
    profile = _mapping(entry, where, warnings)
    _warn_of_unknown_keys(profile, ("name", "memory", "count"), where, warnings)
    name = profile.get("name")
    memory, count = _positive(profile, "memory", warnings), _positive(profile, "count", warnings)
    if not isinstance(name, str) or not name or memory is None or count is None:
        warnings.append(f"{where} needs a name, a memory in MiB and a count of 1 or more")
        return None
    return MigProfile(name=name, memory_mib=memory, count=count)


def _parse_node_map(
    config: DeviceConfig, document: object, name: str, warnings: list[str]
) -> DeviceConfig:
    if document is None:
        return config
    whole = _mapping(document, "the node configuration", warnings)
    _warn_of_unknown_keys(whole, ("nodeconfig",), "the node configuration", warnings)
    for number, entry in enumerate(_sequence(whole.get("nodeconfig"), "nodeconfig", warnings)):
        where = f"nodeconfig[{number}]"
        own = _mapping(entry, where, warnings)
        if own.get("name") != name:
            continue
        _warn_of_unknown_keys(own, (*NODE_KEYS, *NODE_WITHOUT_EFFECT), where, warnings)
        _warn_of_keys_without_effect(own, NODE_WITHOUT_EFFECT, warnings)
        config = replace(
            config,
            node_split_count=_positive(own, "devicesplitcount", warnings, zero=True),
            mode=_mode(own.get("operatingmode"), warnings),
            excluded_devices=_excluded_devices(
                own.get("filterdevices") or {}, f"{where}.filterdevices", warnings
            ),
        )
    return config


def _mode(value: object, warnings: list[str]) -> DeviceMode | None:
    if value in (None, ""):
        return None
    if value not in tuple(DeviceMode):
        warnings.append(f"operatingmode is {value!r}: it must be {' or '.join(DeviceMode)}")
        return None
    return DeviceMode(str(value))


def _excluded_devices(value: object, where: str, warnings: list[str]) -> frozenset[str]:
    lists = _mapping(value, where, warnings)
    _warn_of_unknown_keys(lists, ("uuid", "index"), where, warnings)
    return frozenset(
        str(one)
        for key in ("uuid", "index")
        for one in _sequence(lists.get(key) or (), f"{where}.{key}", warnings)
    )


def _mapping(value: object, where: str, warnings: list[str]) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    warnings.append(f"{where} is not a mapping, but {value!r}")
    return {}


def _sequence(value: object, where: str, warnings: list[str]) -> Sequence[object]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    warnings.append(f"{where} is not a list, but {value!r}")
    return ()


def _positive(
    section: Mapping[str, object], key: str, warnings: list[str], *, zero: bool = False
) -> int | None:
    """Return a whole number above 0; with `zero`, 0 means not set, without a warning."""
    value = section.get(key)
    if value is None or (zero and value == 0):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        warnings.append(f"{key} is {value!r}: it must be a whole number of 1 or more")
        return None
    return value


def _warn_of_unknown_keys(
    section: Mapping[str, object], known: Sequence[str], where: str, warnings: list[str]
) -> None:
    for key in section:
        if key not in known:
            lowered = {name.lower(): name for name in known}
            near = difflib.get_close_matches(str(key).lower(), lowered, n=1, cutoff=0.6)
            hint = f"; did you mean {lowered[near[0]]}?" if near else ""
            warnings.append(f"{where} has a key {key!r} that nothing reads{hint}")


def _warn_of_keys_without_effect(
    section: Mapping[str, object], without_effect: Mapping[str, object], warnings: list[str]
) -> None:
    for key, usual in without_effect.items():
        if section.get(key) not in (None, usual, ""):
            warnings.append(f"{key} is {section[key]!r}, which has no effect in Leasehold")
