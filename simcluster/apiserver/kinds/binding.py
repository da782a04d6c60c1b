"""Bindings: node, annotations, labels and PodScheduled reach the pod in one write."""

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, at_path, deep_copy, metadata, name_of
from simcluster.apiserver.storage.store import ObjectStore


def bind(store: ObjectStore, namespace: str, name: str, binding: Json, *, dry_run: bool) -> None:
    """Bind a pod to a node.

    409 if the pod has a node (even this one), is being deleted, or has another uid than the Binding
    carries. Annotations replace those of the pod; labels only add to them.
    """
    target = binding.get("target")
    target = target if isinstance(target, dict) else {}
    _check_target(name, target)
    given = metadata(binding)
    if given.get("name") not in (None, "", name):
        raise ApiError.bad_request(
            f"name in URL does not match name in Binding object: {name} and {given['name']}"
        )
    pod = store.read("pods", namespace, name)
    _check_pod(pod, given, name)
    bound = deep_copy(pod)
    bound["spec"]["nodeName"] = target["name"]
    meta = bound["metadata"]
    if given.get("annotations"):
        meta["annotations"] = {**(meta.get("annotations") or {}), **given["annotations"]}
    if given.get("labels"):
        meta["labels"] = {**given["labels"], **(meta.get("labels") or {})}
    conditions = at_path(bound, "status.conditions") or []
    scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None,
                 "lastTransitionTime": store.now()}  # fmt: skip
    others = [condition for condition in conditions if condition.get("type") != "PodScheduled"]
    bound.setdefault("status", {})["conditions"] = [*others, scheduled]
    store.update("pods", bound, subresource="binding", verb="create", dry_run=dry_run)


def _check_target(name: str, target: Json) -> None:
    causes = []
    if target.get("kind") not in (None, "", "Node"):
        text = f'Unsupported value: "{target["kind"]}": supported values: "Node", "<empty>"'
        causes.append(Cause("FieldValueNotSupported", text, "target.kind"))
    if not target.get("name"):
        causes.append(Cause("FieldValueRequired", "Required value", "target.name"))
    if causes:
        raise ApiError.invalid("Binding", "", name, causes)


def _check_pod(pod: Json, given: Json, name: str) -> None:
    meta = pod["metadata"]
    for field, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if given.get(field) and given[field] != meta[field]:
            detail = (
                f"Precondition failed: {label} in precondition: {given[field]}, "
                f"{label} in object meta: {meta[field]}"
            )
            raise ApiError.conflict("pods", name, detail)
    if meta.get("deletionTimestamp"):
        detail = f"pod {name_of(pod)} is being deleted, cannot be assigned to a host"
        raise ApiError.conflict("pods/binding", name, detail)
    node = at_path(pod, "spec.nodeName")
    if node:
        detail = f'pod {name_of(pod)} is already assigned to node "{node}"'
        raise ApiError.conflict("pods/binding", name, detail)
    if at_path(pod, "spec.schedulingGates"):
        detail = f"pod {name_of(pod)} has non-empty .spec.schedulingGates"
        raise ApiError.conflict("pods/binding", name, detail)
