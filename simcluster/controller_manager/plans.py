"""The plan of a controller for one workload, and the pods that it owns; pure."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from simcluster.apimachinery.objects import (
    Json,
    JsonValue,
    Objects,
    annotations_of,
    at_path,
    deep_copy,
    encode,
    list_at,
    metadata,
    name_of,
    namespace_of,
    parse_time,
)
from simcluster.apimachinery.pods import has_finished, is_ready

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
BURST = 500
"""Pods that a controller creates or deletes for a workload at once."""


@dataclass(slots=True, kw_only=True)
class WorkloadPlan:
    """What to write for one workload; `status` is compared with the present one."""

    status: Json
    create: list[tuple[str, Json]] = field(default_factory=list)
    """Table and object."""
    delete: list[tuple[str, Json]] = field(default_factory=list)
    """Table and object; what is marked for deletion already is left alone."""
    update: list[tuple[str, Json]] = field(default_factory=list)
    """Table, and the object with its changes."""
    annotations: Json = field(default_factory=dict)
    """Annotations to set on the workload itself."""
    delete_itself: bool = False
    again_in_s: float | None = None
    """Seconds after which the workload must be looked at again; None: when something changes."""


def is_owned(obj: Json, owner: Json) -> bool:
    """Return whether the owner is the object's controller."""
    return controller_uid(obj) == str(owner["metadata"]["uid"])


def controller_uid(obj: Json) -> str:
    """Return the uid of an object's controller; empty: it has none."""
    controller = controller_of(obj)
    return str(controller.get("uid")) if controller else ""


def controller_of(obj: Json) -> Json | None:
    """Return the owner reference of an object's controller."""
    references = metadata(obj).get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), None)


def is_active(pod: Json) -> bool:
    """Return whether a pod has neither finished nor been deleted."""
    return not has_finished(pod) and not is_deleted(pod)


def is_deleted(obj: Json) -> bool:
    """Return whether an object is marked for deletion."""
    return bool(metadata(obj).get("deletionTimestamp"))


def is_available(pod: Json, min_ready_s: int, now: float) -> bool:
    """Return whether a pod has been ready for this long."""
    return is_ready(pod) and ready_for_s(pod, now) >= min_ready_s


def ready_for_s(pod: Json, now: float) -> float:
    """Return for how many seconds a ready pod has been ready."""
    conditions = list_at(pod, "status.conditions")
    ready: Json = next(
        (condition for condition in conditions if condition.get("type") == "Ready"), {}
    )
    since = ready.get("lastTransitionTime")
    return now - parse_time(since) if since else 0.0


def template_hash(template: Json) -> str:
    """Return a short name for a pod template, the same for equal templates."""
    number = int.from_bytes(hashlib.sha256(encode(_sorted(template))).digest()[:8])
    letters = []
    for _ in range(10):
        number, at = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[at])
    return "".join(letters)


def _sorted(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def record_revision(plan: WorkloadPlan, workload: Json, kind: str, recorded: Objects) -> None:
    """Plan the ControllerRevisions of a workload, by which kubectl shows and restores templates."""
    template = workload["spec"]["template"]
    name = f"{name_of(workload)}-{template_hash(template)}"
    others = sorted(
        (revision for revision in recorded if name_of(revision) != name),
        key=lambda revision: int(revision["revision"]),
    )
    newest = int(others[-1]["revision"]) if others else 0
    current = next((revision for revision in recorded if name_of(revision) == name), None)
    if current is None:
        own = {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {
                "name": name,
                "namespace": namespace_of(workload),
                "labels": metadata(template).get("labels") or {},
                "annotations": annotations_of(workload),
                "ownerReferences": [owner_reference(workload, kind, "apps/v1")],
            },
            "data": {"spec": {"template": {**deep_copy(template), "$patch": "replace"}}},
            "revision": newest + 1,
        }
        plan.create.append(("controllerrevisions", own))
    elif int(current["revision"]) <= newest:
        plan.update.append(("controllerrevisions", {**current, "revision": newest + 1}))
    surplus = max(len(others) - workload["spec"]["revisionHistoryLimit"], 0)
    plan.delete += [("controllerrevisions", name) for name in others[:surplus]]


def new_pod(workload: Json, kind: str, api_version: str, *, name: str = "") -> Json:
    """Return a pod of a workload's template; without a name, the API server generates one."""
    template = deep_copy(workload["spec"]["template"])
    meta = {
        key: value
        for key, value in metadata(template).items()
        if key in {"labels", "annotations", "finalizers"}
    }
    names = {"name": name} if name else {"generateName": f"{name_of(workload)}-"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **meta,
            **names,
            "namespace": namespace_of(workload),
            "ownerReferences": [owner_reference(workload, kind, api_version)],
        },
        "spec": template["spec"],
    }


def owner_reference(owner: Json, kind: str, api_version: str) -> Json:
    """Return the reference of a controller to what it owns."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name_of(owner),
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def deleted_first(pods: Iterable[Json], count: int) -> Objects:
    """Return the pods that a smaller number of replicas ends.

    Those that are not bound come first, then those that are not ready, then the newest.
    """

    def rank(pod: Json) -> tuple[bool, bool, bool]:
        running = at_path(pod, "status.phase") == "Running"
        return bool(at_path(pod, "spec.nodeName")), running, is_ready(pod)

    newest = sorted(pods, key=lambda pod: metadata(pod)["creationTimestamp"], reverse=True)
    return sorted(newest, key=rank)[:count]


def amount_of(value: int | str | None, total: int, *, round_up: bool) -> int:
    """Return an amount that is a number or a percentage of a total."""
    text = str(value or 0)
    if not text.endswith("%"):
        return int(text)
    share = int(text[:-1]) * total / 100
    return math.ceil(share) if round_up else math.floor(share)


def with_condition(conditions: Sequence[Json], now: str, condition: Json) -> Objects:
    """Return conditions with this one; its transition time changes with its status."""
    kind = condition["type"]
    before: Json = next(
        (condition for condition in conditions if condition.get("type") == kind), {}
    )
    same = before.get("status") == condition["status"]
    since = before.get("lastTransitionTime", now) if same else now
    others = (condition for condition in conditions if condition.get("type") != kind)
    return [*others, {**condition, "lastTransitionTime": since}]


def condition_of(kind: str, status: str, reason: str, message: str = "") -> Json:
    """Return a condition of a workload's status."""
    return {"type": kind, "status": status, "reason": reason, "message": message}
