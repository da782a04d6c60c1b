"""DaemonSets: one pod on each node that fits; pure.

The pods are bound by their scheduler, as node affinity names their node.
https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/
"""

from collections import defaultdict
from collections.abc import Mapping

from simcluster.apimachinery.node_selection import node_selected, tolerates_node
from simcluster.apimachinery.objects import (
    Json,
    Objects,
    at_path,
    labels_of,
    metadata,
    name_of,
)
from simcluster.apimachinery.pods import has_finished, is_ready
from simcluster.controller_manager.plans import (
    WorkloadPlan,
    amount_of,
    is_active,
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
    """Plan for a DaemonSet, the pods that it owns, and all nodes."""
    revision = template_hash(daemon_set["spec"]["template"])
    chosen = {name_of(node) for node in nodes if _fits(daemon_set, node)}
    by_node: defaultdict[str, Objects] = defaultdict(list)
    for pod in pods:
        by_node[_node_of(pod)].append(pod)
    plan = WorkloadPlan(status=_status(daemon_set, by_node, chosen, revision, now))
    if is_deleted(daemon_set):
        return plan
    living: defaultdict[str, Objects] = defaultdict(list)
    for pod in pods:
        if not has_finished(pod):
            living[_node_of(pod)].append(pod)
    plan.create = [
        ("pods", _pod(daemon_set, node, revision)) for node in sorted(chosen - living.keys())
    ]
    plan.delete = [("pods", pod) for pod in _unwanted(pods, living, chosen)]
    plan.delete += [("pods", pod) for pod in _outdated(daemon_set, living, revision, len(chosen))]
    return plan


def _unwanted(pods: Objects, living: Mapping[str, Objects], chosen: set[str]) -> Objects:
    """Return pods that have finished, pods of other nodes, and all but one of each node."""
    ended = [pod for pod in pods if has_finished(pod) or _node_of(pod) not in chosen]
    return [*ended, *(pod for own in living.values() for pod in own[1:])]


def _fits(daemon_set: Json, node: Json) -> bool:
    spec = daemon_set["spec"]["template"]["spec"]
    tolerations = [*(spec.get("tolerations") or ()), *_tolerations()]
    labels = labels_of(node)
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
    return labels_of(pod).get(HASH) == revision


def _outdated(
    daemon_set: Json, living: Mapping[str, Objects], revision: str, nodes: int
) -> Objects:
    """Return the pods of an older template that may end now."""
    strategy = daemon_set["spec"]["updateStrategy"]
    if strategy["type"] != "RollingUpdate":
        return []
    allowed = amount_of(at_path(strategy, "rollingUpdate.maxUnavailable"), nodes, round_up=True)
    firsts = [own[0] for own in living.values()]
    working = [pod for pod in firsts if is_ready(pod) and is_active(pod)]
    old = [pod for pod in firsts if not _is_updated(pod, revision)]
    broken = [pod for pod in old if pod not in working]
    spare = max(allowed - (nodes - len(working)), 0)
    return [*broken, *[pod for pod in old if pod in working][:spare]]


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
