"""Patches of the Kubernetes objects that show a node's devices; pure.

An annotation of our own records our entries of lists, so that entries of others are never removed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.dialects.advertised import NodeObject
from shared.kubernetes.types import Condition
from shared.model.devices.node import OWN_ENTRIES_PREFIX, OWN_LABELS, SHARING_CONDITION
from shared.model.names import NodeName
from shared.model.quantity import timestamp

TRANSITION_TIME = "lastTransitionTime"

DeviceEntry = Mapping[str, Any]


def merge_own_entries(
    current: Mapping[str, str], lists: Mapping[str, Iterable[str]]
) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for key, ours in lists.items():
        own_key = OWN_ENTRIES_PREFIX + key.rpartition("/")[2]
        entries = _entries(current.get(key))
        added_before = _entries(current.get(own_key))
        others = [entry for entry in entries if entry not in added_before]
        added = [entry for entry in ours if entry not in others]
        if set(entries) != {*others, *added}:
            changes[key] = ",".join((*others, *added)) or None
        if added != added_before:
            changes[own_key] = ",".join(added) or None
    return changes


def merge_own_labels(
    labels: Mapping[str, str], annotations: Mapping[str, str], own: Mapping[str, str]
) -> tuple[dict[str, str | None], dict[str, str | None]]:
    before = _entries(annotations.get(OWN_LABELS))
    changes: dict[str, str | None] = {
        key: text for key, text in own.items() if labels.get(key) != text
    }
    changes |= {key: None for key in before if key not in own and key in labels}
    record = ",".join(sorted(own)) or None
    return changes, {OWN_LABELS: record} if annotations.get(OWN_LABELS) != record else {}


def sharing_condition(
    conditions: Iterable[Condition], problem: str, *, now_s: float
) -> list[dict[str, str]]:
    """A node that always offered its GPUs as configured has no condition."""
    stored = next((entry for entry in conditions if entry.type == SHARING_CONDITION), None)
    status, reason = ("False", "Waiting") if problem else ("True", "InForce")
    if stored is None and not problem:
        return []
    if stored is not None and (stored.status, stored.message) == (status, problem):
        return []
    changed = {"type": SHARING_CONDITION, "status": status, "reason": reason, "message": problem}
    if stored is None or stored.status != status:
        changed[TRANSITION_TIME] = timestamp(now_s)
    return [changed]


def _entries(text: str | None) -> list[str]:
    return [entry.strip() for entry in (text or "").split(",") if entry.strip()]


def new_object(
    wanted: NodeObject, node: NodeName, node_uid: str, *, now_s: float
) -> dict[str, Any]:
    _, _, group, version, _ = wanted.collection.split("/")
    return {
        "apiVersion": f"{group}/{version}",
        "kind": wanted.kind,
        "metadata": {
            "name": node,
            "labels": {key: text for key, text in wanted.labels.items() if text is not None},
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": node,
                    "uid": node_uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {"devices": date_conditions(wanted.devices, (), now_s=now_s)},
    }


def changes_to(
    wanted: NodeObject, labels: Mapping[str, str], devices: Sequence[DeviceEntry], *, now_s: float
) -> dict[str, Any]:
    stale_labels = {key: text for key, text in wanted.labels.items() if labels.get(key) != text}
    dated = date_conditions(wanted.devices, devices, now_s=now_s)
    changes: dict[str, Any] = {}
    if stale_labels:
        changes["metadata"] = {"labels": stale_labels}
    if dated != list(devices):
        changes["spec"] = {"devices": dated}
    return changes


def date_conditions(
    devices: Iterable[DeviceEntry], before: Iterable[DeviceEntry], *, now_s: float
) -> list[DeviceEntry]:
    since = {
        (entry.get("id"), condition.get("type"), condition.get("status")): condition.get(
            TRANSITION_TIME
        )
        for entry in before
        for condition in entry.get("conditions") or ()
    }
    now = timestamp(now_s)

    def dated(entry: DeviceEntry) -> DeviceEntry:
        conditions = [
            {
                **condition,
                TRANSITION_TIME: since.get((entry["id"], condition["type"], condition["status"]))
                or now,
            }
            for condition in entry.get("conditions", ())
        ]
        return {**entry, "conditions": conditions} if conditions else entry

    return [dated(entry) for entry in devices]
