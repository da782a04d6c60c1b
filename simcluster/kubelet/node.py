"""The Node object, its status and its Lease, as a kubelet writes them."""

import platform
from collections.abc import Mapping

from simcluster.apimachinery.objects import Json, deep_copy, rfc3339
from simcluster.kubelet.devices.registration import is_extended_resource
from simcluster.kubelet.settings import NodeSettings

LEASE_NAMESPACE = "kube-node-lease"
LEASE_S = 40
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CONDITIONS = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory",
     "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)  # fmt: skip


def architecture() -> str:
    """Return this machine's architecture with Kubernetes' name."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def node_object(name: str, settings: NodeSettings) -> Json:
    """Return the Node object that a kubelet creates."""
    system = {"arch": architecture(), "os": "linux"}
    labels = {f"kubernetes.io/{key}": value for key, value in system.items()}
    labels |= {f"beta.kubernetes.io/{key}": value for key, value in system.items()}
    labels |= {"kubernetes.io/hostname": name, **settings.labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "spec": {}}  # fmt: skip


def without_extended(status: Json) -> Json:
    """Return a node's status with all extended resources at 0: a node without checkpoint."""
    return status | {
        part: {
            name: "0" if is_extended_resource(name) else amount
            for name, amount in (status.get(part) or {}).items()
        }
        for part in ("capacity", "allocatable")
    }


def node_status(
    name: str,
    settings: NodeSettings,
    *,
    port: int,
    previous: Json,
    counts: tuple[Mapping[str, int], Mapping[str, int]],
    now: float,
) -> Json:
    """Return the node's status, and keep what others wrote.

    Extended resources without a plugin stay as they were patched. As in a real kubelet, an amount
    that was patched into allocatable only, and not into capacity, does not stay.
    """
    capacity_counts, allocatable_counts = counts
    own = {
        "cpu": settings.cpu,
        "ephemeral-storage": settings.ephemeral_storage,
        "hugepages-1Gi": "0",
        "hugepages-2Mi": "0",
        "memory": settings.memory,
        "pods": str(settings.max_pods),
    }
    capacity = {**(previous.get("capacity") or {}), **own, **_as_text(capacity_counts)}
    status = deep_copy(previous)
    status.update(
        capacity=capacity,
        allocatable={**capacity, **_as_text(allocatable_counts)},
        addresses=[
            {"type": "InternalIP", "address": settings.host},
            {"type": "Hostname", "address": name},
        ],
        daemonEndpoints={"kubeletEndpoint": {"Port": port}},
        nodeInfo=_node_info(name, settings),
        conditions=_conditions(previous, now),
    )
    return status


def _as_text(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: str(count) for name, count in counts.items()}


def _node_info(name: str, settings: NodeSettings) -> Json:
    return {
        "architecture": architecture(),
        "bootID": f"boot-{name}",
        "containerRuntimeVersion": "containerd://2.1.0-sim",
        "kernelVersion": platform.release(),
        "kubeProxyVersion": "",
        "kubeletVersion": settings.kubelet_version,
        "machineID": f"machine-{name}",
        "operatingSystem": "linux",
        "osImage": "Leasehold simulated node",
        "systemUUID": f"system-{name}",
    }


def _conditions(previous: Json, now: float) -> list[Json]:
    previous_by_type = {
        condition["type"]: condition for condition in previous.get("conditions") or ()
    }
    own = [
        {
            "type": kind,
            "status": status,
            "lastHeartbeatTime": rfc3339(now),
            "lastTransitionTime": previous_by_type[kind]["lastTransitionTime"]
            if previous_by_type.get(kind, {}).get("status") == status
            else rfc3339(now),
            "reason": reason,
            "message": message,
        }
        for kind, status, reason, message in _CONDITIONS
    ]
    own_types = {condition["type"] for condition in own}
    return own + [
        condition for kind, condition in previous_by_type.items() if kind not in own_types
    ]


def same_but_heartbeat(one: Json, other: Json) -> bool:
    """Return whether two statuses differ in the heartbeat times only."""
    return _without_heartbeats(one) == _without_heartbeats(other)


def _without_heartbeats(status: Json) -> Json:
    conditions = [
        {key: value for key, value in condition.items() if key != "lastHeartbeatTime"}
        for condition in status.get("conditions") or ()
    ]
    return status | {"conditions": conditions}


def lease_object(name: str, renewed: str) -> Json:
    """Return the Lease by which a kubelet reports that it is alive."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": LEASE_NAMESPACE},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": LEASE_S, "renewTime": renewed},
    }
