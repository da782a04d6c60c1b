"""Identifiers, each with its own type; pure."""

from typing import NewType

from shared.model.bounds import (
    NameText,
    ShortText,
    UuidText,
)

PodUid = NewType("PodUid", NameText)
NodeName = NewType("NodeName", NameText)
Namespace = NewType("Namespace", ShortText)
DeviceUuid = NewType("DeviceUuid", UuidText)
"""NVML's UUID of a physical GPU, `GPU-…`: the key of a device, since indices may change."""

SYSTEM_NAMESPACE = "leasehold-system"
"""Of all services but the node agents, in the manifests."""
AGENTS_NAMESPACE = "leasehold-agents"
GPU_LABEL = "leasehold.dev/gpu"
"""With the value `true` a node gets a node agent, with `false` none."""
DISCOVERED_LABELS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
"""With the value `true` too, unless it has `GPU_LABEL`: labels of GPU and node feature
discovery."""
REQUIRED_SERVICES = ("watcher", "placer", "binder")
OWN_SCHEDULER = "leasehold"
DEFAULT_SCHEDULER = "default-scheduler"
HANDED_OVER = "leasehold.dev/handed-over"
"""A label of pods that admission gave to kube-scheduler; its value says why."""
PREEMPTIBLE = "leasehold.dev/preemptible"
"""With `"false"` the pod is never evicted for another."""
BUDGET_GATE = "leasehold.dev/budget"
"""Scheduling gate of new pods in a namespace whose exhausted budget queues them."""
ISOLATION = "leasehold.dev/isolation"
"""By the author of a pod or an administrator of its namespace: what has to hold its shares, as in
`shared.dialects.isolation_words`; or `strict`, and it gets only MIG instances and whole devices."""
MAX_RUN_TIME = "leasehold.dev/max-run-time"
EXPECTED_RUN_TIME = "leasehold.dev/expected-run-time"
"""By a pod's author: durations such as `90m` or `2h30m`. Admission writes the former into
`spec.activeDeadlineSeconds`, which the kubelet enforces."""
ENDS_AT = "LEASEHOLD_ENDS_AT"
ENDS_AT_ANNOTATION = "leasehold.dev/ends-at"
"""Variable of a container, and annotation that the Binding writes, if the pod has a maximum run
time: when the kubelet ends it, not before. See `shared.model.leases.lease.end_text`."""

OFFER = "leasehold.dev/offer"
"""Annotation of a waiting pod of kube-scheduler, as `NODE@NUMBER`: something was freed for it, on
this node if one is named. Its change makes kube-scheduler try the pod again."""


def offered_node(annotation: str) -> NodeName:
    return NodeName(annotation.rpartition("@")[0])


def name_in(reader: Namespace, namespace: Namespace, name: str) -> str:
    """Return how Events in a namespace name a pod: without names of other namespaces."""
    return f"{namespace}/{name}" if namespace == reader else "a pod of another namespace"
