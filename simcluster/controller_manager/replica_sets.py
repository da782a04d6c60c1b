"""ReplicaSets: as many pods as they have replicas; pure.

Pods that match the selector but have no owner are not adopted.
https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/
"""

from simcluster.apimachinery.objects import Json, Objects, at_path, metadata
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
    """WorkloadPlan for a ReplicaSet and the pods that it owns."""
    spec = replica_set["spec"]
    active = [pod for pod in pods if is_active(pod)]
    min_ready_s = int(spec.get("minReadySeconds") or 0)
    ready = [pod for pod in active if is_ready(pod)]
    available = [pod for pod in ready if is_available(pod, min_ready_s, now)]
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active),
        "readyReplicas": len(ready),
        "availableReplicas": len(available),
        "observedGeneration": metadata(replica_set).get("generation", 1),
    }
    conditions = at_path(replica_set, "status.conditions")
    plan = WorkloadPlan(status={**status, **({"conditions": conditions} if conditions else {})})
    missing = spec["replicas"] - len(active)
    if not is_deleted(replica_set):
        for _ in range(min(missing, BURST)):
            plan.create.append(("pods", new_pod(replica_set, "ReplicaSet", "apps/v1")))
        plan.delete = [("pods", pod) for pod in deleted_first(active, min(max(-missing, 0), BURST))]
    if min_ready_s and len(available) < len(ready):
        plan.again_in_s = min(min_ready_s - ready_for_s(pod, now) for pod in ready) + 1
    return plan
