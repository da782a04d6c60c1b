"""The general predicates: whether a node can run a pod that has its devices; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from simcluster.apimachinery.node_selection import node_selected
from simcluster.kubelet.containers.container_spec import PodSpec, pod_requests

_SELECTOR_TEXT = "node(s) didn't match Pod's node affinity/selector"
_PORTS_TEXT = "node(s) didn't have free ports for the requested pod ports"
_NATIVE = frozenset({"cpu", "memory", "ephemeral-storage"})


@dataclass(frozen=True, slots=True)
class PodRejection:
    """Why a pod is rejected: the reason in its status, and a message for its owner."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletNodeFacts:
    """The facts of a node that predicates use; cpu in thousandths, other resources in units."""

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    managed: frozenset[str]
    """Extended resources of device plugins: the device manager has checked them."""


def check_predicates(
    pod: PodSpec, others: Iterable[PodSpec], node: KubeletNodeFacts
) -> PodRejection | None:
    """Return why the node cannot run the pod beside the others; None if it can.

    Extended resources that the node does not list are ignored, as in a real kubelet: a pod on a
    node without the plugin starts without its devices.
    """
    other_pods = list(others)
    return check_resources(pod, other_pods, node) or _check_placement(pod, other_pods, node)


def check_resources(
    pod: PodSpec, others: list[PodSpec], node: KubeletNodeFacts
) -> PodRejection | None:
    """Return why the node lacks resources for the pod beside the others; None if it has them."""
    room_for = node.allocatable.get("pods", 0)
    if len(others) + 1 > room_for:
        return _out_of_resource("pods", 1, len(others), room_for)
    used: dict[str, int] = {}
    for other in others:
        for name, amount in pod_requests(other).items():
            used[name] = used.get(name, 0) + amount
    for name, amount in pod_requests(pod).items():
        counted = name in _NATIVE or (name in node.allocatable and name not in node.managed)
        if not amount or not counted:
            continue
        capacity = node.allocatable.get(name, 0)
        if used.get(name, 0) + amount > capacity:
            return _out_of_resource(name, amount, used.get(name, 0), capacity)
    return None


def _out_of_resource(name: str, requested: int, used: int, capacity: int) -> PodRejection:
    return PodRejection(
        f"OutOf{name}",
        f"Node didn't have enough resource: {name}, requested: {requested}, "
        f"used: {used}, capacity: {capacity}",
    )


def _check_placement(
    pod: PodSpec, others: list[PodSpec], node: KubeletNodeFacts
) -> PodRejection | None:
    spec = pod.obj["spec"]
    if spec.get("nodeName") not in (None, node.name):
        return PodRejection("NodeName", "Predicate NodeName failed: node(s) didn't match the name")
    if not node_selected(spec, node.name, node.labels):
        return PodRejection("NodeAffinity", f"Predicate NodeAffinity failed: {_SELECTOR_TEXT}")
    wanted = {port for container in pod.containers for port in container.host_ports}
    taken = {p for other in others for container in other.containers for p in container.host_ports}
    if wanted & taken:
        return PodRejection("NodePorts", f"Predicate NodePorts failed: {_PORTS_TEXT}")
    return None
