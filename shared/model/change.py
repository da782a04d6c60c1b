"""What to change in a pod's manifest; pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby


class Place(StrEnum):
    RESOURCE = "resource"
    TOTAL = "total"
    ANNOTATION = "annotation"
    LABEL = "label"
    SELECTOR = "node selector"
    TOLERATION = "toleration"
    FIELD = "field"


DEADLINE = "spec.activeDeadlineSeconds"


@dataclass(frozen=True, slots=True)
class Change:
    """For example, `Change(Place.RESOURCE, "nvidia.com/gpu", "1", "main")` requests a GPU."""

    place: Place
    name: str
    """Of a field, its path in the container, or else in the pod; `env[A]` is the item named A."""
    value: str = ""
    """Empty to remove it, a total from all containers. Of a taint, `value:effect`."""
    container: str = ""


@dataclass(frozen=True, slots=True)
class Hint:
    text: str
    changes: tuple[Change, ...] = ()
    """Empty if only a person can choose."""


def limit(container: str, name: str, value: str | int = "") -> Change:
    return Change(Place.RESOURCE, name, str(value), container)


def field_removed(path: str, container: str = "") -> Change:
    return Change(Place.FIELD, path, container=container)


def words(changes: Iterable[Change]) -> str:
    """Return the changes as a part of a sentence.

    >>> words((limit("main", "nvidia.com/gpu", 1), limit("main", "volcano.sh/vgpu-number")))
    'in container main set nvidia.com/gpu: 1 and remove volcano.sh/vgpu-number'
    """
    return " and ".join(_parts(changes))


def _parts(changes: Iterable[Change]) -> Iterator[str]:
    for container, together in groupby(changes, key=lambda change: change.container):
        if container:
            yield f"in container {container} {_limits_text(tuple(together))}"
        else:
            yield from map(_text, together)


def _limits_text(changes: Sequence[Change]) -> str:
    amounts = [f"{change.name}: {change.value}" for change in changes if change.value]
    removed = [change.name for change in changes if not change.value]
    texts = [f"set {', '.join(amounts)}"] * bool(amounts)
    return " and ".join(texts + [f"remove {', '.join(removed)}"] * bool(removed))


def _total_text(change: Change) -> str:
    if not change.value:
        return f"remove {change.name} from all containers"
    return f"request at most {change.value} of {change.name} in all containers together"


def _text(change: Change) -> str:
    match change.place:
        case Place.TOTAL:
            return _total_text(change)
        case Place.TOLERATION:
            return f"tolerate the taint {change.name}={change.value}"
        case Place.SELECTOR if change.value:
            return f"change the {change.place} {change.name} to {change.value}"
        case Place.FIELD:
            return f"remove {change.name}"
        case Place.ANNOTATION | Place.LABEL if change.value:
            return f"write the {change.place} {change.name}: {change.value}"
        case _:
            return f"remove the {change.place} {change.name}"
