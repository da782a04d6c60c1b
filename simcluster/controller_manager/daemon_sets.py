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
    pods = sorted(pods, key=lambda pod: str(metadata(pod).get("creationTimestamp")))
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
    surge = _surge(daemon_set, len(chosen))
    plan.delete = [("pods", pod) for pod in _unwanted(pods, living, chosen, revision, surge)]
    if surge:
        beside, replaced = _surge_on(daemon_set, living, revision, surge=surge, now=now)
        plan.create += [("pods", _pod(daemon_set, node, revision)) for node in beside]
        plan.delete += [("pods", pod) for pod in replaced]
    else:
        outdated = _outdated(daemon_set, living, revision, len(chosen))
        plan.delete += [("pods", pod) for pod in outdated]
    return plan


def _surge(daemon_set: Json, nodes: int) -> int:
    """Return on how many nodes a new pod may start before the old one has ended."""
    strategy = daemon_set["spec"]["updateStrategy"]
    if strategy["type"] != "RollingUpdate":
        return 0
    return amount_of(at_path(strategy, "rollingUpdate.maxSurge"), nodes, round_up=True)


def _surge_on(
    daemon_set: Json, living: Mapping[str, Objects], revision: str, *, surge: int, now: float
) -> tuple[list[str], Objects]:
    """Return the nodes on which a new pod starts beside the old one, and old pods that may end.

    An old pod ends once its successor is available. One that is not available itself is replaced
    at once.
    """
    min_ready_s = int(daemon_set["spec"].get("minReadySeconds") or 0)
    at_once: list[str] = []
    candidates: list[str] = []
    replaced: Objects = []
    surging = 0
    for node, own in sorted(living.items()):
        new = next((pod for pod in own if _is_updated(pod, revision)), None)
        old = next((pod for pod in own if not _is_updated(pod, revision)), None)
        if old is None:
            continue
        if new is None:
            is_working = is_active(old) and is_available(old, min_ready_s, now)
            (candidates if is_working else at_once).append(node)
        elif is_available(new, min_ready_s, now):
            replaced.append(old)
        else:
            surging += 1
    return [*at_once, *candidates[: max(surge - surging, 0)]], replaced


def _unwanted(
    pods: Objects,
    living: Mapping[str, Objects],
    chosen: set[str],
    revision: str,
    surge: int,
) -> Objects:
    """Return pods that have finished, pods of other nodes, and all but one of each node.

    During a surge, one pod of the present template and one of an older one stay.
    """
    ended = [pod for pod in pods if has_finished(pod) or _node_of(pod) not in chosen]
    surplus: Objects = []
    for own in living.values():
        new = [pod for pod in own if _is_updated(pod, revision)]
        old = [pod for pod in own if not _is_updated(pod, revision)]
        surplus += [*new[1:], *old[1:]] if surge else own[1:]
    return [*ended, *surplus]


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
        for requirement in term.get("matchFields") or ():
            if requirement.get("key") == "metadata.name":
                return str((requirement.get("values") or [""])[0])
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
