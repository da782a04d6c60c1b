"""One stored object, shown in each of the versions in which its kind is served.

Versions of a custom kind differ in their `apiVersion` alone. Events are stored as core/v1 has
them; events.k8s.io/v1 calls some of their fields otherwise.
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


def _renames_fields(kind: Resource) -> bool:
    return kind.group == "events.k8s.io"


def to_version(kind: Resource, obj: Json) -> Json:
    """Return a stored object as a version shows it."""
    if obj.get("apiVersion") == kind.api_version:
        return obj
    if _renames_fields(kind):
        obj = {_NEW_NAMES.get(name, name): value for name, value in obj.items()}
    return {**obj, "apiVersion": kind.api_version}


def to_storage(kind: Resource, obj: Json) -> Json:
    """Return an object that came in a version as its table takes it."""
    if not _renames_fields(kind):
        return obj
    renamed = {_OLD_NAMES.get(name, name): value for name, value in obj.items()}
    return {**renamed, "apiVersion": "v1"}


def storage_path(kind: Resource, path: str) -> str:
    """Return where a field is stored that a version's field selector names."""
    if not _renames_fields(kind):
        return path
    first, dot, rest = path.partition(".")
    return f"{_OLD_NAMES.get(first, first)}{dot}{rest}"
