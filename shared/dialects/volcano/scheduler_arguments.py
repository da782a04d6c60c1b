"""The arguments of Volcano's scheduler plugin `deviceshare`, as our rules; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from shared.dialects.closest import closest
from shared.dialects.dialect import Rules
from shared.dialects.volcano import gpushare, vgpu
from shared.model.errors import RequestError

CONFIG_MAP_KEY = "volcano-scheduler.conf"
PLUGINS = ("deviceshare", "predicates")
SHARING = "deviceshare.GPUSharingEnable"
NUMBER = "deviceshare.GPUNumberEnable"
VGPU = "deviceshare.VGPUEnable"
LOCK = "deviceshare.NodeLockEnable"
POLICY = "deviceshare.SchedulePolicy"
WEIGHT = "deviceshare.ScheduleWeight"
EXCLUSIVE = "deviceshare.GPUExclusiveRules"
GEOMETRIES = ("deviceshare.KnownGeometriesCMName", "deviceshare.KnownGeometriesCMNamespace")
KNOWN = (SHARING, NUMBER, VGPU, LOCK, POLICY, WEIGHT, EXCLUSIVE, *GEOMETRIES)
_OLD = "predicate."
_PREFIX = "deviceshare."
_GUIDES = {name.replace("Known", "Know"): name for name in GEOMETRIES}
"""The guides' spelling, which no release of Volcano reads."""


def plugin_arguments(conf: Any) -> dict[str, object]:
    """Raise KeyError, TypeError or AttributeError for anything else."""
    plugins = [plugin for tier in conf["tiers"] for plugin in tier["plugins"]]
    return {
        str(key): value
        for plugin in plugins
        if plugin.get("name") in PLUGINS
        for key, value in (plugin.get("arguments") or {}).items()
    }


def parse_rules(arguments: Mapping[str, object]) -> Rules:
    """The switches choose between Volcano's own dialects; all others stay enabled.

    Raises RequestError for an invalid value, and where Volcano's scheduler refuses to start.
    """
    named = _canonical(arguments)
    on = [key for key in (SHARING, NUMBER, VGPU) if _switch(named, key)]
    if len(on) > 1:
        raise RequestError(
            f"{' and '.join(on)} are both true: Volcano allows one of them; leave one on, or give "
            "no scheduler configuration to enable all systems"
        )
    policy = str(named.get(POLICY) or "")
    if policy not in vgpu.ORDERS:
        raise RequestError(f"{POLICY} must be empty, binpack or spread, got {policy!r}")
    dialects = {
        SHARING: gpushare.NAME,
        NUMBER: gpushare.NAME,
        VGPU: vgpu.NAME,
    }
    spoken = {dialects[key] for key in on}
    return Rules(
        disabled=tuple(sorted(set(dialects.values()) - spoken)) if on else (),
        schedule_policy=policy,
        exclusive_labels=_exclusive(named.get(EXCLUSIVE)),
    )


def find_warnings(arguments: Mapping[str, object]) -> list[str]:
    named = _canonical(arguments)
    warnings = [_unknown(key) for key in named if key not in KNOWN and key.startswith(_PREFIX)]
    if _switch(named, LOCK):
        warnings.append(f"{LOCK} has no effect: leases need no node lock")
    weight = named.get(WEIGHT)
    if weight is not None and str(weight) == "0" and named.get(POLICY):
        warnings.append(
            f"{WEIGHT} is 0, with which {POLICY} does not affect the choice of the node in "
            "Volcano; here the policy orders nodes and devices, whatever the weight"
        )
    return warnings


def _canonical(arguments: Mapping[str, object]) -> dict[str, object]:
    named = {}
    for key, value in arguments.items():
        current = key.replace(_OLD, "deviceshare.") if key.startswith(_OLD) else key
        current = _GUIDES.get(current, current)
        named[current if current in KNOWN else key] = value
    return named


def _unknown(key: str) -> str:
    nearest = closest(key, KNOWN)
    hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(KNOWN)}"
    return f"{key} is not an argument of deviceshare: {hint}"


def _exclusive(rules: object) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Pods that have all labels of a rule never share a device."""
    if rules is None:
        return ()
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise RequestError(f"{EXCLUSIVE} must be a list of label maps, got {rules!r}")
    read = []
    for rule in rules:
        if not isinstance(rule, Mapping) or not rule:
            raise RequestError(f"{EXCLUSIVE} must be a list of label maps, got the entry {rule!r}")
        read.append(tuple(sorted((str(key), str(value)) for key, value in rule.items())))
    return tuple(read)


def _switch(arguments: Mapping[str, object], key: str) -> bool:
    value = arguments.get(key, False)
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in {"true", "false"}:
        raise RequestError(f"{key} must be true or false, got {value!r}")
    return text == "true"
