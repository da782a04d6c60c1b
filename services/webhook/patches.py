"""JSON Patch operations (RFC 6902), made so that they apply whatever the object has already."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.webhook.pods import ContainerSeen, PodSeen

ANNOTATIONS = "/metadata/annotations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One operation."""

    op: str
    path: str
    value: Any = None

    def operation(self) -> dict[str, Any]:
        """Return it as JSON wants it."""
        head = {"op": self.op, "path": self.path}
        return head if self.op == "remove" else {**head, "value": self.value}


def pointer(key: str) -> str:
    """Write a key as part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def remove(path: str, key: str) -> Patch:
    """Remove a key of an object."""
    return Patch(op="remove", path=f"{path}/{pointer(key)}")


def add_annotation(pod: PodSeen, key: str, value: str) -> Iterator[Patch]:
    """Add an annotation beside those that there are."""
    if not pod.has_annotations:
        yield Patch(op="add", path=ANNOTATIONS, value={key: value})
    else:
        yield Patch(op="add", path=f"{ANNOTATIONS}/{pointer(key)}", value=value)


def annotated(pod: PodSeen, patches: Sequence[Patch], key: str, value: str) -> tuple[Patch, ...]:
    """Return the patches and one that adds an annotation beside those that they add."""
    if any(patch.path == ANNOTATIONS for patch in patches):
        pod = replace(pod, has_annotations=True)
    return (*patches, *add_annotation(pod, key, value))


def add_gate(pod: PodSeen, name: str) -> Iterator[Patch]:
    """Add a scheduling gate beside those that there are, once."""
    if not pod.gates:
        yield Patch(op="add", path="/spec/schedulingGates", value=[{"name": name}])
    elif name not in pod.gates:
        yield Patch(op="add", path="/spec/schedulingGates/-", value={"name": name})


def add_variable(container: ContainerSeen, name: str, value: str) -> Iterator[Patch]:
    """Add a variable beside those that there are."""
    entry = {"name": name, "value": value}
    if "env" in container.parts:
        yield Patch(op="add", path=f"{container.path}/env/-", value=entry)
    else:
        yield Patch(op="add", path=f"{container.path}/env", value=[entry])


def set_variable(container: ContainerSeen, name: str, value: str) -> Iterator[Patch]:
    """Give a variable this value, whether it is there or not; the last of a name is what counts."""
    if name in container.variables:
        yield Patch(op="add", path=f"{container.path}/env/-", value={"name": name, "value": value})
    else:
        yield from add_variable(container, name, value)


def complete_limits(container: ContainerSeen, added: Mapping[str, int | None]) -> Iterator[Patch]:
    """Add amounts to a container's limits and requests, or take them away (None).

    The API server wants both equal for extended resources, and fills requests from limits only
    before webhooks are asked.
    """
    for part, amounts in (("limits", container.limits), ("requests", container.requests)):
        path = f"{container.path}/resources/{part}"
        there = part in container.parts
        if not there and part == "requests":
            continue
        if not there:
            yield Patch(op="add", path=path, value={})
        for name, amount in added.items():
            if amount is not None:
                yield Patch(op="add", path=f"{path}/{pointer(name)}", value=str(amount))
            elif name in amounts:
                yield remove(path, name)
