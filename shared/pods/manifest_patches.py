"""Changes of a pod's manifest as JSON Patch operations (RFC 6902); pure."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shared.model.change import DEADLINE, Change, Place

PatchValue = str | int | bool | dict[str, str] | list[dict[str, str]] | msgspec.Raw


class PatchOperation(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    path: str
    value: PatchValue | msgspec.UnsetType = msgspec.UNSET


def escape_pointer(key: str) -> str:
    """A token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
_SEGMENT = re.compile(r"([^.\[\]]+)(?:\[([^\]]*)\])?")
_ITEM_KEYS = ("name", "mountPath", "devicePath")
"""Paths name items of lists by these."""
_BOOLEANS = {"true": True, "false": False}
"""Values of fields."""
_OF_METADATA = {Place.ANNOTATION: "annotations", Place.LABEL: "labels"}

Token = str | int


def json_patch(pod: Mapping[str, Any], changes: Iterable[Change]) -> tuple[PatchOperation, ...]:
    """Return the operations that make these changes.

    What is not there is not removed, and only a person can divide a total among containers.

    >>> pod = {"metadata": {"annotations": {"a/b": "x"}}, "spec": {"containers": []}}
    >>> [operation.path for operation in json_patch(pod, [Change(Place.ANNOTATION, "a/b")])]
    ['/metadata/annotations/a~1b']
    """
    patch = _Patch(pod)
    for change in changes:
        for path in _paths(patch.document, change):
            if not change.value:
                patch.remove(path)
            elif change.place is Place.TOLERATION:
                value, _, effect = change.value.partition(":")
                patch.append(path, {"key": change.name, "value": value, "effect": effect})
            elif change.place is Place.FIELD:
                patch.add(path, _field_value(change))
            else:
                patch.add(path, change.value)
    return tuple(patch.operations)


def _field_value(change: Change) -> str | bool | int:
    if change.name == DEADLINE:
        return int(change.value)
    return _BOOLEANS.get(change.value, change.value)


class _Patch:
    """The operations so far, and the document as they have left it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document: Any = copy.deepcopy(document)
        self.operations: list[PatchOperation] = []

    def add(self, path: Sequence[Token], value: str | bool | int) -> None:
        self._parent(path)[path[-1]] = value
        self._operation("add", path, value)

    def append(self, path: Sequence[Token], value: dict[str, str]) -> None:
        items = self._parent(path).setdefault(path[-1], [])
        if not items:
            self._operation("add", path, [])
        items.append(value)
        self._operation("add", (*path, "-"), value)

    def remove(self, path: Sequence[Token]) -> None:
        try:
            parent = self._found(path[:-1])
            del parent[path[-1]]
        except (KeyError, IndexError, TypeError):
            return
        self.operations.append(PatchOperation(op="remove", path=_pointer(path)))

    def _parent(self, path: Sequence[Token]) -> Any:
        """Return what has the last token; each missing parent gets an operation."""
        value = self.document
        for at, token in enumerate(path[:-1], start=1):
            if isinstance(value, dict) and value.get(token) is None:
                value[token] = {}
                self._operation("add", path[:at], {})
            value = value[token]
        return value

    def _found(self, path: Sequence[Token]) -> Any:
        value = self.document
        for token in path:
            value = value[token]
        return value

    def _operation(self, op: str, path: Sequence[Token], value: Any) -> None:
        self.operations.append(PatchOperation(op=op, path=_pointer(path), value=value))


def _pointer(path: Iterable[Token]) -> str:
    return "".join(f"/{escape_pointer(str(token))}" for token in path)


def _paths(document: Any, change: Change) -> Iterator[tuple[Token, ...]]:
    match change.place:
        case Place.RESOURCE:
            yield from _of_amount(document, change.container, change.name)
        case Place.TOTAL if not change.value:
            yield from _of_all_containers(document, change.name)
        case Place.TOTAL:
            yield from _of_only_container(document, change.name)
        case Place.ANNOTATION | Place.LABEL:
            yield ("metadata", _OF_METADATA[change.place], change.name)
        case Place.SELECTOR:
            yield ("spec", "nodeSelector", change.name)
        case Place.TOLERATION:
            yield ("spec", "tolerations")
        case Place.FIELD if change.container:
            for above in _containers(document, change.container):
                yield from _of_field(document, above, change.name)
        case Place.FIELD:
            yield from _of_field(document, (), change.name)


def _of_amount(document: Any, container: str, name: str) -> Iterator[tuple[Token, ...]]:
    for above in _containers(document, container):
        yield (*above, "resources", "limits", name)
        requests = _value(document, (*above, "resources", "requests")) or {}
        if name in requests:  # limits and requests of such resources are equal
            yield (*above, "resources", "requests", name)


def _of_all_containers(document: Any, name: str) -> Iterator[tuple[Token, ...]]:
    for above in _containers(document):
        for amounts in ("limits", "requests"):
            yield (*above, "resources", amounts, name)


def _of_only_container(document: Any, name: str) -> Iterator[tuple[Token, ...]]:
    """Yield where the only container that requests a resource does so; several share a total."""
    paths = [
        path for path in _of_all_containers(document, name) if _value(document, path) is not None
    ]
    if len({path[:3] for path in paths}) == 1:
        yield from paths


def _containers(document: Any, name: str = "") -> Iterator[tuple[Token, ...]]:
    for kind in CONTAINERS:
        for number, container in enumerate(_value(document, ("spec", kind)) or ()):
            if not name or container.get("name") == name:
                yield ("spec", kind, number)


def _of_field(document: Any, above: tuple[Token, ...], name: str) -> Iterator[tuple[Token, ...]]:
    """Yield the paths that a field's name stands for, the last of a list's items first."""
    paths = [above]
    for key, item in _SEGMENT.findall(name):
        paths = [(*path, key) for path in paths]
        if item:
            paths = [
                (*path, number)
                for path in paths
                for number, value in enumerate(_value(document, path) or ())
                if _is_named(value, item, number)
            ]
    yield from reversed(paths)


def _is_named(value: Any, name: str, number: int) -> bool:
    if isinstance(value, dict):
        return name == str(number) or any(value.get(key) == name for key in _ITEM_KEYS)
    return bool(value == name)


def _value(document: Any, path: Iterable[Token]) -> Any:
    value = document
    for token in path:
        try:
            value = value[token]
        except (KeyError, IndexError, TypeError):
            return None
    return value
