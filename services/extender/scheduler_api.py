"""Bodies of kube-scheduler's requests to extenders, and of the replies; pure.

Go fields. kube-scheduler reads no body with another status than 200.
https://github.com/kubernetes/kube-scheduler/blob/master/extender/v1/types.go: the keys are names of
"""

import msgspec

from shared.kubernetes.types import ApiPod
from shared.model.names import NodeName, PodUid


class ExtenderArgs(msgspec.Struct, rename="pascal", frozen=True):
    """A pod, and the nodes that kube-scheduler's own filters left."""

    pod: ApiPod
    node_names: tuple[NodeName, ...] | None = None
    """None if the extender is configured without `nodeCacheCapable`."""


class ExtenderBindingArgs(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="PodName")
    namespace: str = msgspec.field(name="PodNamespace")
    uid: PodUid = msgspec.field(name="PodUID")
    node: NodeName = msgspec.field(name="Node")


class ExtenderFilterResult(msgspec.Struct, rename="pascal", frozen=True, kw_only=True):
    node_names: list[NodeName] = []
    failed_and_unresolvable_nodes: dict[NodeName, str] = {}
    """Why the others do not fit. kube-scheduler, which counts no leases, preempts nothing there."""
    error: str = ""
    """Why there is no verdict; the pod is tried again after a pause."""


class HostPriority(msgspec.Struct, rename="pascal", frozen=True):
    """The score is 0 to 10."""

    host: NodeName
    score: int


class ExtenderBindingResult(msgspec.Struct, rename="pascal", frozen=True):
    error: str = ""
    """Why the pod is not bound; it is tried again after a pause, perhaps on another node."""
