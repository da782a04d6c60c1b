"""The watcher's source of nodes, and of devices that another device plugin registered."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec

from services.watcher.pod_group_sources import FIELD_MANAGER
from shared.dialects import LEDGER_RESOURCES
from shared.dialects.kai.managers import managing_condition
from shared.dialects.pod_requests import cordoned_devices
from shared.dialects.volcano import device_register
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.known_objects import as_number
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ApiNode
from shared.model.bounds import MOST_FACTS, check_bounds, check_size
from shared.model.devices.node import AGENT_ANNOTATION, CORDON_MANAGER, NodeFacts, Taint
from shared.model.errors import RequestError
from shared.model.events.node_events import DevicesRegistered
from shared.model.names import NodeName
from shared.model.quantity import parse_available

logger = logging.getLogger(__name__)

MOST_AUTHOR = 128
"""The API server's limit for the name of a field manager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUpdate:
    name: NodeName
    facts: NodeFacts | None = None
    """None if it was deleted."""
    devices: DevicesRegistered | None = None
    revision: int = 0
    """0 if unknown."""


def author_of(node: ApiNode, *path: str) -> str:
    """Return which user or program wrote a field last, or an empty text.

    kubectl names no user: only the audit log of the API server has them.
    """
    manager = node.metadata.manager_of(*path)[:MOST_AUTHOR]
    names_none = manager == FIELD_MANAGER or manager.startswith("kubectl")
    return "" if names_none else manager.removeprefix(CORDON_MANAGER)


def parse_node(node: ApiNode) -> NodeFacts:
    """Raises RequestError for an invalid quantity, and for what is too large."""
    allocatable = parse_available(node.status.allocatable)
    author = partial(author_of, node, "metadata", "annotations")
    closed = cordoned_devices(node.metadata.annotations, author)
    unschedulable = node.spec.unschedulable
    check_size("metadata.labels", len(msgspec.json.encode(node.metadata.labels)), MOST_FACTS)
    facts = NodeFacts(
        name=NodeName(node.metadata.name),
        labels=node.metadata.labels,
        taints=tuple(
            Taint(key=taint.key, value=taint.value, effect=taint.effect)
            for taint in node.spec.taints
        ),
        unschedulable=unschedulable,
        cordoned_by=author_of(node, "spec", "unschedulable") if unschedulable else "",
        allocatable={key: n for key, n in allocatable.items() if key not in LEDGER_RESOURCES},
        unserved_resources=tuple(
            sorted(key for key in LEDGER_RESOURCES if allocatable.get(key) == 0)
        ),
        other_manager=managing_condition(
            condition.type for condition in node.status.conditions if condition.status == "True"
        ),
        excluded_devices=tuple(closed),
        exclusions=tuple(closed.values()),
    )
    check_bounds(facts, "the node")
    return facts


def foreign_devices(node: ApiNode, *, now_s: float) -> DevicesRegistered | None:
    """Return what Volcano's device plugin registered, or None on nodes of our agent.

    There are no devices without slots in allocatable, or if an older scheduler has marked the
    plugin as not responding.
    """
    annotations = node.metadata.annotations
    if AGENT_ANNOTATION in annotations:
        return None
    allocatable = parse_available(node.status.allocatable)
    report = DevicesRegistered(
        node=NodeName(node.metadata.name),
        devices=device_register.registered_devices(annotations, allocatable, now_s=now_s),
        served=device_register.SERVED,
        reported_at=now_s,
    )
    check_bounds(report, "the devices that another device plugin registered")
    return report


@dataclass(slots=True)
class NodeReflector:
    client: KubernetesClient
    revision: int | None = None
    """0 if unknown, None before the first list."""
    restored: bool = False

    async def batches(self) -> AsyncIterator[list[NodeUpdate]]:
        reflector = Reflector(self.client, "/api/v1/nodes", ApiNode)
        async with aclosing(reflector.batches()) as batches:
            async for batch in batches:
                self.restored = batch.restored
                if batch.listed or self.revision is not None:
                    self.revision = as_number(reflector.resource_version)
                yield [
                    self._parse(NodeName(named.name), named.resource_version, node)
                    for named, node in batch.changed
                ]

    def _parse(self, name: NodeName, resource_version: str, node: ApiNode | None) -> NodeUpdate:
        revision = as_number(resource_version)
        devices = None
        if node is None:
            return NodeUpdate(name=name, revision=revision)
        try:
            facts = parse_node(node)
            devices = foreign_devices(node, now_s=time.time())
        except RequestError as error:
            logger.warning("node %s gets no pods: %s", name, error)
            facts = NodeFacts(name=name, unschedulable=True)
        except Exception:  # of one node: the others are watched all the same
            logger.exception("node %s gets no pods: a bug in how it is read", name)
            facts = NodeFacts(name=name, unschedulable=True)
        return NodeUpdate(name=name, facts=facts, devices=devices, revision=revision)
