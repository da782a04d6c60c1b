"""DaemonSets: one pod on each node that fits; pure.

The pods are bound by their scheduler, as node affinity names their node.
https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/
"""

from collections.abc import Mapping

from simcluster.apimachinery.node_selection import node_selected, tolerates_node
from simcluster.apimachinery.objects import Json, Objects, at_path, metadata, name_of
from simcluster.apimachinery.pods import is_ready
from simcluster.controller_manager.plans import (
    FINISHED,
    WorkloadPlan,
    amount_of,
    is_available,
    is_deleted,
    new_pod,
    template_hash,
)

HASH = "controller-revision-hash"
_TOLERATED = (
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
)


def plan_daemon_set(daemon_set: Json, pods: Objects, nodes: Objects, now: float) -> WorkloadPlan:
    """WorkloadPlan for a DaemonSet, the pods that it owns, and all nodes."""
    revision = template_hash(daemon_set["spec"]["template"])
    chosen = {name_of(node) for node in nodes if _fits(daemon_set, node)}
    by_node: dict[str, Objects] = {}
    for pod in pods:
        by_node.setdefault(_node_of(pod), []).append(pod)
    plan = WorkloadPlan(status=_status(daemon_set, by_node, chosen, revision, now))
    if is_deleted(daemon_set):
        return plan
    present = {
        node: [pod for pod in own if at_path(pod, "status.phase") not in FINISHED]
        for node, own in by_node.items()
    }
    for node in sorted(chosen):
        if not present.get(node):
            plan.create.append(("pods", _pod(daemon_set, node, revision)))
    unwanted = [
        pod
        for pod in pods
        if _node_of(pod) not in chosen or at_path(pod, "status.phase") in FINISHED
    ]
    unwanted += [pod for own in present.values() for pod in own[1:]]
    unwanted += _outdated(daemon_set, present, revision, len(chosen))
    plan.delete = [("pods", pod) for pod in unwanted if not is_deleted(pod)]
    return plan


def _fits(daemon_set: Json, node: Json) -> bool:
    spec = daemon_set["spec"]["template"]["spec"]
    tolerations = [*(spec.get("tolerations") or ()), *_tolerations()]
    labels = metadata(node).get("labels") or {}
    return node_selected(spec, name_of(node), labels) and tolerates_node(tolerations, node)


def _tolerations() -> list[Json]:
    return [{"key": key, "operator": "Exists", "effect": effect} for key, effect in _TOLERATED]


def _node_of(pod: Json) -> str:
    """Return the node that a pod of a DaemonSet is made for."""
    terms = at_path(
        pod,
        "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        ".nodeSelectorTerms",
    )
    for term in terms or ():
        for each in term.get("matchFields") or ():
            if each.get("key") == "metadata.name":
                return str((each.get("values") or [""])[0])
    return str(at_path(pod, "spec.nodeName") or "")


def _pod(daemon_set: Json, node: str, revision: str) -> Json:
    pod = new_pod(daemon_set, "DaemonSet", "apps/v1")
    pod["metadata"].setdefault("labels", {})[HASH] = revision
    spec = pod["spec"]
    spec["tolerations"] = [*(spec.get("tolerations") or ()), *_tolerations()]
    name = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = spec.setdefault("affinity", {})
    affinity["nodeAffinity"] = {
        **(affinity.get("nodeAffinity") or {}),
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [name]},
    }
    return pod


def _is_updated(pod: Json, revision: str) -> bool:
    return (metadata(pod).get("labels") or {}).get(HASH) == revision


def _outdated(
    daemon_set: Json, present: Mapping[str, Objects], revision: str, nodes: int
) -> Objects:
    """Return the pods of an older template that may end now."""
    strategy = daemon_set["spec"]["updateStrategy"]
    if strategy["type"] != "RollingUpdate":
        return []
    allowed = amount_of(at_path(strategy, "rollingUpdate.maxUnavailable"), nodes, round_up=True)
    pods = [own[0] for own in present.values() if own]
    old = [pod for pod in pods if not _is_updated(pod, revision) and not is_deleted(pod)]
    missing = nodes - sum(is_ready(pod) and not is_deleted(pod) for pod in pods)
    broken = [pod for pod in old if not is_ready(pod)]
    working = [pod for pod in old if is_ready(pod)]
    return [*broken, *working[: max(allowed - missing, 0)]]


def _status(
    daemon_set: Json, by_node: Mapping[str, Objects], chosen: set[str], revision: str, now: float
) -> Json:
    min_ready_s = int(daemon_set["spec"].get("minReadySeconds") or 0)
    wanted = [own[0] for node, own in by_node.items() if node in chosen]
    ready = [pod for pod in wanted if is_ready(pod)]
    available = sum(is_available(pod, min_ready_s, now) for pod in ready)
    return {
        "observedGeneration": metadata(daemon_set).get("generation", 1),
        "desiredNumberScheduled": len(chosen),
        "currentNumberScheduled": len(wanted),
        "numberMisscheduled": sum(
            any(at_path(pod, "spec.nodeName") for pod in own)
            for node, own in by_node.items()
            if node not in chosen
        ),
        "numberReady": len(ready),
        "numberAvailable": available,
        "numberUnavailable": len(chosen) - available,
        "updatedNumberScheduled": sum(_is_updated(pod, revision) for pod in wanted),
    }
