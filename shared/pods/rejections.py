"""Pods that the kubelet of their node has rejected: why, and what to try; pure."""

from shared.kubernetes.types import PodStatus
from shared.model.bounds import cut

OUT_OF = "OutOf"
"""Kubelets reject a pod with this and the resource of which the node has too little."""

AGENT_REFUSES = "Leasehold refuses"
"""The node's agent refused the devices; the kubelet quotes its error."""


def rejection_of(status: PodStatus) -> str:
    """Return `REASON: MESSAGE` of the kubelet; empty: it did not reject the pod.

    Of a pod that it has accepted, a kubelet reports the status of each container.
    """
    if status.phase != "Failed" or not status.reason or status.container_statuses:
        return ""
    return cut(f"{status.reason}: {status.message}")


def causes(rejection: str) -> str:
    """Return what to know about a rejection besides its text."""
    reason = rejection.partition(":")[0]
    if not reason.startswith(OUT_OF):
        return "its lease has ended; a controller creates another pod, a bare pod is lost"
    return (
        "its lease has ended; a controller creates another pod, a bare pod is lost. Another "
        "scheduler has bound a pod to the node at the same time, which took its last "
        f"{reason.removeprefix(OUT_OF)}: neither scheduler sees the other's choice before it is "
        "bound"
    )


def advice(rejection: str, node: str) -> str:
    """Return what to try next."""
    if rejection.startswith(OUT_OF):
        return (
            "if it happens often, have one scheduler place the pods of these nodes: "
            "docs/troubleshooting.md"
        )
    return f"kubectl describe node {node}"
