"""StatefulSets: pods with a number each, created and updated in order; pure.

https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/
"""

from collections.abc import Iterator, Mapping

from simcluster.apimachinery.objects import (
    Json,
    Objects,
    at_path,
    deep_copy,
    labels_of,
    metadata,
    name_of,
    namespace_of,
    number_at,
)
from simcluster.apimachinery.pods import has_finished, is_ready
from simcluster.controller_manager.plans import (
    WorkloadPlan,
    is_available,
    is_deleted,
    new_pod,
    template_hash,
)

HASH = "controller-revision-hash"


def plan_stateful_set(
    stateful_set: Json, pods: Objects, claims: Objects, now: float
) -> WorkloadPlan:
    """Plan for a StatefulSet, the pods that it owns, and the claims of its namespace."""
    revision = _revision(stateful_set)
    plan = WorkloadPlan(status=_status(stateful_set, pods, revision, now))
    if is_deleted(stateful_set):
        return plan
    finished = [pod for pod in pods if has_finished(pod)]
    if finished:
        plan.delete = [("pods", pod) for pod in finished]
        return plan
    by_name = {name_of(pod): pod for pod in pods}
    wanted = [f"{name_of(stateful_set)}-{at}" for at in range(stateful_set["spec"]["replicas"])]
    is_complete = _create_pods(plan, stateful_set, by_name, wanted, claims)
    if is_complete:
        plan.delete = [("pods", pod) for pod in _ending(stateful_set, by_name, wanted, revision)]
    return plan


def _is_ordered(stateful_set: Json) -> bool:
    return bool(stateful_set["spec"]["podManagementPolicy"] == "OrderedReady")


def _create_pods(
    plan: WorkloadPlan,
    stateful_set: Json,
    pods: Mapping[str, Json],
    names: list[str],
    claims: Objects,
) -> bool:
    """Create the pods that may be created now; return whether all exist, and work if ordered."""
    claim_names = {name_of(claim) for claim in claims}
    ordered = _is_ordered(stateful_set)
    for at, name in enumerate(names):
        pod = pods.get(name)
        if pod is None:
            new = [
                claim for claim in _claims(stateful_set, name) if name_of(claim) not in claim_names
            ]
            plan.create += [("persistentvolumeclaims", claim) for claim in new]
            plan.create.append(("pods", _pod(stateful_set, name, at)))
        if ordered and not _works(pod):
            return False
    return not plan.create


def _works(pod: Json | None) -> bool:
    return pod is not None and is_ready(pod) and not is_deleted(pod)


def _ending(
    stateful_set: Json, pods: Mapping[str, Json], names: list[str], revision: str
) -> Objects:
    """Return the pods that end next: those with higher numbers first, then outdated ones."""
    extra = sorted(
        (pod for name, pod in pods.items() if name not in names), key=_ordinal, reverse=True
    )
    if extra:
        return extra[:1] if _is_ordered(stateful_set) else extra
    return _next_outdated(stateful_set, pods, names, revision)


def _revision(stateful_set: Json) -> str:
    return f"{name_of(stateful_set)}-{template_hash(stateful_set['spec']['template'])}"


def _ordinal(pod: Json) -> int:
    return int(name_of(pod).rpartition("-")[2])


def _next_outdated(
    stateful_set: Json, pods: Mapping[str, Json], names: list[str], revision: str
) -> Objects:
    """Return the next pod that is replaced by one of the new template: the highest number first."""
    strategy = stateful_set["spec"]["updateStrategy"]
    if strategy["type"] != "RollingUpdate":
        return []
    partition = number_at(strategy, "rollingUpdate.partition")
    for name in reversed(names[partition:]):
        pod = pods[name]
        if labels_of(pod).get(HASH) != revision:
            return [pod]
        if not is_ready(pod):
            return []
    return []


def _pod(stateful_set: Json, name: str, at: int) -> Json:
    pod = new_pod(stateful_set, "StatefulSet", "apps/v1", name=name)
    labels = pod["metadata"].setdefault("labels", {})
    labels |= {
        "apps.kubernetes.io/pod-index": str(at),
        HASH: _revision(stateful_set),
        "statefulset.kubernetes.io/pod-name": name,
    }
    pod["spec"]["hostname"] = name
    if stateful_set["spec"].get("serviceName"):
        pod["spec"]["subdomain"] = stateful_set["spec"]["serviceName"]
    templates = stateful_set["spec"].get("volumeClaimTemplates") or ()
    if templates:
        own = {name_of(template) for template in templates}
        volumes = [v for v in pod["spec"].get("volumes") or () if v["name"] not in own]
        pod["spec"]["volumes"] = volumes + [
            {
                "name": name_of(template),
                "persistentVolumeClaim": {"claimName": f"{name_of(template)}-{name}"},
            }
            for template in templates
        ]
    return pod


def _claims(stateful_set: Json, pod: str) -> Iterator[Json]:
    labels = at_path(stateful_set, "spec.selector.matchLabels") or {}
    for template in stateful_set["spec"].get("volumeClaimTemplates") or ():
        claim = deep_copy(template)
        own = metadata(claim)
        claim["metadata"] = {
            **own,
            "name": f"{name_of(template)}-{pod}",
            "namespace": namespace_of(stateful_set),
            "labels": {**(own.get("labels") or {}), **labels},
        }
        yield claim


def _status(stateful_set: Json, pods: Objects, revision: str, now: float) -> Json:
    min_ready_s = int(stateful_set["spec"].get("minReadySeconds") or 0)
    present = [pod for pod in pods if not is_deleted(pod)]
    ready = [pod for pod in present if is_ready(pod)]
    updated = [pod for pod in present if labels_of(pod).get(HASH) == revision]
    replicas = stateful_set["spec"]["replicas"]
    done = len(updated) == len(ready) == len(pods) == replicas
    before = at_path(stateful_set, "status.currentRevision")
    current = revision if done or not before else before
    return {
        "observedGeneration": metadata(stateful_set).get("generation", 1),
        "replicas": len(pods),
        "readyReplicas": len(ready),
        "availableReplicas": sum(is_available(pod, min_ready_s, now) for pod in ready),
        "currentReplicas": len(updated) if current == revision else len(present) - len(updated),
        "updatedReplicas": len(updated),
        "currentRevision": current,
        "updateRevision": revision,
        "collisionCount": 0,
    }
