"""JSON Patch operations (RFC 6902) that apply whatever the pod already has; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shared.model.errors import RequestError
from shared.pods.manifest_patches import PatchOperation, PatchValue, escape_pointer
from shared.pods.pod_view import PodContainer, PodView

ANNOTATIONS = "/metadata/annotations"
LABELS = "/metadata/labels"


def add(path: str, value: PatchValue) -> PatchOperation:
    return PatchOperation(op="add", path=path, value=value)


def remove(path: str, key: str) -> PatchOperation:
    return PatchOperation(op="remove", path=f"{path}/{escape_pointer(key)}")


def add_annotation(
    pod: PodView, patches: Sequence[PatchOperation], key: str, value: str
) -> PatchOperation:
    """Keep the annotations of the pod, and those that `patches` add."""
    if pod.annotations or any(patch.path == ANNOTATIONS for patch in patches):
        return add(f"{ANNOTATIONS}/{escape_pointer(key)}", value)
    return add(ANNOTATIONS, {key: value})


def add_label(pod: PodView, key: str, value: str) -> PatchOperation:
    return (
        add(f"{LABELS}/{escape_pointer(key)}", value) if pod.labels else add(LABELS, {key: value})
    )


def add_gate(pod: PodView, name: str) -> Iterator[PatchOperation]:
    gates = [gate.name for gate in pod.spec.scheduling_gates]
    if not gates:
        yield add("/spec/schedulingGates", [{"name": name}])
    elif name not in gates:
        yield add("/spec/schedulingGates/-", {"name": name})


def add_variable(container: PodContainer, name: str, value: str) -> PatchOperation:
    """Of several with one name the last takes effect."""
    entry = {"name": name, "value": value}
    if name in container.places:
        path = f"{container.path}/env/{container.places[name]}"
        return PatchOperation(op="replace", path=path, value=entry)
    if container.variables:
        return add(f"{container.path}/env/-", entry)
    return add(f"{container.path}/env", [entry])


def rename_amounts(
    container: PodContainer, names: Mapping[str, str]
) -> tuple[PodContainer, tuple[PatchOperation, ...]]:
    """Raises RequestError for both names of one resource."""
    amounts = container.amounts
    renamed_amounts = {other: name for other, name in names.items() if other in amounts}
    for other, name in renamed_amounts.items():
        if name in amounts:
            raise RequestError(
                f"container {container.name}: {other} is another name of {name} here: write one"
            )
    limits, requests = (
        {renamed_amounts.get(name, name): amount for name, amount in part.items()}
        for part in (container.limits, container.requests)
    )
    changes: dict[str, int | None] = {
        name: amounts[other] for other, name in renamed_amounts.items()
    }
    changes |= dict.fromkeys(renamed_amounts)
    renamed = replace(container, limits=limits, requests=requests)
    return renamed, tuple(complete_limits(container, changes))


def complete_limits(
    container: PodContainer, changes: Mapping[str, int | None]
) -> Iterator[PatchOperation]:
    """Amounts that are None are removed.

    Limits and requests must be equal for an extended resource, and the API server copies limits to
    requests only before it calls webhooks.
    """
    for part, amounts in (("limits", container.limits), ("requests", container.requests)):
        path = f"{container.path}/resources/{part}"
        if not amounts and part == "requests":
            continue
        if not amounts:
            yield add(path, {})
        for name, amount in changes.items():
            if amount is not None:
                yield add(f"{path}/{escape_pointer(name)}", str(amount))
            elif name in amounts:
                yield remove(path, name)
