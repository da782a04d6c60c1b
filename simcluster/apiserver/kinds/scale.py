"""The subresource `scale` of workloads; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/ (operations on scale)
"""

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, deep_copy

_COPIED = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def scale_of(workload: Json) -> Json:
    """Return the Scale of a workload."""
    labels = at_path(workload, "spec.selector.matchLabels") or {}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: workload["metadata"][key] for key in _COPIED},
        "spec": {"replicas": at_path(workload, "spec.replicas") or 0},
        "status": {
            "replicas": at_path(workload, "status.replicas") or 0,
            "selector": ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        },
    }


def with_scale(workload: Json, scale: Json) -> Json:
    """Return the workload with the replicas of a Scale; 400 if it has none."""
    replicas = at_path(scale, "spec.replicas")
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise ApiError.bad_request(f"spec.replicas of a Scale must be a number, got {replicas!r}")
    changed = deep_copy(workload)
    changed["spec"]["replicas"] = replicas
    version = at_path(scale, "metadata.resourceVersion")
    if version:
        changed["metadata"]["resourceVersion"] = version
    else:
        del changed["metadata"]["resourceVersion"]
    return changed
