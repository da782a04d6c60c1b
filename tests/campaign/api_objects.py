"""Pods and nodes of the API server as the judge sees them; pure."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tests.campaign.observations import SeenNode, SeenPod
from tests.campaign.workload import (
    ANNOUNCED_ANNOTATION,
    FORGED_ANNOTATION,
    GANG_MIN,
    GANG_NAME,
    GUARDED,
    INIT,
    LEASE_ANNOTATION,
    PREEMPTIBLE,
    RESIZED_ANNOTATION,
    WANT_ANNOTATION,
    Want,
)

_DEVICE, _MIB = 1, 5
"""Positions in a share of the lease's copy."""


def seen_pod(pod: Mapping[str, Any]) -> SeenPod | None:
    """Return the pod, or None if no campaign created it."""
    metadata, status = pod["metadata"], pod.get("status", {})
    annotations = metadata.get("annotations") or {}
    if WANT_ANNOTATION not in annotations:
        return None
    labels = metadata.get("labels") or {}
    gpus, mib, cores, exclusive, mig = map(int, annotations[WANT_ANNOTATION].split())
    lease = json.loads(annotations.get(LEASE_ANNOTATION, "{}"))
    shares = [share for share in lease.get("shares", ()) if share[0] != INIT]
    unscheduled: Mapping[str, str] = next(
        (
            condition
            for condition in status.get("conditions", ())
            if condition["type"] == "PodScheduled" and condition["status"] == "False"
        ),
        {},
    )
    return SeenPod(
        uid=metadata["uid"],
        name=metadata["name"],
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
        want=Want(gpus, mib, cores, bool(exclusive), bool(mig)),
        node=pod["spec"].get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        deleted="deletionTimestamp" in metadata,
        forged=FORGED_ANNOTATION in annotations,
        gang=annotations.get(GANG_NAME, ""),
        gang_min=int(annotations.get(GANG_MIN, 0)),
        lease_node=lease.get("node", ""),
        devices=tuple(share[_DEVICE] for share in shares),
        copied_mib=tuple(share[_MIB] for share in shares),
        reason=unscheduled.get("reason", ""),
        message=unscheduled.get("message", ""),
        priority=pod["spec"].get("priority", 0),
        resized=RESIZED_ANNOTATION in annotations,
        spared=labels.get(PREEMPTIBLE) == "false" or GUARDED in labels,
        announced=ANNOUNCED_ANNOTATION in annotations,
        runs=any(
            "running" in each.get("state", {}) for each in status.get("containerStatuses", ())
        ),
    )


def seen_node(node: Mapping[str, Any]) -> SeenNode:
    """Return the node."""
    ready = next(
        (
            condition["status"] == "True"
            for condition in node.get("status", {}).get("conditions", ())
            if condition["type"] == "Ready"
        ),
        False,
    )
    cordoned = bool(node.get("spec", {}).get("unschedulable"))
    return SeenNode(name=node["metadata"]["name"], cordoned=cordoned, ready=ready)
