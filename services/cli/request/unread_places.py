"""Words about GPUs in a manifest where nothing reads them: outside a pod's template; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.dialects import GPU_RESOURCES
from shared.dialects.vocabulary import WORDS, WordEffect
from shared.kubernetes.manifests import ManifestPod
from shared.model.change import Change, Hint, Place, field_removed, limit
from shared.pods.manifest_patches import CONTAINERS

TEXTS = {Place.ANNOTATION: "annotations", Place.LABEL: "labels"}
POD_LEVEL = ("spec", "resources")
"""Kubernetes refuses GPUs there, and ignores names that it does not know elsewhere."""


def find_unread_places(written: ManifestPod) -> Iterator[Hint]:
    """Yield what no pod gets from where it is written, and where to write it."""
    if written.path or written.document.get("kind") == "Pod":
        yield from _unread_amounts(written)
    yield from _texts_of_controllers(written)


def _texts_of_controllers(written: ManifestPod) -> Iterator[Hint]:
    own = written.template.get("metadata") or {}
    above: Any = written.document
    for key in written.path:
        metadata = above.get("metadata") or {}
        for place, field in TEXTS.items():
            there = own.get(field) or {}
            for name, value in sorted((metadata.get(field) or {}).items()):
                if _is_read(name, place) and name not in there:
                    text = (
                        f"{place} {name} of the {written.origin} has no effect on its pods: write "
                        f"it into {'.'.join(written.path)}.metadata.{field}"
                    )
                    yield Hint(text, (Change(place, name, str(value)),))
        above = above.get(key) or {}


def _is_read(name: str, place: Place) -> bool:
    word = WORDS.get(name)
    return word is not None and word.place is place and word.effect is WordEffect.SUPPORTED


@dataclass(frozen=True, slots=True)
class _Amount:
    path: tuple[str, ...]
    container: str
    """Empty outside a container."""
    name: str
    value: str
    beside: frozenset[str]

    @property
    def is_read(self) -> bool:
        return bool(self.container) and self.path[-2:] in {
            ("resources", "limits"),
            ("resources", "requests"),
        }


def _unread_amounts(written: ManifestPod) -> Iterator[Hint]:
    first = next((container.name for container in written.pod.spec.containers), "")
    pod_level = (*written.path, *POD_LEVEL)
    for amount in _amounts((), "", written.document):
        if amount.is_read:
            continue
        container = amount.container or first
        changes = [limit(container, amount.name, amount.value)]
        if amount.path[:-1] == pod_level and amount.beside <= GPU_RESOURCES:
            changes.append(field_removed(".".join((*POD_LEVEL, amount.path[-1]))))
        yield Hint(
            f"{amount.name} has no effect in {'.'.join(amount.path)}: write it into "
            f"resources.limits of container {container}",
            tuple(changes),
        )


def _amounts(path: tuple[str, ...], container: str, value: Any) -> Iterator[_Amount]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if key in GPU_RESOURCES and isinstance(child, str | int | float):
                yield _Amount(path, container, key, str(child), frozenset(value))
            elif key != "metadata":
                yield from _amounts((*path, str(key)), container, child)
    elif isinstance(value, list):
        for child in value:
            name = child.get("name", "") if isinstance(child, Mapping) else ""
            if path[-1] in CONTAINERS:
                yield from _amounts((*path[:-1], f"{path[-1]}[{name}]"), name, child)
            else:
                yield from _amounts(path, container, child)
