"""ReplicaSets: as many pods as they have replicas; pure.

Pods that match the selector but have no owner are not adopted.
https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/
"""

from itertools import repeat

from simcluster.apimachinery.objects import Json, Objects, metadata, number_at
from simcluster.apimachinery.pods import is_ready
from simcluster.controller_manager.plans import (
    BURST,
    WorkloadPlan,
    deleted_first,
    is_active,
    is_available,
    is_deleted,
    new_pod,
    ready_for_s,
)


def plan_replica_set(replica_set: Json, pods: Objects, now: float) -> WorkloadPlan:
    """Plan for a ReplicaSet and the pods that it owns."""
    active = [pod for pod in pods if is_active(pod)]
    min_ready_s = number_at(replica_set, "spec.minReadySeconds")
    ready = [pod for pod in active if is_ready(pod)]
    available = [pod for pod in ready if is_available(pod, min_ready_s, now)]
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active),
        "readyReplicas": len(ready),
        "availableReplicas": len(available),
        "observedGeneration": metadata(replica_set).get("generation", 1),
    }
    plan = WorkloadPlan(status=status)
    waiting = [pod for pod in ready if pod not in available]
    if waiting:
        plan.again_in_s = 1 + min_ready_s - max(map(ready_for_s, waiting, repeat(now)))
    if is_deleted(replica_set):
        return plan
    missing = replica_set["spec"]["replicas"] - len(active)
    pod = new_pod(replica_set, "ReplicaSet", "apps/v1")
    plan.create = [("pods", pod)] * min(missing, BURST)
    surplus = min(max(-missing, 0), BURST)
    plan.delete = [("pods", pod) for pod in deleted_first(active, surplus)]
    return plan
