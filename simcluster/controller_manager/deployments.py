"""Deployments: a ReplicaSet per version of the pod template, and rolling updates; pure.

https://kubernetes.io/docs/concepts/workloads/controllers/deployment/
"""

from simcluster.apimachinery.objects import (
    Json,
    Objects,
    annotations_of,
    at_path,
    deep_copy,
    labels_of,
    list_at,
    metadata,
    name_of,
    namespace_of,
    number_at,
    rfc3339,
)
from simcluster.controller_manager.deployment_progress import deadline_in_s, with_progress
from simcluster.controller_manager.plans import (
    WorkloadPlan,
    amount_of,
    condition_of,
    is_deleted,
    owner_reference,
    template_hash,
    with_condition,
)

HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def plan_deployment(
    deployment: Json, replica_sets: Objects, pods: Objects, now: float
) -> WorkloadPlan:
    """Plan for a Deployment, the ReplicaSets that it owns, and the pods of these."""
    current = _current(deployment, replica_sets)
    old = [replica_set for replica_set in replica_sets if replica_set is not current]
    plan = WorkloadPlan(status=_status(deployment, current, old, now))
    plan.again_in_s = deadline_in_s(deployment, plan.status["conditions"], now)
    if is_deleted(deployment) or deployment["spec"].get("paused"):
        return plan
    newest = max(map(_revision, old), default=0)
    if current is None:
        new = _new_replica_set(deployment, newest + 1)
        new["spec"]["replicas"] = _room_for_new(deployment, 0, old, pods)
        plan.create.append(("replicasets", new))
        return plan
    revision = max(_revision(current), newest + 1)
    if _revision(deployment) != revision:
        plan.annotations = {REVISION: str(revision)}
    if changed := _annotated(current, _annotations(deployment, revision)):
        plan.update.append(("replicasets", changed))
    else:
        step = _recreate if deployment["spec"]["strategy"]["type"] == "Recreate" else _roll
        step(plan, deployment, current, old, pods)
        plan.delete = [("replicasets", name) for name in _forgotten(deployment, old)]
    return plan


def _forgotten(deployment: Json, old: Objects) -> Objects:
    """Return the unused ReplicaSets beyond those that are kept for a rollback, oldest first."""
    unused = [
        replica_set
        for replica_set in old
        if not (_replicas(replica_set) or number_at(replica_set, "status.replicas"))
    ]
    surplus = len(unused) - deployment["spec"]["revisionHistoryLimit"]
    return sorted(unused, key=_revision)[: max(surplus, 0)]


def _current(deployment: Json, replica_sets: Objects) -> Json | None:
    wanted = template_hash(deployment["spec"]["template"])
    hashes = (labels_of(replica_set).get(HASH) for replica_set in replica_sets)
    matching = (
        replica_set for replica_set, own in zip(replica_sets, hashes, strict=True) if own == wanted
    )
    return next(matching, None)


def _new_replica_set(deployment: Json, revision: int) -> Json:
    template = deep_copy(deployment["spec"]["template"])
    name = template_hash(template)
    labels = {**(at_path(template, "metadata.labels") or {}), HASH: name}
    template["metadata"] = {**(template.get("metadata") or {}), "labels": labels}
    selector = deep_copy(deployment["spec"]["selector"])
    selector["matchLabels"] = {**(selector.get("matchLabels") or {}), HASH: name}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{name_of(deployment)}-{name}",
            "namespace": namespace_of(deployment),
            "labels": labels,
            "annotations": _annotations(deployment, revision),
            "ownerReferences": [owner_reference(deployment, "Deployment", "apps/v1")],
        },
        "spec": {
            "selector": selector,
            "template": template,
            "minReadySeconds": deployment["spec"].get("minReadySeconds") or 0,
        },
    }


def _revision(workload: Json) -> int:
    return int(annotations_of(workload).get(REVISION) or 0)


def _annotations(deployment: Json, revision: int) -> Json:
    """Return the annotations of the ReplicaSet of a revision: those of the Deployment, mostly."""
    kept = {k: v for k, v in annotations_of(deployment).items() if k != _LAST_APPLIED}
    return {**kept, REVISION: str(revision)}


def _annotated(replica_set: Json, annotations: Json) -> Json | None:
    """Return a ReplicaSet with these annotations, too; None if it has them."""
    if annotations.items() <= annotations_of(replica_set).items():
        return None
    changed = deep_copy(replica_set)
    changed["metadata"].setdefault("annotations", {}).update(annotations)
    return changed


def _scaled(replica_set: Json, replicas: int) -> tuple[str, Json]:
    changed = deep_copy(replica_set)
    changed["spec"]["replicas"] = replicas
    return "replicasets", changed


def _replicas(replica_set: Json) -> int:
    return number_at(replica_set, "spec.replicas")


def _available(replica_set: Json) -> int:
    return number_at(replica_set, "status.availableReplicas")


def _limits(deployment: Json) -> tuple[int, int]:
    """Return how many pods may be too many, and how many unavailable."""
    rolling = deployment["spec"]["strategy"].get("rollingUpdate") or {}
    replicas = deployment["spec"]["replicas"]
    surge = amount_of(rolling.get("maxSurge"), replicas, round_up=True)
    unavailable = amount_of(rolling.get("maxUnavailable"), replicas, round_up=False)
    return surge, max(unavailable, 0 if surge else 1)


def _room_for_new(deployment: Json, present: int, old: Objects, pods: Objects) -> int:
    """Return the replicas that the ReplicaSet of the present template may have now."""
    replicas: int = deployment["spec"]["replicas"]
    if deployment["spec"]["strategy"]["type"] == "Recreate":
        return 0 if _pods_of(old, pods) else replicas
    allowed = replicas + _limits(deployment)[0] - sum(map(_replicas, old))
    return max(min(replicas, allowed), min(present, replicas))


def _pods_of(replica_sets: Objects, pods: Objects) -> bool:
    """Return whether ReplicaSets have pods that have not finished."""
    hashes = {labels_of(replica_set).get(HASH) for replica_set in replica_sets}
    return any(labels_of(pod).get(HASH) in hashes for pod in pods)


def _recreate(
    plan: WorkloadPlan, deployment: Json, current: Json, old: Objects, pods: Objects
) -> None:
    plan.update += [_scaled(replica_set, 0) for replica_set in old if _replicas(replica_set)]
    wanted = _room_for_new(deployment, _replicas(current), old, pods)
    if not plan.update and _replicas(current) != wanted:
        plan.update.append(_scaled(current, wanted))


def _roll(plan: WorkloadPlan, deployment: Json, current: Json, old: Objects, pods: Objects) -> None:
    wanted = _room_for_new(deployment, _replicas(current), old, pods)
    if _replicas(current) != wanted:
        plan.update.append(_scaled(current, wanted))
        return
    _, max_unavailable = _limits(deployment)
    must_stay = deployment["spec"]["replicas"] - max_unavailable
    total = _replicas(current) + sum(map(_replicas, old))
    starting = _replicas(current) - _available(current)
    spare = total - must_stay - starting
    # Pods that are not available end first: they are no loss.
    for replica_set in sorted(old, key=_revision):
        broken = min(_replicas(replica_set) - _available(replica_set), spare)
        if broken > 0:
            plan.update.append(_scaled(replica_set, _replicas(replica_set) - broken))
            spare -= broken
    if plan.update:
        return
    spare = min(spare, _available(current) + sum(map(_available, old)) - must_stay)
    for replica_set in sorted(old, key=_revision):
        ended = min(_replicas(replica_set), spare)
        if ended > 0:
            plan.update.append(_scaled(replica_set, _replicas(replica_set) - ended))
            spare -= ended


def _status(deployment: Json, current: Json | None, old: Objects, now: float) -> Json:
    spec = deployment["spec"]
    every = [*old, *([current] if current else [])]

    def total(field: str, replica_sets: Objects) -> int:
        return sum(number_at(replica_set, f"status.{field}") for replica_set in replica_sets)

    replicas = total("replicas", every)
    available = total("availableReplicas", every)
    updated = total("replicas", [current] if current else [])
    conditions = list_at(deployment, "status.conditions")
    enough = available >= spec["replicas"] - _limits(deployment)[1]
    conditions = with_condition(
        conditions,
        rfc3339(now),
        condition_of(
            "Available",
            "True" if enough else "False",
            "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable",
            f"Deployment {'has' if enough else 'does not have'} minimum availability.",
        ),
    )
    counts = {
        "replicas": replicas,
        "updatedReplicas": updated,
        "readyReplicas": total("readyReplicas", every),
        "availableReplicas": available,
    }
    return {
        **counts,
        "observedGeneration": metadata(deployment).get("generation", 1),
        "unavailableReplicas": max(spec["replicas"] - available, 0),
        "conditions": with_progress(deployment, conditions, current, counts, now),
    }
