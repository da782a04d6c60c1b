"""Nodes: the ordinary facts of a machine that decide whether a pod may run there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.model.names import NodeName

AGENT_ANNOTATION = "leasehold.dev/agent"
"""On a node: our agent reports its devices, and whatever else is written there is a view."""

CORDON_PREFIX = "leasehold.dev/shut: "
"""In place of all resources that a node serves: no pod may be bound to it now, and why."""


def cordon_reason(served: Iterable[str]) -> str:
    """Return why no pod may be bound to a node that serves these; empty: one may be."""
    return next(
        (name.removeprefix(CORDON_PREFIX) for name in served if name.startswith(CORDON_PREFIX)), ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A node's taint: Kubernetes' `Taint` without its time."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the API server says of a node, and what pods that hold no lease take of it."""

    name: NodeName
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """In the units of `PodRequest.resources`, extended resources included."""
    used_by_others: Mapping[str, int] = field(default_factory=dict)
    """Sum over the node's live pods that we did not place, `pods` included."""
    host_ports: tuple[str, ...] = ()
    """`protocol/port` in use by any live pod of the node, ours included."""
    excluded_devices: tuple[int, ...] = ()
    """Indices of devices that the node's annotations close to new shares."""
    unserved_resources: tuple[str, ...] = ()
    """Dialects' resources that the kubelet shows as 0: it would refuse a pod that asks for them."""
