"""What pods request of Koordinator: a part of each GPU, and by hints which GPUs; pure.

The rules are those of Koordinator's webhook and of its plugin `DeviceShare`, for each container.
Fields of annotations that upstream ignores on GPUs, or can never satisfy, are refused. RDMA and
FPGAs are ordinary resources here, so a preference for GPUs near them has no effect. `BestEffort`,
the GPUs with the best links, is the default of `gpu-partition-spec`, as there are no partition
tables.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shared.dialects.dialect import PodManifest, Rules
from shared.dialects.strict_values import (
    check_choice,
    check_fields,
    check_gpus,
    check_range,
    parse_object,
)
from shared.model.change import Change, limit, words
from shared.model.devices.node import LABEL_OPERATORS
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB
from shared.model.requests.request import DeviceSelection, GpuRequest, SharingPolicy, TopologyScope

NAME = "koordinator"
SCHEDULER = "koord-scheduler"
NVIDIA_GPUS = "nvidia.com/gpu"
"""Read here only for Koordinator's scheduler; the NVIDIA dialect serves it in any pod."""
PREFIX = "koordinator.sh/"
DEPRECATED = "kubernetes.io/"
"""Of the names before Koordinator 1.0, which are read and never written."""

GPU = "gpu"
SHARED = "gpu.shared"
CORE = "gpu-core"
MEMORY = "gpu-memory"
RATIO = "gpu-memory-ratio"
HYPHEN = "koordinator.sh/gpu-shared"
"""Some tutorials have this name, which Koordinator never had."""
NPUS = "huawei.com/npu-"

FULL = 100
"""Percent of a GPU, and the number of its device IDs."""

_ALIASES: Mapping[str, str] = {
    **{PREFIX + name: name for name in (GPU, SHARED, CORE, MEMORY, RATIO)},
    **{DEPRECATED + name: name for name in (GPU, CORE, MEMORY, RATIO)},
}
RESOURCES = frozenset({*_ALIASES, HYPHEN})

VALID_COMBINATIONS = frozenset(
    {
        frozenset({GPU}),
        frozenset({MEMORY}),
        frozenset({RATIO}),
        frozenset({CORE, MEMORY}),
        frozenset({CORE, RATIO}),
        frozenset({SHARED, MEMORY}),
        frozenset({SHARED, RATIO}),
        frozenset({SHARED, CORE, MEMORY}),
        frozenset({SHARED, CORE, RATIO}),
    }
)
"""Of names in a container."""


def reads_nvidia_gpus(pod: PodManifest, rules: Rules) -> bool:
    """Return whether `nvidia.com/gpu` in this pod is for this dialect.

    The NVIDIA dialect reads such pods if this one is disabled: none may count as without a GPU.
    """
    enabled = NAME in (rules.enabled or {NAME}) and NAME not in rules.disabled
    return enabled and pod.scheduler == SCHEDULER


def parse_part(
    container: str, limits: Mapping[str, int], *, init: bool = False
) -> GpuRequest | None:
    """Return None for no GPU. Raises RequestError naming container, resource, value and rule.

    >>> parse_part("train", {"koordinator.sh/gpu": 50}).cores_percent
    50
    """
    where = f"container {container}"
    amounts = _amounts(container, limits)
    if amounts:
        _check_other_resources(container, limits, amounts)
        _check_names(container, amounts)
        for name in (GPU, CORE, RATIO):
            gpus = 0 if SHARED in amounts else amounts.get(name, 0) // FULL
            check_gpus(container, PREFIX + name, gpus, unit=FULL)
        check_gpus(container, PREFIX + SHARED, amounts.get(SHARED, 0))
        _check_percent(container, amounts)
    elif (vendor := limits.get(NVIDIA_GPUS, 0)) > 0:
        amounts = {SHARED: vendor, CORE: vendor * FULL, RATIO: vendor * FULL}
    else:
        return None
    full = _completed(amounts)
    gpus = full[SHARED]
    for name in (CORE, RATIO):
        _check_divides(container, name, full.get(name), gpus)
    if MEMORY in full and full[MEMORY] < gpus * MIB:
        raise RequestError(
            f"{where}: {PREFIX}{MEMORY} is a number of bytes, of all its GPUs together: "
            f"{full[MEMORY]} over {gpus} is less than 1 MiB each; for as many MiB write "
            f"{full[MEMORY]}Mi",
            limit(container, PREFIX + MEMORY, f"{full[MEMORY]}Mi"),
        )
    whole = full.get(CORE) == full.get(RATIO) == FULL * gpus
    return GpuRequest(
        container=container,
        gpus=gpus,
        memory_percent=full[RATIO] // gpus if RATIO in full and not whole else None,
        percent_of_mib=True,
        memory_bytes=full[MEMORY] // gpus if MEMORY in full else None,
        cores_percent=full.get(CORE, 0) // gpus,
        whole=whole,
        sharing=SharingPolicy.SHARED if CORE in full else SharingPolicy.BEST_EFFORT,
        slots=FULL,
        init=init,
        records_requested_units=True,
    )


def amount_changes(limits: Mapping[str, int]) -> dict[str, int | None]:
    """Invalid requests are not changed. Without a GPU count the kubelet would not call Allocate.

    >>> changes = amount_changes({"koordinator.sh/gpu": 50})
    >>> changes["koordinator.sh/gpu"], changes["koordinator.sh/gpu-core"]
    (None, 50)
    """
    amounts = {
        name: amount
        for key, name in _ALIASES.items()
        if (amount := limits.get(key, 0)) > 0
    }  # fmt: skip
    if frozenset(amounts) not in VALID_COMBINATIONS or _indivisible(amounts):
        return {}
    full = _completed(amounts)
    if GPU not in amounts:
        return {} if SHARED in amounts else {PREFIX + SHARED: full[SHARED]}
    added: dict[str, int | None] = {PREFIX + name: amount for name, amount in full.items()}
    return {key: None for key, name in _ALIASES.items() if name == GPU and key in limits} | added


def _completed(amounts: Mapping[str, int]) -> dict[str, int]:
    full = dict(amounts)
    if GPU in full:
        percent_of_all = full.pop(GPU)
        full[CORE] = percent_of_all
        full[RATIO] = percent_of_all
    if SHARED not in full:
        percent = full.get(RATIO, full.get(CORE, 0))
        full[SHARED] = percent // FULL if percent > FULL and percent % FULL == 0 else 1
    return full


def _amounts(container: str, limits: Mapping[str, int]) -> dict[str, int]:
    where = f"container {container}"
    if limits.get(HYPHEN):
        raise RequestError(
            f"{where}: there is no {HYPHEN}; the name has a dot: {PREFIX}{SHARED}",
            limit(container, HYPHEN),
            limit(container, PREFIX + SHARED, limits[HYPHEN]),
        )
    amounts: dict[str, int] = {}
    for key, name in _ALIASES.items():
        amount = limits.get(key, 0)
        check_range(container, key, amount, 0)
        if amount and name in amounts:
            raise RequestError(
                f"{where}: {key} repeats {PREFIX}{name}; remove the old name",
                limit(container, key),
            )
        if amount:
            amounts[name] = amount
    return amounts


def _check_other_resources(
    container: str, limits: Mapping[str, int], amounts: Mapping[str, int]
) -> None:
    other = next((key for key in limits if key == NVIDIA_GPUS or key.startswith(NPUS)), None)
    if other is None or not limits[other]:
        return
    rule = (
        "whole GPUs are requested with one of them, not with both"
        if other == NVIDIA_GPUS
        else "memory of NPUs cannot be shared here"
    )
    raise RequestError(
        f"container {container}: {other} {limits[other]} beside {_listed(amounts)}: {rule}: remove "
        f"{other}",
        limit(container, other),
    )


def _check_names(container: str, amounts: Mapping[str, int]) -> None:
    if frozenset(amounts) in VALID_COMBINATIONS:
        return
    named = _listed(amounts)
    if GPU in amounts:
        changes = _without_shorthand(container, amounts)
        rule = f"{PREFIX}{GPU} stands for core and memory, and must be alone: {words(changes)}"
    elif MEMORY in amounts and RATIO in amounts:
        rule = f"memory is requested in bytes or as a ratio, so remove {PREFIX}{MEMORY} or "
        rule += f"{PREFIX}{RATIO}"
        changes = [limit(container, PREFIX + MEMORY)]
    else:
        ratio = amounts.get(CORE) or amounts.get(SHARED, 1) * FULL
        rule = f"memory is missing, so add {PREFIX}{RATIO}, such as {ratio}, or {PREFIX}{MEMORY}"
        changes = [limit(container, PREFIX + RATIO, ratio)]
    raise RequestError(f"container {container}: {named}: {rule}", *changes)


def _without_shorthand(container: str, amounts: Mapping[str, int]) -> list[Change]:
    """Return the changes that leave a container what it requests beside the shorthand.

    The shorthand stands for core or memory where these do not name it.
    """
    others = amounts.keys() - {GPU}
    if not others & {CORE, MEMORY, RATIO}:
        return [limit(container, PREFIX + name) for name in sorted(others)]
    missing = [CORE] * (CORE not in others) + [RATIO] * others.isdisjoint({MEMORY, RATIO})
    kept = [limit(container, PREFIX + name, amounts[GPU]) for name in missing]
    return [*kept, limit(container, PREFIX + GPU)]


def _check_percent(container: str, amounts: Mapping[str, int]) -> None:
    if name := _indivisible(amounts):
        gpus = -(-amounts[name] // FULL)
        raise RequestError(
            f"container {container}: {PREFIX}{name} must be 1 to {FULL} percent of a GPU or a "
            f"multiple of {FULL}, got {amounts[name]}: write {gpus * FULL} for {gpus} whole GPUs",
            limit(container, PREFIX + name, gpus * FULL),
        )


def _indivisible(amounts: Mapping[str, int]) -> str:
    """Return the name of an amount that is neither a part of a GPU nor whole GPUs, or ""."""
    names = () if SHARED in amounts else (GPU, CORE, RATIO)
    bad = (name for name in names if amounts.get(name, 0) > FULL and amounts[name] % FULL)
    return next(bad, "")


def _check_divides(container: str, name: str, amount: int | None, gpus: int) -> None:
    if amount is None:
        return
    if amount % gpus:
        larger = -(-amount // gpus) * gpus
        raise RequestError(
            f"container {container}: {PREFIX}{name} must be a multiple of {PREFIX}{SHARED} {gpus}, "
            f"got {amount}: write {larger}",
            limit(container, PREFIX + name, larger),
        )
    if amount // gpus > FULL:
        raise RequestError(
            f"container {container}: {PREFIX}{name} {amount} over {PREFIX}{SHARED} {gpus} is "
            f"{amount // gpus} percent of each GPU, and a GPU has {FULL}: write {gpus * FULL}",
            limit(container, PREFIX + name, gpus * FULL),
        )


def _listed(amounts: Mapping[str, int]) -> str:
    return " and ".join(f"{PREFIX}{name} {amount}" for name, amount in sorted(amounts.items()))


HINT = "scheduling.koordinator.sh/device-allocate-hint"
JOINT = "scheduling.koordinator.sh/device-joint-allocate"
PARTITION = "scheduling.koordinator.sh/gpu-partition-spec"
ANNOTATIONS = frozenset({HINT, JOINT, PARTITION})

VENDOR_LABEL = "node.koordinator.sh/gpu-vendor"
MODEL_LABEL = "node.koordinator.sh/gpu-model"
VENDOR = "nvidia"

OTHERS = ("rdma", "fpga")
APPLY_FOR_ALL = "ApplyForAll"
SAME_PCIE = "SamePCIe"
RESTRICTED = "Restricted"
BEST_EFFORT = "BestEffort"

HINT_FIELDS = (
    *("selector", "requiredTopologyScope", "allocateStrategy"),
    *("vfSelector", "exclusivePolicy"),
)
JOINT_FIELDS = ("deviceTypes", "requiredScope")
BANDWIDTH = "ringBusBandwidth"
PARTITION_FIELDS = ("allocatePolicy", BANDWIDTH)

SCOPES: Mapping[str, TopologyScope] = {
    "Node": TopologyScope.NODE,
    "NUMANode": TopologyScope.NUMA,
    "PCIe": TopologyScope.PCIE,
}

Hints = Mapping[str, Mapping[str, Any]]
"""By device type."""


def parse_hints(
    annotations: Mapping[str, str], *, resources: Iterable[str], shared: bool
) -> tuple[DeviceSelection, TopologyScope]:
    """`resources` are those of all containers.

    Raises RequestError naming annotation, field, value and rule.
    """
    hints = _hints(annotations.get(HINT))
    joint = parse_object(JOINT, annotations.get(JOINT), JOINT_FIELDS)
    _check_joint(joint, hints, frozenset(resources))
    partition = parse_object(PARTITION, annotations.get(PARTITION), PARTITION_FIELDS)
    _check_partition(partition, shared=shared)
    hint = hints.get(GPU, {})
    check_fields(f"{HINT}: {GPU}", hint, HINT_FIELDS)
    for name in ("vfSelector", "exclusivePolicy"):
        if hint.get(name):
            raise RequestError(f"{HINT}: {name} has no effect on a GPU; remove it from {GPU}")
    scope = str(hint.get("requiredTopologyScope") or "Node")
    check_choice(f"{HINT}: requiredTopologyScope", scope, SCOPES)
    return _selected(hint.get("selector") or {}), SCOPES[scope]


def _hints(text: str | None) -> Hints:
    hints = parse_object(HINT, text)
    for kind, hint in hints.items():
        if not isinstance(hint, dict):
            raise RequestError(f"{HINT}: {kind} must be a JSON object, got {json.dumps(hint)}")
    return hints


def _check_joint(joint: Mapping[str, Any], hints: Hints, resources: frozenset[str]) -> None:
    scope = joint.get("requiredScope") or ""
    if scope:
        check_choice(f"{JOINT}: requiredScope", str(scope), (SAME_PCIE,))
    kinds = joint.get("deviceTypes") or ()
    if not isinstance(kinds, list | tuple):
        raise RequestError(f"{JOINT}: deviceTypes must be a list, got {json.dumps(kinds)}")
    beside = [
        kind
        for kind in kinds
        if kind in OTHERS
        and not resources.isdisjoint({PREFIX + kind, DEPRECATED + kind})
        and hints.get(kind, {}).get("allocateStrategy") != APPLY_FOR_ALL
    ]
    if scope and beside and GPU in kinds:
        raise RequestError(
            f"{JOINT}: requiredScope {SAME_PCIE} of {GPU} and {beside[0]} is not supported: "
            f"only GPUs are placed here; remove requiredScope, or {beside[0]} from deviceTypes"
        )


def _check_partition(spec: Mapping[str, Any], *, shared: bool) -> None:
    policy = str(spec.get("allocatePolicy") or BEST_EFFORT)
    check_choice(f"{PARTITION}: allocatePolicy", policy, (RESTRICTED, BEST_EFFORT))
    if policy == RESTRICTED and not shared:
        raise RequestError(
            f"{PARTITION}: allocatePolicy {RESTRICTED} is not supported, because there are no "
            f"partition tables here: {BEST_EFFORT} prefers the GPUs with the best links"
        )
    if spec.get(BANDWIDTH) and not shared:
        raise RequestError(
            f"{PARTITION}: {BANDWIDTH} is not supported, because there are no partition tables "
            "here: remove it"
        )


def _selected(selector: Mapping[str, Any]) -> DeviceSelection:
    models: list[str] | None = None
    not_models: list[str] = []
    for key, operator, values in _requirements(selector):
        if key == MODEL_LABEL and operator == "In":
            models = [v for v in values if models is None or v in models]
        elif key == MODEL_LABEL and operator == "NotIn":
            not_models += values
        elif not LABEL_OPERATORS[operator](_FIXED.get(key), values):
            raise RequestError(
                f"{HINT}: selector requires {key} {operator} {', '.join(values)}".rstrip()
                + f", and no device matches: devices have the labels {VENDOR_LABEL} "
                f"({VENDOR}) and {MODEL_LABEL}"
            )
    if models == []:
        raise RequestError(f"{HINT}: selector requires of {MODEL_LABEL} what no value matches")
    return DeviceSelection(models=tuple(models or ()), not_models=tuple(not_models))


def _requirements(selector: Mapping[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    try:
        equal = [(key, "In", (str(v),)) for key, v in (selector.get("matchLabels") or {}).items()]
        requirements = [
            (
                str(requirement["key"]),
                str(requirement["operator"]),
                tuple(map(str, requirement.get("values") or ())),
            )
            for requirement in selector.get("matchExpressions") or ()
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise RequestError(f"{HINT}: {json.dumps(selector)} is not a label selector") from error
    for key, operator, _ in requirements:
        if operator not in LABEL_OPERATORS:
            raise RequestError(
                f"{HINT}: operator of {key} must be one of {', '.join(LABEL_OPERATORS)}, "
                f"got {operator}"
            )
    return equal + requirements


_ANY_MODEL = "(any)"
_FIXED: Mapping[str, str] = {VENDOR_LABEL: VENDOR, MODEL_LABEL: _ANY_MODEL}
