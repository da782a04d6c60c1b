"""In-place resizes: containers get the cpu and memory of a changed spec if they fit; pure.

A container is never restarted for it, whatever its `resizePolicy`.
https://kubernetes.io/docs/tasks/configure-pod-container/resize-container-resources/
"""

from collections.abc import Iterable

from simcluster.kubelet.containers.container_spec import PodSpec, pod_requests
from simcluster.kubelet.containers.container_state import PodState
from simcluster.kubelet.pods.predicates import KubeletNodeFacts, check_resources


def allocate_first(pod: PodSpec, state: PodState) -> None:
    """Give the containers of an admitted pod their resources, unless they have some."""
    for container in pod.containers:
        own = state.containers[container.name]
        own.resources = own.resources or container.resources


def needs_resize(pod: PodSpec, state: PodState) -> bool:
    """Return whether the spec has other resources than the containers have."""
    return any(
        state.containers[container.name].resources != container.resources
        for container in pod.containers
    )


def resize(
    pod: PodSpec, state: PodState, others: Iterable[PodSpec], node: KubeletNodeFacts
) -> None:
    """Give the containers the resources of the spec, or record why they have to wait."""
    state.waiting_resize = _infeasible(pod, node)
    if state.waiting_resize is None:
        rejection = check_resources(pod, list(others), node)
        if rejection is not None:
            state.waiting_resize = ("Deferred", rejection.message)
            return
        for container in pod.containers:
            state.containers[container.name].resources = container.resources


def _infeasible(pod: PodSpec, node: KubeletNodeFacts) -> tuple[str, str] | None:
    """Return a reason and a message if the node is too small for the pod alone."""
    requests = pod_requests(pod)
    for name in ("cpu", "memory"):
        capacity = node.allocatable.get(name, 0)
        if requests.get(name, 0) > capacity:
            text = f"{name}, requested: {requests[name]}, capacity: {capacity}"
            return "Infeasible", f"Node didn't have enough capacity: {text}"
    return None
