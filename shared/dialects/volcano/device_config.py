"""Volcano's two ConfigMaps for its vGPU device plugin, as far as they concern a node; pure.

`volcano-vgpu-device-config` has settings for all nodes and the MIG layouts;
`volcano-vgpu-node-config` has settings of single nodes; several entries for a node are merged, the
later one first, as Volcano's and HAMi's plugins do. Invalid entries are left out, with an error.
"""

import difflib
import fnmatch
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.dialects.volcano import vgpu
from shared.dialects.volcano.device_register import NUMBER
from shared.model.bounds import SHORT
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
MOST: Mapping[str, int] = {
    "devicesplitcount": MAX_SPLIT_COUNT,
    "gpumemoryfactor": MAX_UNIT_MIB,
    "memory": 2**24,
    "count": 16,
}
"""The largest number of each field, by its name in lower case; what a device's report may have."""
MOST_LISTED = 256
"""Entries of a list that are read."""
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
    """Entries without effect, a sentence each."""
    errors: tuple[str, ...] = ()
    """Invalid entries, likewise."""


class _Findings(list[str]):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []


def parse_device_config(device: object, node: object, name: str) -> DeviceConfig:
    """Parse both documents (None: there is none) for the node of this name."""
    found = _Findings()
    config = _parse_device_map(device, found)
    config = _parse_node_map(config, node, name, found)
    return replace(config, warnings=tuple(found.warnings), errors=tuple(found))


def _parse_device_map(document: object, errors: _Findings) -> DeviceConfig:
    if document is None:
        return DeviceConfig()
    whole = _mapping(document, "the device configuration", errors)
    section = _mapping(whole.get(SECTION, {}), f"section {SECTION}", errors)
    _warn_of_unknown_keys(whole, (SECTION,), "the device configuration", errors)
    keys = (SPLIT_COUNT, FACTOR, GEOMETRIES, *NAMES, *WITHOUT_EFFECT)
    _warn_of_unknown_keys(section, keys, f"section {SECTION}", errors)
    for key, ours in NAMES.items():
        if section.get(key, ours) != ours:
            errors.warnings.append(
                f"{key} is {_brief(section[key])}: Leasehold serves it as {ours}"
            )
    _warn_of_keys_without_effect(section, WITHOUT_EFFECT, errors)
    return DeviceConfig(
        split_count=_positive(section, SPLIT_COUNT, errors),
        unit_mib=_positive(section, FACTOR, errors),
        geometries=tuple(_geometries(section.get(GEOMETRIES) or (), errors)),
    )


def _geometries(listed: object, errors: _Findings) -> Iterable[MigGeometries]:
    for number, entry in enumerate(_sequence(listed, GEOMETRIES, errors)):
        where = f"{GEOMETRIES}[{number}]"
        table = _mapping(entry, where, errors)
        _warn_of_unknown_keys(table, ("models", "allowedGeometries"), where, errors)
        models = tuple(
            str(model)
            for model in _sequence(table.get("models"), f"{where}.models", errors)
            if model
        )
        listed_layouts = _sequence(
            table.get("allowedGeometries"), f"{where}.allowedGeometries", errors
        )
        layouts: dict[str, MigLayout] = {}
        for order, layout in enumerate(listed_layouts):
            read = _layout(layout, f"{where}.allowedGeometries[{order}]", errors)
            if read is not None and read.name in layouts:
                errors.append(f"{where} has group {read.name!r} twice: the first one counts")
            elif read is not None:
                layouts[read.name] = read
        if models and layouts:
            yield MigGeometries(models=models, layouts=tuple(layouts.values()))


def _layout(entry: object, where: str, errors: _Findings) -> MigLayout | None:
    layout = _mapping(entry, where, errors)
    _warn_of_unknown_keys(layout, ("group", "geometries"), where, errors)
    name = layout.get("group")
    if not isinstance(name, str) or not 1 <= len(name) <= SHORT or set(name) & set(FORBIDDEN):
        errors.append(
            f"{where}.group is {_brief(name)}: a group needs a name of up to {SHORT} characters, "
            f"without any of {' '.join(FORBIDDEN)}; it is ignored"
        )
        return None
    profiles: dict[str, MigProfile] = {}
    listed = _sequence(layout.get("geometries"), f"{where}.geometries", errors)
    for number, one in enumerate(listed):
        profile = _profile(one, f"{where}.geometries[{number}]", errors)
        if profile is None:
            errors.append(f"group {name} is ignored, because one of its instances is invalid")
            return None
        if profile.name in profiles:
            errors.append(f"{where} has {profile.name} twice: list it once, with the sum as count")
            return None
        profiles[profile.name] = profile
    return MigLayout(name=name, profiles=tuple(profiles.values())) if profiles else None


def _profile(entry: object, where: str, errors: _Findings) -> MigProfile | None:
    profile = _mapping(entry, where, errors)
    _warn_of_unknown_keys(profile, ("name", "memory", "count"), where, errors)
    name = profile.get("name")
    memory, count = _positive(profile, "memory", errors), _positive(profile, "count", errors)
    named = isinstance(name, str) and 1 <= len(name) <= SHORT
    if not isinstance(name, str) or not named or memory is None or count is None:
        errors.append(
            f"{where} needs a name of up to {SHORT} characters, a memory in MiB and a count of 1 "
            "or more"
        )
        return None
    return MigProfile(name=name, memory_mib=memory, count=count)


def _parse_node_map(
    config: DeviceConfig, document: object, name: str, errors: _Findings
) -> DeviceConfig:
    if document is None:
        return config
    whole = _mapping(document, "the node configuration", errors)
    _warn_of_unknown_keys(whole, ("nodeconfig",), "the node configuration", errors)
    listed = whole.get("nodeconfig")
    entries = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
    if not isinstance(listed, Sequence | None) or isinstance(listed, str):
        errors.append(f"nodeconfig is not a list, but {_brief(listed)}")
    for number, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            config = _merge_entry(config, entry, f"nodeconfig[{number}]", name, errors)
        else:
            errors.append(f"nodeconfig[{number}] is not a mapping, but {_brief(entry)}")
    return config


def _merge_entry(
    config: DeviceConfig, own: Mapping[str, object], where: str, name: str, errors: _Findings
) -> DeviceConfig:
    """Merge what an entry sets for the node; what it does not set stays."""
    if own.get("name") != name:
        if not isinstance(own.get("name"), str):
            errors.append(f"{where} has no name of a node")
        elif fnmatch.fnmatchcase(name, str(own["name"])):
            errors.warnings.append(
                f"{where} is not applied: its name {_brief(own['name'])} is compared as it is, and "
                "is no pattern"
            )
        return config
    _warn_of_unknown_keys(own, (*NODE_KEYS, *NODE_WITHOUT_EFFECT), where, errors)
    _warn_of_keys_without_effect(own, NODE_WITHOUT_EFFECT, errors)
    count = _positive(own, "devicesplitcount", errors, zero=True)
    mode = _mode(own.get("operatingmode"), errors)
    excluded = _excluded_devices(own.get("filterdevices") or {}, f"{where}.filterdevices", errors)
    for field, earlier, later in (
        ("devicesplitcount", config.node_split_count, count),
        ("operatingmode", config.mode, mode),
        ("filterdevices", config.excluded_devices, excluded),
    ):
        if earlier and later and earlier != later:
            errors.warnings.append(f"{where}.{field} replaces that of an earlier entry for {name}")
    return replace(
        config,
        node_split_count=count or config.node_split_count,
        mode=mode or config.mode,
        excluded_devices=excluded or config.excluded_devices,
    )


def _mode(value: object, errors: _Findings) -> DeviceMode | None:
    if value in (None, ""):
        return None
    if value not in tuple(DeviceMode):
        errors.append(f"operatingmode is {_brief(value)}: it must be {' or '.join(DeviceMode)}")
        return None
    return DeviceMode(str(value))


def _excluded_devices(value: object, where: str, errors: _Findings) -> frozenset[str]:
    lists = _mapping(value, where, errors)
    _warn_of_unknown_keys(lists, ("uuid", "index"), where, errors)
    return frozenset(
        str(one)
        for key in ("uuid", "index")
        for one in _sequence(lists.get(key) or (), f"{where}.{key}", errors)
    )


def _mapping(value: object, where: str, errors: _Findings) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    errors.append(f"{where} is not a mapping, but {_brief(value)}")
    return {}


def _sequence(value: object, where: str, errors: _Findings) -> Sequence[object]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) > MOST_LISTED:
            errors.append(f"{where} has {len(value)} entries; at most {MOST_LISTED} are read")
        return value[:MOST_LISTED]
    errors.append(f"{where} is not a list, but {_brief(value)}")
    return ()


def _positive(
    section: Mapping[str, object], key: str, errors: _Findings, *, zero: bool = False
) -> int | None:
    """Return a whole number above 0; with `zero`, 0 means not set, without a warning."""
    value = section.get(key)
    if value is None or (zero and value == 0):
        return None
    most = MOST[key.lower()]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        errors.append(f"{key} is {_brief(value)}: it must be a whole number from 1 to {most}")
        return None
    return value


def _brief(value: object) -> str:
    """Return a value for a message: without its end and its depths, which aliases may multiply."""
    return reprlib.repr(value)


def _warn_of_unknown_keys(
    section: Mapping[str, object], known: Sequence[str], where: str, errors: _Findings
) -> None:
    for key in section:
        if key not in known:
            lowered = {name.lower(): name for name in known}
            near = difflib.get_close_matches(str(key).lower(), lowered, n=1, cutoff=0.6)
            hint = f"; did you mean {lowered[near[0]]}?" if near else ""
            errors.warnings.append(f"{where} has a key {_brief(key)} that nothing reads{hint}")


def _warn_of_keys_without_effect(
    section: Mapping[str, object], without_effect: Mapping[str, object], errors: _Findings
) -> None:
    for key, usual in without_effect.items():
        if section.get(key) not in (None, usual, ""):
            errors.warnings.append(
                f"{key} is {_brief(section[key])}, which has no effect in Leasehold"
            )
