"""Volcano's two ConfigMaps for its vGPU device plugin, for one node; pure.

The later entry of a node goes first, as in Volcano's plugin. Invalid ones are left out, with an
error.
"""

import fnmatch
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.dialects.closest import closest
from shared.dialects.volcano import vgpu
from shared.dialects.volcano.device_register import NUMBER
from shared.model.bounds import SHORT
from shared.model.devices.device import POD_MODES, DeviceMode, MigLayout, MigProfile

NAMESPACES = ("kube-system", "volcano-system")
"""The first namespace that has the ConfigMap counts."""
DEVICE_MAP = "volcano-vgpu-device-config"
DEVICE_KEY = "device-config.yaml"
NODE_MAP = "volcano-vgpu-node-config"
NODE_KEY = "config.json"
SECTION = "nvidia"
MAX_SPLIT_COUNT = 4096
"""The kubelet gets a device ID for each."""
MAX_UNIT_MIB = 1 << 20
"""More than a device has."""
SPLIT_COUNT = "deviceSplitCount"
FACTOR = "gpuMemoryFactor"
GEOMETRIES = "knownMigGeometries"
MOST: Mapping[str, int] = {
    "devicesplitcount": MAX_SPLIT_COUNT,
    "gpumemoryfactor": MAX_UNIT_MIB,
    "memory": 2**24,
    "count": 16,
}
"""By name of a field in lower case."""
MOST_LISTED = 256
"""Entries of a list that are read."""
NAMES: Mapping[str, str] = {
    "resourceCountName": NUMBER,
    "resourceMemoryName": vgpu.MEMORY,
    "resourceMemoryPercentageName": vgpu.PERCENTAGE,
    "resourceCoreName": vgpu.CORES,
}
"""They cannot be changed."""
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
"""Other values are warned of."""
NODE_KEYS = ("name", "operatingmode", "devicesplitcount", "filterdevices")
NODE_WITHOUT_EFFECT: Mapping[str, object] = {
    "devicecorescaling": 1,
    "devicememoryscaling": 1,
    "migstrategy": "none",
}
FORBIDDEN = "-[],:;"
"""They separate fields in annotations with a group's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGeometries:
    """In order of preference."""

    models: tuple[str, ...]
    """Of product names; `NVIDIA-` before the name counts, too."""
    layouts: tuple[MigLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """None and empty mean not set."""

    split_count: int | None = None
    unit_mib: int | None = None
    geometries: tuple[MigGeometries, ...] = ()
    node_split_count: int | None = None
    """It overrides everything for this node, flags, too."""
    mode: DeviceMode | None = None
    excluded_devices: frozenset[str] = frozenset()
    """UUIDs, and indices as text."""
    warnings: tuple[str, ...] = ()
    """Entries without effect, a sentence each."""
    errors: tuple[str, ...] = ()
    """Invalid entries, a sentence each."""


class _Findings:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def section(self, value: object, where: str, keys: Collection[str]) -> Mapping[str, object]:
        """Warn of each unknown key; anything but a mapping is empty."""
        if not isinstance(value, Mapping):
            self.errors.append(f"{where} is not a mapping, but {_brief(value)}")
            return {}
        for key in value:
            if key not in keys:
                lowered = {name.lower(): name for name in keys}
                near = closest(str(key).lower(), lowered)
                hint = f"; did you mean {lowered[near]}?" if near else ""
                self.warnings.append(f"{where} has a key {_brief(key)} that nothing reads{hint}")
        return value

    def sequence(self, value: object, where: str) -> Sequence[object]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) > MOST_LISTED:
                count = f"{len(value)} entries; at most {MOST_LISTED} are read"
                self.errors.append(f"{where} has {count}")
            return value[:MOST_LISTED]
        self.errors.append(f"{where} is not a list, but {_brief(value)}")
        return ()

    def positive(
        self, section: Mapping[str, object], key: str, *, zero: bool = False
    ) -> int | None:
        """With `zero`, 0 means not set, without a warning."""
        value = section.get(key)
        if value is None or (zero and value == 0):
            return None
        most = MOST[key.lower()]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            whole = f"it must be a whole number from 1 to {most}"
            self.errors.append(f"{key} is {_brief(value)}: {whole}")
            return None
        return value

    def warn_of(self, section: Mapping[str, object], without_effect: Mapping[str, object]) -> None:
        for key, usual in without_effect.items():
            if section.get(key) not in (None, usual, ""):
                text = f"{key} is {_brief(section[key])}, which has no effect in Leasehold"
                self.warnings.append(text)


def parse_device_config(device: object, node: object, name: str) -> DeviceConfig:
    findings = _Findings()
    config = DeviceConfig() if device is None else _parse_device_map(device, findings)
    config = config if node is None else _parse_node_map(config, node, name, findings)
    return replace(config, warnings=tuple(findings.warnings), errors=tuple(findings.errors))


def _parse_device_map(document: object, findings: _Findings) -> DeviceConfig:
    whole = findings.section(document, "the device configuration", (SECTION,))
    keys = (SPLIT_COUNT, FACTOR, GEOMETRIES, *NAMES, *WITHOUT_EFFECT)
    section = findings.section(whole.get(SECTION, {}), f"section {SECTION}", keys)
    for key, ours in NAMES.items():
        if section.get(key, ours) != ours:
            findings.warnings.append(
                f"{key} is {_brief(section[key])}: Leasehold serves it as {ours}"
            )
    findings.warn_of(section, WITHOUT_EFFECT)
    return DeviceConfig(
        split_count=findings.positive(section, SPLIT_COUNT),
        unit_mib=findings.positive(section, FACTOR),
        geometries=tuple(_geometries(section.get(GEOMETRIES) or (), findings)),
    )


def _geometries(listed: object, findings: _Findings) -> Iterable[MigGeometries]:
    for number, entry in enumerate(findings.sequence(listed, GEOMETRIES)):
        where = f"{GEOMETRIES}[{number}]"
        table = findings.section(entry, where, ("models", "allowedGeometries"))
        models = findings.sequence(table.get("models"), f"{where}.models")
        named = tuple(str(model) for model in models if model)
        allowed = f"{where}.allowedGeometries"
        layouts: dict[str, MigLayout] = {}
        for order, layout in enumerate(findings.sequence(table.get("allowedGeometries"), allowed)):
            read = _layout(layout, f"{allowed}[{order}]", findings)
            if read is not None and read.name in layouts:
                findings.errors.append(
                    f"{where} has group {read.name!r} twice: the first one counts"
                )
            elif read is not None:
                layouts[read.name] = read
        if named and layouts:
            yield MigGeometries(models=named, layouts=tuple(layouts.values()))


def _layout(entry: object, where: str, findings: _Findings) -> MigLayout | None:
    layout = findings.section(entry, where, ("group", "geometries"))
    name = layout.get("group")
    if not isinstance(name, str) or not 1 <= len(name) <= SHORT or set(name) & set(FORBIDDEN):
        findings.errors.append(
            f"{where}.group is {_brief(name)}: a group needs a name of up to {SHORT} characters, "
            f"without any of {' '.join(FORBIDDEN)}; it is ignored"
        )
        return None
    profiles: dict[str, MigProfile] = {}
    instances = f"{where}.geometries"
    for number, instance in enumerate(findings.sequence(layout.get("geometries"), instances)):
        profile = _profile(instance, f"{instances}[{number}]", findings)
        if profile is None:
            text = f"group {name} is ignored, because one of its instances is invalid"
            findings.errors.append(text)
            return None
        if profile.name in profiles:
            text = f"{where} has {profile.name} twice: list it once, with the sum as count"
            findings.errors.append(text)
            return None
        profiles[profile.name] = profile
    return MigLayout(name=name, profiles=tuple(profiles.values())) if profiles else None


def _profile(entry: object, where: str, findings: _Findings) -> MigProfile | None:
    profile = findings.section(entry, where, ("name", "memory", "count"))
    name = profile.get("name")
    memory = findings.positive(profile, "memory")
    count = findings.positive(profile, "count")
    named = isinstance(name, str) and 1 <= len(name) <= SHORT
    if not isinstance(name, str) or not named or memory is None or count is None:
        findings.errors.append(
            f"{where} needs a name of up to {SHORT} characters, a memory in MiB and a count of 1 "
            "or more"
        )
        return None
    return MigProfile(name=name, memory_mib=memory, count=count)


def _parse_node_map(
    config: DeviceConfig, document: object, name: str, findings: _Findings
) -> DeviceConfig:
    whole = findings.section(document, "the node configuration", ("nodeconfig",))
    listed = whole.get("nodeconfig")
    entries = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
    if not isinstance(listed, Sequence | None) or isinstance(listed, str):
        findings.errors.append(f"nodeconfig is not a list, but {_brief(listed)}")
    for number, entry in enumerate(entries):
        where = f"nodeconfig[{number}]"
        if not isinstance(entry, Mapping):
            findings.errors.append(f"{where} is not a mapping, but {_brief(entry)}")
        elif entry.get("name") == name:
            config = _merge_entry(config, entry, where, name, findings)
        elif not isinstance(entry.get("name"), str):
            findings.errors.append(f"{where} has no name of a node")
        elif fnmatch.fnmatchcase(name, str(entry["name"])):
            findings.warnings.append(
                f"{where} is not applied: its name {_brief(entry['name'])} is compared as it is, "
                "and is no pattern"
            )
    return config


def _merge_entry(
    config: DeviceConfig, own: Mapping[str, object], where: str, name: str, findings: _Findings
) -> DeviceConfig:
    findings.section(own, where, (*NODE_KEYS, *NODE_WITHOUT_EFFECT))
    findings.warn_of(own, NODE_WITHOUT_EFFECT)
    count = findings.positive(own, "devicesplitcount", zero=True)
    mode = _mode(own.get("operatingmode"), findings)
    filters = f"{where}.filterdevices"
    lists = findings.section(own.get("filterdevices") or {}, filters, ("uuid", "index"))
    excluded = frozenset(
        str(name_filter)
        for key in ("uuid", "index")
        for name_filter in findings.sequence(lists.get(key) or (), f"{filters}.{key}")
    )
    for field, earlier, later in (
        ("devicesplitcount", config.node_split_count, count),
        ("operatingmode", config.mode, mode),
        ("filterdevices", config.excluded_devices, excluded),
    ):
        if earlier and later and earlier != later:
            findings.warnings.append(
                f"{where}.{field} replaces that of an earlier entry for {name}"
            )
    return replace(
        config,
        node_split_count=count or config.node_split_count,
        mode=mode or config.mode,
        excluded_devices=excluded or config.excluded_devices,
    )


def _mode(value: object, findings: _Findings) -> DeviceMode | None:
    if value in (None, ""):
        return None
    if value not in POD_MODES:
        words = " or ".join(POD_MODES)
        findings.errors.append(f"operatingmode is {_brief(value)}: it must be {words}")
        return None
    return DeviceMode(str(value))


def _brief(value: object) -> str:
    """Aliases may multiply a value's depths."""
    return reprlib.repr(value)
