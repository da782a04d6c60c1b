"""Pods and nodes of the API server, and what containers were given, as judged; pure."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from struct import Struct
from typing import Any

from tests.campaign.workload import (
    ANNOUNCED_ANNOTATION,
    DEVICE_CORES,
    DEVICE_MIB,
    FORGED_ANNOTATION,
    GANG_MIN,
    GANG_NAME,
    GUARDED,
    ISOLATION,
    LEASE_ANNOTATION,
    PREEMPTIBLE,
    RESIZED_ANNOTATION,
    WANT_ANNOTATION,
)
from tests.proof.ledger import copied
from tests.proof.observations import Grant, HardwareInstance, RegionLimits, SeenNode, SeenPod, Want

_MIB = 1 << 20
REGION_BYTES = 2_008_953
REGION_HEAD = 1856
"""Size of a region file of HAMi-core 1.2, and of its part before the processes."""
_MAGIC = 19920718
_VERSION = (1, 2)
_HEAD = Struct("<iII")
_LIMITS = Struct("<16Q16Q")
_LIMITS_AT = 1600


def seen_pod(pod: Mapping[str, Any]) -> SeenPod | None:
    """Return the pod, or None if no campaign created it."""
    metadata = pod["metadata"]
    status = pod.get("status", {})
    annotations = metadata.get("annotations") or {}
    if WANT_ANNOTATION not in annotations:
        return None
    labels = metadata.get("labels") or {}
    gpus, mib, cores, exclusive, mig = map(int, annotations[WANT_ANNOTATION].split())
    unscheduled = _condition(status, "PodScheduled", "False") or {}
    return SeenPod(
        uid=metadata["uid"],
        name=metadata["name"],
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
        want=Want(
            gpus, mib, cores, bool(exclusive), bool(mig), memory=annotations.get(ISOLATION, "")
        ),
        node=pod["spec"].get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        deleted="deletionTimestamp" in metadata,
        # Admission makes an ordinary pod of one with a copied grant; only a binder adds a lease.
        forged=FORGED_ANNOTATION in annotations and LEASE_ANNOTATION not in annotations,
        gang=annotations.get(GANG_NAME, ""),
        gang_min=int(annotations.get(GANG_MIN, 0)),
        reason=unscheduled.get("reason", ""),
        message=unscheduled.get("message", ""),
        failure=status.get("message", ""),
        max_run_s=pod["spec"].get("activeDeadlineSeconds"),
        priority=pod["spec"].get("priority", 0),
        resized=RESIZED_ANNOTATION in annotations,
        spared=labels.get(PREEMPTIBLE) == "false" or GUARDED in labels,
        announced=ANNOUNCED_ANNOTATION in annotations,
        runs=any(
            "running" in container_status.get("state", {})
            for container_status in status.get("containerStatuses", ())
        ),
        **copied(annotations.get(LEASE_ANNOTATION, "")),
    )


def seen_node(node: Mapping[str, Any]) -> SeenNode:
    """Return the node."""
    ready = _condition(node.get("status", {}), "Ready", "True") is not None
    cordoned = bool(node.get("spec", {}).get("unschedulable"))
    return SeenNode(name=node["metadata"]["name"], cordoned=cordoned, ready=ready)


def _condition(status: Mapping[str, Any], kind: str, is_true: str) -> Mapping[str, str] | None:
    for condition in status.get("conditions", ()):
        if (condition["type"], condition["status"]) == (kind, is_true):
            fields: Mapping[str, str] = condition
            return fields
    return None


def grants_of(
    state: Mapping[str, Any],
    node: str,
    uuids: Mapping[int, str],
    at: float,
    instances: Mapping[str, HardwareInstance],
) -> Iterator[Grant]:
    """Return what a pod's containers that ran at `at` were given.

    `state` is the simulated container runtime's record of the pod; `uuids` are the node's devices
    by index, since Volcano's gpushare gives indices; `instances` are all that were ever seen.
    """
    for container in state["containers"].values():
        if container["phase"] != "running" or container["started_at"] > at:
            continue
        environment = container["env"]
        pod = state["uid"]
        for position, device in enumerate(container["gpus"]):
            if device.startswith("MIG-"):  # one that no device ever had gives nothing
                instance = instances.get(device) or HardwareInstance(uuid="", device=device, mib=0)
                about: dict[str, Any] = {
                    "device": instance.device,
                    "mib": instance.mib,
                    "instance": device,
                }
                yield Grant(pod=pod, node=node, cores=0, **about)
                continue
            memory = _memory_mib(environment, position)
            cores = int(environment.get("CUDA_DEVICE_SM_LIMIT", 0))
            yield Grant(
                pod=pod,
                node=node,
                device=uuids.get(int(device), device) if device.isdecimal() else device,
                mib=DEVICE_MIB if memory is None else memory,
                cores=DEVICE_CORES if memory is None else cores,
                exclusive=memory is None,
            )


def _memory_mib(environment: Mapping[str, str], position: int) -> int | None:
    """Return the memory limit of a container's device in MiB, or None if it has none."""
    for name in (f"CUDA_DEVICE_MEMORY_LIMIT_{position}", "CUDA_DEVICE_MEMORY_LIMIT"):
        if text := environment.get(name):
            return int(text[:-1]) if text.endswith("m") else -(-int(text) // _MIB)
    allocated = environment.get("VOLCANO_GPU_ALLOCATED")
    return int(allocated) if allocated else None


def region_limits(pod: str, head: bytes) -> RegionLimits | None:
    """Read the limits of a region file from its head, or return None if it has none."""
    if len(head) < REGION_HEAD or _HEAD.unpack_from(head) != (_MAGIC, *_VERSION):
        return None
    numbers = _LIMITS.unpack_from(head, _LIMITS_AT)
    limited = [pair for pair in zip(numbers[:16], numbers[16:], strict=True) if pair[0]]
    if not limited:
        return None
    mib = tuple(-(-size // _MIB) for size, _ in limited)
    cores = tuple(c for _, c in limited)
    return RegionLimits(pod=pod, mib=mib, cores=cores)
