"""The node of a pod without devices: the emptiest of those that fit; pure.

Node selectors, required node affinity, taints, volumes, cpu, memory and the number of pods decide.
All other fields of kube-scheduler's plugins are ignored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.model.quantity import parse_resources
from simcluster.apimachinery.node_selection import node_selected, tolerates_node
from simcluster.apimachinery.objects import (
    Json,
    Objects,
    at_path,
    labels_of,
    list_at,
    name_of,
)
from simcluster.apimachinery.pods import has_finished
from simcluster.scheduler.pod_claims import PodClaims


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """A node, or why there is none."""

    node: str = ""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class FittingNodes:
    """The nodes that fit, the best first, and how many others there are by why they do not."""

    nodes: tuple[str, ...]
    refusals: Counter[str]

    @property
    def choice(self) -> NodeChoice:
        """The best node, or why there is none."""
        if self.nodes:
            return NodeChoice(node=self.nodes[0])
        texts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refusals.items()))
        total = self.refusals.total()
        return NodeChoice(refusal=f"0/{total} nodes are available: {texts or 'there is none'}.")


def requested_resources(pod: Json) -> set[str]:
    """Return the names of the resources that containers request."""
    containers = list_at(pod, "spec.containers") + (list_at(pod, "spec.initContainers"))
    requests = (at_path(container, "resources.requests") or {} for container in containers)
    return {
        name
        for requested in requests
        for name, amount in parse_resources(requested).items()
        if amount
    }


def choose_node(pod: Json, nodes: Objects, pods: Iterable[Json], claims: PodClaims) -> NodeChoice:
    """Choose a node for a pod, given all nodes and pods, and the pod's claims."""
    return fitting_nodes(pod, nodes, pods, claims).choice


def fitting_nodes(
    pod: Json, nodes: Objects, pods: Iterable[Json], claims: PodClaims
) -> FittingNodes:
    """Return the nodes that fit a pod, given all nodes and pods, and the pod's claims."""
    used: dict[str, Counter[str]] = {name_of(node): Counter() for node in nodes}
    for other in pods:
        own = used.get(str(at_path(other, "spec.nodeName") or ""))
        if own is not None and not has_finished(other):
            own.update(_requests(other))
    wanted = _requests(pod)
    reasons: Counter[str] = Counter()
    fitting: list[tuple[int, str]] = []
    for node in nodes:
        reason = claims.refusal(node) or _refusal(pod, wanted, node, used[name_of(node)])
        if reason:
            reasons[reason] += 1
        else:
            fitting.append((used[name_of(node)]["pods"], name_of(node)))
    return FittingNodes(nodes=tuple(name for _, name in sorted(fitting)), refusals=reasons)


def _requests(pod: Json) -> Counter[str]:
    total = Counter({"pods": 1})
    for container in list_at(pod, "spec.containers"):
        total.update(parse_resources(at_path(container, "resources.requests") or {}))
    return total


def _refusal(pod: Json, wanted: Mapping[str, int], node: Json, used: Mapping[str, int]) -> str:
    spec = pod["spec"]
    labels = labels_of(node)
    if not node_selected(spec, name_of(node), labels):
        return "node(s) didn't match Pod's node affinity/selector"
    if not tolerates_node(spec.get("tolerations") or (), node):
        return "node(s) had untolerated taint(s)"
    allocatable = parse_resources(at_path(node, "status.allocatable") or {})
    for name in ("cpu", "memory", "pods"):
        if wanted[name] and used[name] + wanted[name] > allocatable.get(name, 0):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return ""
