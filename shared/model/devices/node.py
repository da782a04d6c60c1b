"""Nodes: labels, taints and resources that decide whether a pod may run there; pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from shared.model.bounds import (
    MOST_DEVICES,
    MOST_ENTRIES,
    Amounts,
    Index,
    KeyText,
    Labels,
    LongText,
    NameText,
    Revision,
    ShortText,
    SignedAmount,
)
from shared.model.names import Namespace, NodeName, PodUid

HOSTNAME = "kubernetes.io/hostname"
AGENT_ANNOTATION = "leasehold.dev/agent"
"""Other device annotations of the node are derived."""
DEVICE_CORDON_PREFIX = "cordon.leasehold.dev/gpu-"
"""Of node annotations that close the device of an index; the value is the reason."""
CORDONED = "cordoned"
CORDON_MANAGER = "leasehold:"
"""Of the field manager of `leasehold cordon`; the user's name follows."""
OWN_ENTRIES_PREFIX = "leasehold.dev/own-"
"""Of node annotations that record our entries in a list that other programs also write."""
OWN_LABELS = f"{OWN_ENTRIES_PREFIX}labels"
SHARING_CONDITION = "leasehold.dev/GpuSharing"

NOT_LISTED_CODE = "NotListed"
REPLACED_CODE = "Replaced"
CORDON_PREFIX = "leasehold.dev/cordoned: "
"""Replaces the resources that a cordoned node serves; the reason follows."""

AGENT_STARTING = "leasehold.dev/starting"
"""Replaces them until the node's agent knows its kubelet."""
AGENT_STOPPING = "leasehold.dev/stopping"


def cordon_reason(served: Iterable[str]) -> str:
    """Return why a node with these served resources is cordoned, or ""."""
    return next(
        (name.removeprefix(CORDON_PREFIX) for name in served if name.startswith(CORDON_PREFIX)), ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    key: KeyText
    effect: ShortText
    value: ShortText = ""


@dataclass(frozen=True, slots=True, order=True)
class NodeRevision:
    """How recent a node's state is, by resource versions of the API server; 0 if unknown.

    Resource versions of one kind of object compare as integers (KEP-5504). No clock takes part.
    """

    node: Revision = 0
    pods: Revision = 0


UNKNOWN_REVISION = NodeRevision()


LABEL_OPERATORS: Mapping[str, Callable[[str | None, Collection[str]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
}


@dataclass(frozen=True, slots=True, order=True)
class LabelRequirement:
    key: KeyText
    operator: ShortText
    values: tuple[ShortText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AntiAffinityTerm:
    """Required anti-affinity of a running pod: its topology domain repels these pods.

    kube-scheduler obeys it for every pod that it places:
    https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#inter-pod-affinity-and-anti-affinity
    """

    topology_key: KeyText
    selector: tuple[LabelRequirement, ...] = ()
    """All must hold; an empty one selects every pod."""
    namespaces: tuple[Namespace, ...] = ()
    """Sorted; without effect with `all_namespaces`."""
    all_namespaces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node of the API server, and what pods without a lease take of it."""

    name: NodeName
    labels: Labels = field(default_factory=dict)
    taints: Annotated[tuple[Taint, ...], Meta(max_length=MOST_ENTRIES)] = ()
    unschedulable: bool = False
    cordoned_by: NameText = ""
    """The user, if the API server has recorded more than the use of kubectl."""
    allocatable: Amounts = field(default_factory=dict)
    used_by_others: Annotated[Mapping[KeyText, SignedAmount], Meta(max_length=2 * MOST_ENTRIES)] = (
        field(default_factory=dict)
    )
    """Sum over live pods without a lease, `pods` included."""
    excluded_devices: Annotated[tuple[Index, ...], Meta(max_length=MOST_DEVICES)] = ()
    """Devices that annotations of the node close to new shares."""
    exclusions: Annotated[tuple[LongText, ...], Meta(max_length=MOST_DEVICES)] = ()
    unserved_resources: Annotated[tuple[KeyText, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """Resources with allocatable 0: the kubelet refuses pods that request them."""
    other_manager: ShortText = ""
    """What shows that another program gives out parts of the node's GPUs."""
    anti_affinity: tuple[AntiAffinityTerm, ...] = ()
    repelling_pods: Annotated[tuple[PodUid, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """Pods with required anti-affinity for which kube-scheduler has asked the extender, sorted;
    mirrors do not get them."""

    @property
    def closed_devices(self) -> dict[int, str]:
        return dict(zip(self.excluded_devices, self.exclusions, strict=False))
