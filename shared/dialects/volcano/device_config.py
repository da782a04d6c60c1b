"""Volcano's two ConfigMaps for its vGPU device plugin, as far as they concern a node; pure.

`volcano-vgpu-device-config` has settings for all nodes and the MIG layouts, and
`volcano-vgpu-node-config` has what is different on single nodes. Nothing in them ends an agent that
runs: what is wrong is said, and left out.
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
SPLIT_COUNT, FACTOR, GEOMETRIES = "deviceSplitCount", "gpuMemoryFactor", "knownMigGeometries"
NAMES: Mapping[str, str] = {
    "resourceCountName": NUMBER,
    "resourceMemoryName": vgpu.MEMORY,
    "resourceMemoryPercentageName": vgpu.PERCENTAGE,
    "resourceCoreName": vgpu.CORES,
}
"""Resources that Leasehold serves under these names, and no others."""
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
"""Keys that say nothing to Leasehold, with the value that asks for nothing: no warning for that."""
NODE_KEYS = ("name", "operatingmode", "devicesplitcount", "filterdevices")
NODE_WITHOUT_EFFECT: Mapping[str, object] = {
    "devicecorescaling": 1,
    "devicememoryscaling": 1,
    "migstrategy": "none",
}
FORBIDDEN = "-[],:;"
"""Characters with a meaning of their own where a group's name appears in annotations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGeometries:
    """The layouts of a family of devices, in order of preference."""

    models: tuple[str, ...]
    """Parts of product names; `NVIDIA-` before the name counts, too."""
    layouts: tuple[MigLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What both files say to one node; None and empty: nothing."""

    split_count: int | None = None
    unit_mib: int | None = None
    geometries: tuple[MigGeometries, ...] = ()
    node_split_count: int | None = None
    """For this node alone; wins over everything, flags too."""
    mode: DeviceMode | None = None
    excluded_devices: frozenset[str] = frozenset()
    """UUIDs, and indices as text, of devices that are not to be served."""
    warnings: tuple[str, ...] = ()
    """What is wrong in the files, a sentence each."""


def parse_device_config(device: object, node: object, name: str) -> DeviceConfig:
    """Read both documents (None: there is none) for the node of this name."""
    said: list[str] = []
    config = _parse_device_map(device, said)
    config = _parse_node_map(config, node, name, said)
    return replace(config, warnings=tuple(said))


def _parse_device_map(document: object, said: list[str]) -> DeviceConfig:
    if document is None:
        return DeviceConfig()
    whole = _mapping(document, "the device configuration", said)
    section = _mapping(whole.get(SECTION, {}), f"section {SECTION}", said)
    _warn_of_unknown_keys(whole, (SECTION,), "the device configuration", said)
    keys = (SPLIT_COUNT, FACTOR, GEOMETRIES, *NAMES, *WITHOUT_EFFECT)
    _warn_of_unknown_keys(section, keys, f"section {SECTION}", said)
    for key, ours in NAMES.items():
        if section.get(key, ours) != ours:
            said.append(f"{key} is {section[key]!r}: Leasehold serves it as {ours}")
    _warn_of_keys_without_effect(section, WITHOUT_EFFECT, said)
    return DeviceConfig(
        split_count=_positive(section, SPLIT_COUNT, said),
        unit_mib=_positive(section, FACTOR, said),
        geometries=tuple(_geometries(section.get(GEOMETRIES) or (), said)),
    )


def _geometries(listed: object, said: list[str]) -> Iterable[MigGeometries]:
    for number, entry in enumerate(_sequence(listed, GEOMETRIES, said)):
        where = f"{GEOMETRIES}[{number}]"
        table = _mapping(entry, where, said)
        _warn_of_unknown_keys(table, ("models", "allowedGeometries"), where, said)
        models = tuple(
            str(model) for model in _sequence(table.get("models"), f"{where}.models", said) if model
        )
        listed_layouts = _sequence(
            table.get("allowedGeometries"), f"{where}.allowedGeometries", said
        )
        layouts: dict[str, MigLayout] = {}
        for order, layout in enumerate(listed_layouts):
            read = _layout(layout, f"{where}.allowedGeometries[{order}]", said)
            if read is not None and read.name in layouts:
                said.append(f"{where} has group {read.name!r} twice: the first one counts")
            elif read is not None:
                layouts[read.name] = read
        if models and layouts:
            yield MigGeometries(models=models, layouts=tuple(layouts.values()))


def _layout(entry: object, where: str, said: list[str]) -> MigLayout | None:
    layout = _mapping(entry, where, said)
    _warn_of_unknown_keys(layout, ("group", "geometries"), where, said)
    name = layout.get("group")
    if not isinstance(name, str) or not name or set(name) & set(FORBIDDEN):
        said.append(
            f"{where}.group is {name!r}: a group needs a name, without any of "
            f"{' '.join(FORBIDDEN)}; it is left out"
        )
        return None
    profiles: dict[str, MigProfile] = {}
    listed = _sequence(layout.get("geometries"), f"{where}.geometries", said)
    for number, one in enumerate(listed):
        profile = _profile(one, f"{where}.geometries[{number}]", said)
        if profile is None:
            said.append(f"group {name} is left out: without all of its instances it is another")
            return None
        if profile.name in profiles:
            said.append(f"{where} has {profile.name} twice: give it once, with the sum as count")
            return None
        profiles[profile.name] = profile
    return MigLayout(name=name, profiles=tuple(profiles.values())) if profiles else None


def _profile(entry: object, where: str, said: list[str]) -> MigProfile | None:
    profile = _mapping(entry, where, said)
    _warn_of_unknown_keys(profile, ("name", "memory", "count"), where, said)
    name = profile.get("name")
    memory, count = _positive(profile, "memory", said), _positive(profile, "count", said)
    if not isinstance(name, str) or not name or memory is None or count is None:
        said.append(f"{where} needs a name, a memory in MiB and a count of 1 or more")
        return None
    return MigProfile(name=name, memory_mib=memory, count=count)


def _parse_node_map(
    config: DeviceConfig, document: object, name: str, said: list[str]
) -> DeviceConfig:
    if document is None:
        return config
    whole = _mapping(document, "the node configuration", said)
    _warn_of_unknown_keys(whole, ("nodeconfig",), "the node configuration", said)
    for number, entry in enumerate(_sequence(whole.get("nodeconfig"), "nodeconfig", said)):
        where = f"nodeconfig[{number}]"
        own = _mapping(entry, where, said)
        if own.get("name") != name:
            continue
        _warn_of_unknown_keys(own, (*NODE_KEYS, *NODE_WITHOUT_EFFECT), where, said)
        _warn_of_keys_without_effect(own, NODE_WITHOUT_EFFECT, said)
        config = replace(
            config,
            node_split_count=_positive(own, "devicesplitcount", said, zero=True),
            mode=_mode(own.get("operatingmode"), said),
            excluded_devices=_excluded_devices(
                own.get("filterdevices") or {}, f"{where}.filterdevices", said
            ),
        )
    return config


def _mode(value: object, said: list[str]) -> DeviceMode | None:
    if value in (None, ""):
        return None
    if value not in tuple(DeviceMode):
        said.append(f"operatingmode is {value!r}, and can be {' or '.join(DeviceMode)}")
        return None
    return DeviceMode(str(value))


def _excluded_devices(value: object, where: str, said: list[str]) -> frozenset[str]:
    lists = _mapping(value, where, said)
    _warn_of_unknown_keys(lists, ("uuid", "index"), where, said)
    return frozenset(
        str(one)
        for key in ("uuid", "index")
        for one in _sequence(lists.get(key) or (), f"{where}.{key}", said)
    )


def _mapping(value: object, where: str, said: list[str]) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    said.append(f"{where} is no mapping, but {value!r}")
    return {}


def _sequence(value: object, where: str, said: list[str]) -> Sequence[object]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    said.append(f"{where} is no list, but {value!r}")
    return ()


def _positive(
    section: Mapping[str, object], key: str, said: list[str], *, zero: bool = False
) -> int | None:
    """Return a whole number above 0; with `zero`, a 0 says nothing without being wrong."""
    value = section.get(key)
    if value is None or (zero and value == 0):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        said.append(f"{key} is {value!r}: it must be a whole number of 1 or more")
        return None
    return value


def _warn_of_unknown_keys(
    section: Mapping[str, object], known: Sequence[str], where: str, said: list[str]
) -> None:
    for key in section:
        if key not in known:
            lowered = {name.lower(): name for name in known}
            near = difflib.get_close_matches(str(key).lower(), lowered, n=1, cutoff=0.6)
            hint = f"; did you mean {lowered[near[0]]}?" if near else ""
            said.append(f"{where} has a key {key!r} that nothing reads{hint}")


def _warn_of_keys_without_effect(
    section: Mapping[str, object], without_effect: Mapping[str, object], said: list[str]
) -> None:
    for key, usual in without_effect.items():
        if section.get(key) not in (None, usual, ""):
            said.append(f"{key} is {section[key]!r}, and has no effect in Leasehold")
