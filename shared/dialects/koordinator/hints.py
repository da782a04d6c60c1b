"""Koordinator's annotations for the choice of devices, as far as they concern GPUs; pure.

`device-allocate-hint`: `selector` and `requiredTopologyScope` have their effect. `allocateStrategy`
is for RDMA and FPGAs and has no effect on GPUs, as upstream. What upstream accepts and then ignores
or can never satisfy is refused: `exclusivePolicy` and `vfSelector` of a GPU, and the scope
`Device`.

`device-joint-allocate`: a device type that the pod does not request is ignored. RDMA and FPGAs are
ordinary resources of a node here, so a preference for GPUs near them has no effect, and a
requirement of the same PCIe root is refused.

`gpu-partition-spec`: there are no partition tables here. `BestEffort` is the default for every pod
with several GPUs: those with the best links. `Restricted` is refused. The annotation has no effect
on pods that share GPUs, as upstream.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shared.dialects.koordinator.amounts import DEPRECATED, PREFIX
from shared.dialects.strict_values import check_choice, check_fields, parse_object
from shared.model.errors import RequestError
from shared.model.node import LABEL_OPERATORS
from shared.model.request import DeviceSelection, TopologyScope

HINT = "scheduling.koordinator.sh/device-allocate-hint"
JOINT = "scheduling.koordinator.sh/device-joint-allocate"
PARTITION = "scheduling.koordinator.sh/gpu-partition-spec"
ANNOTATIONS = frozenset({HINT, JOINT, PARTITION})

VENDOR_LABEL = "node.koordinator.sh/gpu-vendor"
MODEL_LABEL = "node.koordinator.sh/gpu-model"
VENDOR = "nvidia"

GPU = "gpu"
OTHERS = ("rdma", "fpga")
APPLY_FOR_ALL = "ApplyForAll"
SAME_PCIE = "SamePCIe"
RESTRICTED, BEST_EFFORT = "Restricted", "BestEffort"

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
    """Parse the annotations of a pod that requests GPUs.

    `resources` are those of all its containers; `shared`: it requests parts of GPUs. Raises
    RequestError naming annotation, field, value and rule.
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
    """Translate a label selector on devices, whose labels are their vendor and their model.

    Requirements that do not depend on the model are checked here.
    """
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
        found = [
            (str(one["key"]), str(one["operator"]), tuple(map(str, one.get("values") or ())))
            for one in selector.get("matchExpressions") or ()
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise RequestError(f"{HINT}: {json.dumps(selector)} is not a label selector") from error
    for key, operator, _ in found:
        if operator not in LABEL_OPERATORS:
            raise RequestError(
                f"{HINT}: operator of {key} must be one of {', '.join(LABEL_OPERATORS)}, "
                f"got {operator}"
            )
    return equal + found


_ANY_MODEL = "(any)"
_FIXED: Mapping[str, str] = {VENDOR_LABEL: VENDOR, MODEL_LABEL: _ANY_MODEL}
