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
"""NVML's `GPU-…`: the key of a device, since indices may change."""

SYSTEM_NAMESPACE = "leasehold-system"
AGENTS_NAMESPACE = "leasehold-agents"
GPU_LABEL = "leasehold.dev/gpu"
"""With the value `true` a node gets a node agent, with `false` none."""
DISCOVERED_LABELS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
"""Of GPU and node feature discovery: `true` counts on a node without `GPU_LABEL`."""
REQUIRED_SERVICES = ("watcher", "placer", "binder")
OWN_SCHEDULER = "leasehold"
DEFAULT_SCHEDULER = "default-scheduler"
HANDED_OVER = "leasehold.dev/handed-over"
"""Of pods that admission gave to kube-scheduler; its value is the reason."""
PREEMPTIBLE = "leasehold.dev/preemptible"
"""With `"false"` the pod is never evicted for another."""
BUDGET_GATE = "leasehold.dev/budget"
"""Scheduling gate of new pods in a namespace whose exhausted budget queues them."""
ISOLATION = "leasehold.dev/isolation"
"""What has to hold a pod's shares: `shared.dialects.isolation_words`, or `strict`."""
MAX_RUN_TIME = "leasehold.dev/max-run-time"
EXPECTED_RUN_TIME = "leasehold.dev/expected-run-time"
"""Durations such as `90m`. Admission writes the former into `spec.activeDeadlineSeconds`."""
ENDS_AT = "LEASEHOLD_ENDS_AT"
ENDS_AT_ANNOTATION = "leasehold.dev/ends-at"
"""Variable, and annotation that the Binding writes: before this time the kubelet does not end the
pod."""

OFFER = "leasehold.dev/offer"
"""`NODE@NUMBER`: capacity was freed, on any node without NODE. A change makes kube-scheduler try
the pod again."""


def offered_node(annotation: str) -> NodeName:
    return NodeName(annotation.rpartition("@")[0])


def name_in(reader: Namespace, namespace: Namespace, name: str) -> str:
    """Return a pod's name for Events in a namespace, without names of other namespaces."""
    return f"{namespace}/{name}" if namespace == reader else "a pod of another namespace"
