"""Conversion of objects between their stored version and the versions that are served; pure.

Versions of a custom kind differ in `apiVersion` only. Events are stored as core/v1 Events;
events.k8s.io/v1 has other names for some of their fields. HorizontalPodAutoscalers are stored as
autoscaling/v2; v1, which kubectl before 1.34 creates, knows only a target for the CPU.
"""

from collections.abc import Mapping

from simcluster.apimachinery.objects import Json
from simcluster.apimachinery.resources import Resource

_NEW_NAMES: Mapping[str, str] = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_OLD_NAMES = {new: old for old, new in _NEW_NAMES.items()}


_OLD_AUTOSCALER = "autoscaling/v1"
_CPU_TARGET = "targetCPUUtilizationPercentage"


def _to_cpu_target(spec: Json) -> Json:
    targets = [
        metric["resource"]["target"]
        for metric in spec.get("metrics") or ()
        if metric.get("type") == "Resource" and metric["resource"]["name"] == "cpu"
    ]
    percent = next((target.get("averageUtilization") for target in targets), None)
    kept = {name: value for name, value in spec.items() if name not in {"metrics", "behavior"}}
    return kept if percent is None else {**kept, _CPU_TARGET: percent}


def _from_cpu_target(spec: Json) -> Json:
    target = {"type": "Utilization", "averageUtilization": spec.get(_CPU_TARGET, 80)}
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    kept = {name: value for name, value in spec.items() if name != _CPU_TARGET}
    return {**kept, "metrics": [metric]}


def _renames_fields(kind: Resource) -> bool:
    return kind.group == "events.k8s.io"


def to_version(kind: Resource, obj: Json) -> Json:
    """Convert a stored object to a served version."""
    if obj.get("apiVersion") == kind.api_version:
        return obj
    if _renames_fields(kind):
        obj = {_NEW_NAMES.get(name, name): value for name, value in obj.items()}
    if kind.api_version == _OLD_AUTOSCALER:
        obj = {**obj, "spec": _to_cpu_target(obj.get("spec") or {})}
    return {**obj, "apiVersion": kind.api_version}


def to_storage(kind: Resource, obj: Json) -> Json:
    """Convert an object of a served version to the stored version."""
    if kind.api_version == _OLD_AUTOSCALER:
        spec = _from_cpu_target(obj.get("spec") or {})
        return {**obj, "apiVersion": "autoscaling/v2", "spec": spec}
    if not _renames_fields(kind):
        return obj
    renamed = {_OLD_NAMES.get(name, name): value for name, value in obj.items()}
    return {**renamed, "apiVersion": "v1"}


def storage_path(kind: Resource, path: str) -> str:
    """Return where the field is stored that a field selector of this version names."""
    if not _renames_fields(kind):
        return path
    first, dot, rest = path.partition(".")
    return f"{_OLD_NAMES.get(first, first)}{dot}{rest}"
