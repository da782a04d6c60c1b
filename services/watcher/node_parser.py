"""Parses nodes of the API server, and the devices that another plugin registered; pure."""

from dataclasses import dataclass

import msgspec

from shared.dialects import LEDGER_RESOURCES
from shared.dialects.pod_requests import cordoned_devices
from shared.dialects.volcano import device_register
from shared.kubernetes.types import ApiNode
from shared.model.bounds import MOST_FACTS, check_bounds, check_size
from shared.model.events.node_events import DeviceReported
from shared.model.names import NodeName
from shared.model.node import AGENT_ANNOTATION, NodeFacts, Taint
from shared.model.quantity import parse_available


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUpdate:
    """A node as the API server reports it."""

    name: NodeName
    facts: NodeFacts | None = None
    """None: it was deleted."""
    devices: DeviceReported | None = None
    """Devices that another plugin registered."""
    revision: int = 0
    """Resource version of the node, or of its deletion; 0: unknown."""


def parse_node(node: ApiNode) -> NodeFacts:
    """Parse one node. Raises RequestError for an invalid quantity, and for what is too large."""
    allocatable = parse_available(node.status.allocatable)
    check_size("metadata.labels", len(msgspec.json.encode(node.metadata.labels)), MOST_FACTS)
    facts = NodeFacts(
        name=NodeName(node.metadata.name),
        labels=node.metadata.labels,
        taints=tuple(
            Taint(key=taint.key, value=taint.value, effect=taint.effect)
            for taint in node.spec.taints
        ),
        unschedulable=node.spec.unschedulable,
        allocatable={key: n for key, n in allocatable.items() if key not in LEDGER_RESOURCES},
        unserved_resources=tuple(
            sorted(key for key in LEDGER_RESOURCES if allocatable.get(key) == 0)
        ),
        excluded_devices=cordoned_devices(node.metadata.annotations),
    )
    check_bounds(facts, "the node")
    return facts


def foreign_devices(node: ApiNode, *, now_s: float) -> DeviceReported | None:
    """Return the devices that Volcano's own device plugin registered; None on our agent's nodes.

    Such a node fails closed. It has no devices without the plugin's annotation, without slots in
    allocatable, and when an older scheduler has marked the plugin as not responding.
    """
    annotations = node.metadata.annotations
    if AGENT_ANNOTATION in annotations:
        return None
    allocatable = parse_available(node.status.allocatable)
    report = DeviceReported(
        node=NodeName(node.metadata.name),
        devices=device_register.registered_devices(annotations, allocatable, now_s=now_s),
        served=device_register.SERVED,
        reported_at=now_s,
        other_plugin=True,
    )
    check_bounds(report, "the devices that another device plugin registered")
    return report
