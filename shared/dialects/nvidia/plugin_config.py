"""The configuration file of NVIDIA's device plugin, as far as it shares GPUs; pure.

What the plugin ignores is a warning.
https://github.com/NVIDIA/k8s-device-plugin#shared-access-to-gpus
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.nvidia.replica_labels import (
    PRODUCT_LABEL,
    REPLICAS_LABEL,
    SHARED_PRODUCT,
    STRATEGY_LABEL,
)
from shared.model.devices.replicas import LEAST_REPLICAS, MOST_REPLICAS, Replicas
from shared.model.errors import RequestError

VERSION = "v1"
KIND = "ConfigMap"
CONFIG_MAP = "nvidia-plugin-configs"
"""In the namespace of Leasehold's agents."""
DEFAULT_CONFIG = "default"
"""For nodes without the label."""
SHARED = ".shared"
"""Follows the name of a resource that is renamed."""
MIG_RESOURCES = "nvidia.com/mig-"
NODE_CONFIG = "nvidia.com/device-plugin.config"
"""A node's label: a key of the ConfigMap."""
MIG_STRATEGIES = ("none", "single", "mixed")
ALL_PERCENT = 100
MOST_CONFIGS = 256
LONGEST_NAME = 63
"""Of a resource's name, and of a value in a message."""

Strategy = Literal["none", "time-slicing", "mps"]
FIELDS: Mapping[Strategy, str] = {"time-slicing": "timeSlicing", "mps": "mps"}
_DEVICE = re.compile(r"(GPU|MIG)-[\w/-]{1,64}|[0-9]{1,4}(:[0-9]{1,4})?", re.ASCII)
"""A UUID, an index, or an index of a GPU and one of an instance."""


class UnknownConfigError(RequestError):
    """The node's label names a configuration that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSharing:
    """All GPUs of a node have one strategy."""

    strategy: Strategy = "none"
    replicas: Mapping[str, int] = field(default_factory=dict)
    """The same for each device of a resource."""
    renamed: bool = False
    fails_above_one: bool = False
    """A container with more than one replica fails at the node; else they may be of one GPU."""
    warnings: tuple[str, ...] = ()
    """Fields without effect, a sentence each."""

    @property
    def labels(self) -> dict[str, str]:
        """GPU feature discovery gives these to such a node.

        >>> NodeSharing(strategy="mps", replicas={"nvidia.com/gpu": 4}).labels[REPLICAS_LABEL]
        '4'
        """
        number = self.replicas.get(nvidia.COUNT, 0)
        if not number:
            return {STRATEGY_LABEL: "none"}
        product = {} if self.renamed else {PRODUCT_LABEL: f"...{SHARED_PRODUCT}"}
        return {STRATEGY_LABEL: self.strategy, REPLICAS_LABEL: str(number), **product}

    @property
    def resource(self) -> str:
        """The name under which the node offers its GPUs."""
        is_renamed = self.renamed and nvidia.COUNT in self.replicas
        return f"{nvidia.COUNT}{SHARED}" if is_renamed else nvidia.COUNT

    @property
    def part(self) -> dict[str, int]:
        """What gives a container as much as a replica.

        Leasehold holds the memory of a replica by time-slicing, which NVIDIA's plugin does not.

        >>> NodeSharing(strategy="time-slicing", replicas={"nvidia.com/gpu": 4}).part
        {'nvidia.com/gpu': 1, 'nvidia.com/gpumem-percentage': 25}
        """
        number = self.replicas.get(nvidia.COUNT, 0)
        if not number:
            return {nvidia.COUNT: 1}
        percent = max(1, ALL_PERCENT // number)
        cores = {nvidia.CORES: percent} if self.strategy == "mps" else {}
        return {nvidia.COUNT: 1, nvidia.PERCENTAGE: percent, **cores}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSharing:
    """A node's label `NODE_CONFIG` chooses among these."""

    name: str
    """Its key in the ConfigMap, or "" for a file of its own."""
    sharing: NodeSharing = NodeSharing()
    fault: str = ""
    """What is wrong with it, and the rule."""


def named_configs(document: object) -> Iterator[tuple[str, object]]:
    """A document is a file, or a ConfigMap of files, still as text.

    Raises RequestError for anything else.
    """
    content = _mapping(document, "the file", ())
    if content.get("kind") != KIND:
        yield "", content
        return
    data = _mapping(content.get("data"), "data of the ConfigMap", ())
    if not data:
        raise RequestError("the ConfigMap has no data: its keys are the names of configurations")
    if len(data) > MOST_CONFIGS:
        raise RequestError(
            f"the ConfigMap has {len(data)} configurations; at most {MOST_CONFIGS} are read"
        )
    yield from ((str(name), text) for name, text in data.items())


def config_for(configs: Mapping[str, str], key: str | None) -> str | None:
    """Without the label, the default counts, or the only one.

    Raises UnknownConfigError for a label that names none.

    >>> config_for({"slices": "version: v1"}, None)
    'version: v1'
    """
    if key:
        if key in configs:
            return configs[key]
        raise UnknownConfigError(
            f"label {NODE_CONFIG} of the node is {_brief(key)}, and ConfigMap {CONFIG_MAP} has no "
            f"such key: its keys are {', '.join(sorted(configs)[:10]) or 'none'}"
        )
    if len(configs) == 1:
        return next(iter(configs.values()))
    return configs.get(DEFAULT_CONFIG)


def replicas_of(sharing: NodeSharing) -> Replicas | None:
    """Return None if no GPUs are shared by number. Raises RequestError for instances of MIG.

    >>> replicas_of(NodeSharing(strategy="mps", replicas={"nvidia.com/gpu": 4})).cores_percent
    25
    """
    if sharing.strategy == "none":
        return None
    instances = [name for name in sharing.replicas if name.startswith(MIG_RESOURCES)]
    if instances:
        raise RequestError(
            f"sharing.{FIELDS[sharing.strategy]} names {instances[0]}: instances of MIG have "
            "memory and cores of their own, and are not shared; leave it out"
        )
    return Replicas(
        number=sharing.replicas[nvidia.COUNT],
        strategy=sharing.strategy,
        resource=sharing.resource,
        one_per_container=sharing.fails_above_one,
    )


def parse_sharing(document: object) -> NodeSharing:
    """Raise RequestError with the field, its value and the rule.

    >>> resources = [{"name": "nvidia.com/gpu", "replicas": 4}]
    >>> parse_sharing({"version": "v1", "sharing": {"mps": {"resources": resources}}}).strategy
    'mps'
    """
    warnings = list[str]()
    keys = ("version", "flags", "resources", "sharing", "imex")
    content = _mapping(document, "the configuration", keys, warnings)
    version = content.get("version")
    if version != VERSION:
        raise RequestError(f"version must be {VERSION}, got {version!r}")
    if content.get("resources"):
        warnings.append("resources has no effect, as in NVIDIA's plugin")
    sharing = _mapping(content.get("sharing"), "sharing", tuple(FIELDS.values()), warnings)
    parsed = {
        strategy: _replicated(sharing[name], f"sharing.{name}", strategy, warnings)
        for strategy, name in FIELDS.items()
        if sharing.get(name) is not None
    }
    if len(parsed) > 1:
        warnings.append("sharing.timeSlicing has no effect beside sharing.mps")
    chosen = parsed.get("mps") or parsed.get("time-slicing") or NodeSharing()
    flags = _mapping(content.get("flags"), "flags", ())
    _check_mig(chosen, flags.get("migStrategy", "none"))
    return replace(chosen, warnings=tuple(warnings))


def _check_mig(sharing: NodeSharing, mig_strategy: object) -> None:
    if mig_strategy not in MIG_STRATEGIES:
        raise RequestError(
            f"flags.migStrategy must be one of {', '.join(MIG_STRATEGIES)}, got {mig_strategy!r}"
        )
    instances = [name for name in sharing.replicas if name.startswith(MIG_RESOURCES)]
    if sharing.strategy != "mps" or not (instances or mig_strategy == "mixed"):
        return
    cause = f"sharing.mps names {instances[0]}" if instances else "flags.migStrategy is mixed"
    raise RequestError(f"{cause}: MPS and MIG exclude each other; use timeSlicing, or no MIG")


def _replicated(value: object, where: str, strategy: Strategy, warnings: list[str]) -> NodeSharing:
    content = _mapping(
        value, where, ("renameByDefault", "failRequestsGreaterThanOne", "resources"), warnings
    )
    resources = content.get("resources")
    if not isinstance(resources, Sequence) or isinstance(resources, str) or not resources:
        raise RequestError(f"{where}.resources must list resources with name and replicas")
    replicas: dict[str, int] = {}
    for number, resource in enumerate(resources):
        name, count = _resource(resource, f"{where}.resources[{number}]", warnings)
        if name in replicas:
            raise RequestError(f"{where}.resources names {name} twice")
        if strategy == "mps" and count > ALL_PERCENT:
            raise RequestError(
                f"{where}.resources[{number}].replicas must be at most {ALL_PERCENT}, got {count}: "
                "a client would get 0 % of the compute"
            )
        replicas[name] = count
    return NodeSharing(
        strategy=strategy,
        replicas=replicas,
        renamed=_boolean(content, "renameByDefault", where, default=False),
        fails_above_one=_boolean(
            content, "failRequestsGreaterThanOne", where, default=strategy == "mps"
        ),
    )


def _resource(value: object, where: str, warnings: list[str]) -> tuple[str, int]:
    content = _mapping(value, where, ("name", "rename", "devices", "replicas"), warnings)
    name = content.get("name")
    if not isinstance(name, str) or not (
        name == nvidia.COUNT or (name.startswith(MIG_RESOURCES) and len(name) <= LONGEST_NAME)
    ):
        raise RequestError(
            f"{where}.name must be {nvidia.COUNT} or {MIG_RESOURCES}..., got {_brief(name)}"
        )
    replicas = content.get("replicas")
    if not _is_number(replicas) or not LEAST_REPLICAS <= replicas <= MOST_REPLICAS:
        raise RequestError(
            f"{where}.replicas must be a whole number from {LEAST_REPLICAS} to {MOST_REPLICAS}, "
            f"got {_brief(replicas)}"
        )
    devices = content.get("devices", "all")
    _check_devices(devices, where)
    ignored = {"rename": bool(content.get("rename")), "devices": devices != "all"}
    warnings += [
        f"{where}.{key} has no effect, as in NVIDIA's plugin"
        for key, is_set in ignored.items()
        if is_set
    ]
    return name, replicas


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_devices(devices: object, where: str) -> None:
    is_count = _is_number(devices) and devices > 0
    is_list = isinstance(devices, list) and all(map(_is_device, devices))
    if devices != "all" and not is_count and not is_list:
        raise RequestError(
            f"{where}.devices must be all, a number above 0, or a list of indices and UUIDs, got "
            f"{_brief(devices)}"
        )


def _is_device(value: object) -> bool:
    if isinstance(value, str):
        return bool(_DEVICE.fullmatch(value))
    return _is_number(value) and value >= 0


def _boolean(content: Mapping[str, object], key: str, where: str, *, default: bool) -> bool:
    value = content.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{where}.{key} must be true or false, got {_brief(value)}")
    return value


def _mapping(
    value: object, where: str, keys: Collection[str], warnings: list[str] | None = None
) -> Mapping[str, object]:
    """Warn of each key that nothing reads."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be a mapping, got {_brief(value)}")
    if warnings is not None:
        unread = sorted(_brief(key) for key in value if key not in keys)
        warnings += [f"{where} has a key {key} that nothing reads" for key in unread[:10]]
    return value


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..."
