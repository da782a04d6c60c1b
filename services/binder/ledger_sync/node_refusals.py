"""What nodes may say of pods and devices of the ledger, and what becomes of those that say more."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.metrics import count_anomaly
from services.binder.report.event_writer import EventRecorder
from services.binder.report.explanations import refused_event
from shared.ledger.leases import RedisLeases
from shared.model.errors import LeaseholdError
from shared.model.events.node_events import HealthChanged, LeaseHolder, ShareRefused, ViolationFound
from shared.model.lease import Lease
from shared.model.names import NodeName, PodUid

logger = logging.getLogger(__name__)

E = TypeVar("E", ShareRefused, ViolationFound)


@dataclass(eq=False, kw_only=True)
class NodeRefusals:
    """Refuses what is not a node's to say: counted, reported on its Node, and the node is cordoned.

    A node may speak of a pod that has a lease there, or that Kubernetes shows there.
    """

    ledger: RedisLeases
    holders: LeaseHolders
    events: EventRecorder
    distrust: Callable[[NodeName, str], None]

    def refuse(self, node: str, reason: str) -> None:
        """Report a message that was refused."""
        count_anomaly("refused_of_nodes")
        self.events.record(refused_event(NodeName(node), reason))
        self.distrust(NodeName(node), reason)

    def refuse_all(self, reasons: Mapping[NodeName, str]) -> None:
        """Report what was refused, by node."""
        for node, reason in reasons.items():
            self.refuse(node, reason)

    async def own(self, events: Sequence[E]) -> list[E]:
        """Return the events about pods of their nodes."""
        pods = [event.pod for event in events if event.pod]
        leases = dict(zip(pods, await self.ledger.load(pods) if pods else [], strict=True))
        accepted = await asyncio.gather(*(self._is_own(event, leases) for event in events))
        return [event for event, is_own in zip(events, accepted, strict=True) if is_own]

    async def _is_own(self, event: E, leases: Mapping[PodUid, Lease | None]) -> bool:
        if not (event.pod and event.namespace and event.name):
            return False
        lease = leases[event.pod]
        if lease is not None and lease.node == event.node and _is_named(event, lease):
            return True
        try:
            pod = await self.holders.find(event.namespace, event.name, claim=event.claim)
        except LeaseholdError as error:
            logger.warning("pod %s/%s is not known: %s", event.namespace, event.name, error)
            return False
        if pod is None or pod.pod != event.pod or pod.node is None:
            return False
        if pod.node != event.node:
            self.refuse(event.node, f"{event.subject}: pod {event.pod} is on node {pod.node}")
        return pod.node == event.node

    async def with_own_holders(self, events: Sequence[HealthChanged]) -> list[HealthChanged]:
        """Return the events with those holders that have a lease on the device, by the ledger."""
        pods = list({holder.pod for event in events for holder in event.holders})
        leases = dict(zip(pods, await self.ledger.load(pods) if pods else [], strict=True))
        return [replace(event, holders=_holders_of(event, leases)) for event in events]


def _holders_of(
    event: HealthChanged, leases: Mapping[PodUid, Lease | None]
) -> tuple[LeaseHolder, ...]:
    found = (leases[holder.pod] for holder in event.holders)
    return tuple(
        LeaseHolder(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            claim=lease.claim is not None,
        )
        for lease in found
        if lease is not None
        and lease.node == event.node
        and any(share.device == event.device for share in lease.shares)
    )


def _is_named(event: ShareRefused | ViolationFound, lease: Lease) -> bool:
    """Return whether an event names the holder of a lease as the ledger does."""
    named = (event.namespace, event.name, event.claim)
    return named == (lease.namespace, lease.name, lease.claim is not None)
