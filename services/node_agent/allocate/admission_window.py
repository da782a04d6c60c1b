"""The admission window: which pods may be bound to this node now.

A kubelet whose agent is killed permanently fails every pod that waits for devices, so few may wait.
A pod that the kubelet does not receive closes the node.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from services.node_agent.allocate.allocation import NodeSnapshot, check_shares
from services.node_agent.allocate.expected_requests import (
    RequestSignature,
    is_expected,
    resources_of,
    signatures_of,
)
from services.node_agent.kubelet.pods import UnservedResource, explain_unserved
from services.node_agent.mig.instances import find_layout
from services.node_agent.node import Node
from services.node_agent.records.device_guard import check_open, check_room
from shared.model.bounds import cut
from shared.model.devices.device import Device
from shared.model.errors import RequestError
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, PodUid

PERMIT_S = 10.0
"""An admitted pod that is not bound within this time does not count."""
MAX_IN_FLIGHT = 2
RECENT_S = 2.0
"""A kubelet that has requested devices within this time receives its pods."""
LATE_S = 5.0
"""A bound pod without devices after this time closes the node: the kubelet has not received it."""
SETTLE_S = 1.0
"""A pod that would be refused waits for this long: the pod before it may just have ended."""
REFUSED_S = 5.0
"""How long a refusal is remembered after its pod's last request."""
DRAINING = "its agent is being stopped"
DEVICES_UNKNOWN = "its devices are not known yet"
WINDOW_FULL = "the kubelet has not requested devices for earlier pods yet"
LEASES_NOT_SYNCED = "its agent does not know yet which pods the kubelet may request devices for"
NOT_RECEIVED = (
    "pod {} is bound to the node, and the kubelet has not requested its devices yet: check that "
    "the node reaches the API server; after an outage, a kubelet reads its pods within a minute"
)

NOTHING: Mapping[str, UnservedResource] = {}


class AdmissionWindow:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.leases = node.leases
        self.ticks = node.clock.ticks
        self.draining = False
        self.aligns_numa = False
        """Pods in flight must have the same NUMA nodes."""
        self._waiting: dict[PodUid, tuple[Lease, float]] = {}
        self._refused: dict[PodUid, tuple[float, float]] = {}

    def in_flight(self) -> dict[PodUid, Lease]:
        self._update()
        return {pod: lease for pod, (lease, _) in self._waiting.items()}

    def coming(self) -> dict[PodUid, Lease]:
        """Leave out pods that the kubelet never receives, as they are too old."""
        self._update()
        oldest = self.ticks() - self.node.timing.relist_s
        if self.node.api_away_at > oldest:
            return self.in_flight()
        return {pod: lease for pod, (lease, since) in self._waiting.items() if since > oldest}

    def admit_binds(
        self,
        leases: Sequence[Lease],
        unready_reason: str | None,
        *,
        unreadable_reason: str,
        unserved: Mapping[str, UnservedResource] = NOTHING,
        is_serving: bool = False,
    ) -> BindReply:
        """`unready_reason`, and `unreadable_reason` of the kubelet's pod list, may be empty."""
        closed_reason = self._closed_reason(unready_reason, unserved)
        if closed_reason:
            return _closed(leases, closed_reason)
        node = self.node.require_snapshot()
        late = None if is_serving else self._late_pod()
        if late is not None:
            on_their_way = [lease for lease in leases if lease.pod in self._waiting]
            reply = self._admit_served(on_their_way, node, unreadable_reason, is_serving=is_serving)
            others = (lease.pod for lease in leases if lease.pod not in self._waiting)
            return replace(
                reply,
                deferred_pods=(*reply.deferred_pods, *others),
                reason=NOT_RECEIVED.format(f"{late.namespace}/{late.name}"),
                retry_soon=False,
                node_closed=True,
            )
        missing = {
            lease.pod: names
            for lease in leases
            if (names := resources_of(lease, node) & unserved.keys())
        }
        served = [lease for lease in leases if lease.pod not in missing]
        reply = self._admit_served(served, node, unreadable_reason, is_serving=is_serving)
        if not missing:
            return reply
        why = {name: unserved[name] for name in frozenset().union(*missing.values())}
        return replace(
            reply,
            unserved_pods=tuple(missing),
            unserved_reason=explain_unserved(why),
            unserved_s=min(resource.for_s for resource in why.values()),
        )

    def _closed_reason(
        self, unready_reason: str | None, unserved: Mapping[str, UnservedResource]
    ) -> str:
        node = self.node.snapshot
        if self.draining:
            return DRAINING
        if node is None or unready_reason:
            return unready_reason or DEVICES_UNKNOWN
        if unserved.keys() >= node.served.keys():
            return explain_unserved(unserved)
        # A pod may be on its way to a GPU since before the agent was restarted.
        return "" if self.leases.synced else LEASES_NOT_SYNCED

    def _admit_served(
        self,
        leases: Sequence[Lease],
        node: NodeSnapshot,
        unreadable_reason: str,
        *,
        is_serving: bool,
    ) -> BindReply:
        for lease in leases:
            waiting = self._waiting.get(lease.pod)
            if waiting and waiting[0].created_at != lease.created_at:  # it was placed again
                del self._waiting[lease.pod]
        deferred = self._admit(
            leases, node, distinct=bool(unreadable_reason), is_serving=is_serving
        )
        reason = f"{WINDOW_FULL}; {unreadable_reason}" if unreadable_reason else WINDOW_FULL
        refusals = self._settled(deferred)
        next_pods = tuple(pod for pod in deferred if pod not in refusals)
        reasons = filter(None, deferred.values())
        return BindReply(
            deferred_pods=next_pods,
            reason=next(reasons, reason) if next_pods else "",
            window_open=False,
            retry_soon=True,
            refusals=refusals,
        )

    def _settled(self, deferred: Mapping[PodUid, str]) -> dict[PodUid, str]:
        now = self.ticks()
        self._refused = {
            pod: (since, now if pod in deferred else last)
            for pod, (since, last) in self._refused.items()
            if pod in deferred or now - last < REFUSED_S
        }
        return {
            pod: reason
            for pod, reason in deferred.items()
            if reason and now - self._refused[pod][0] >= SETTLE_S
        }

    def _refusal(self, lease: Lease, node: NodeSnapshot) -> str:
        checkpoint = self.node.checkpoint
        try:
            check_open(lease.shares, node.devices, self.node.closed)
            check_shares(lease.shares, lease.pod, replace(node, fences=checkpoint.fences))
            for share in lease.shares:
                if share.mig is not None:  # layouts may have changed since it was placed
                    find_layout(share.mig, share.device, node.devices.get(share.device))
            check_room(
                lease, lease.containers, checkpoint.entries, node.devices, checkpoint.unrecorded
            )
        except RequestError as error:
            return cut(str(error))
        return ""

    def _admit(
        self, leases: Sequence[Lease], node: NodeSnapshot, *, distinct: bool, is_serving: bool
    ) -> dict[PodUid, str]:
        """Admit as many pods as may be in flight; return why the others would be refused.

        The text is empty for a pod that comes next: its GPUs are kept for it, lest pods with fewer
        GPUs overtake it for ever.
        """
        allocated = self.node.checkpoint.allocated
        most = self._most_in_flight()
        # A kubelet that waits in a call serves no other pod, however old that is.
        coming = self.in_flight() if is_serving else self.coming()
        for pod in self._refused:  # its Binding is not sent, unless it was before
            coming.pop(pod, None)
        kept = set[DeviceUuid]()
        pending = set[RequestSignature]()
        for pod, lease in self.in_flight().items():
            if distinct and pod not in self._refused:
                pending |= signatures_of(lease, node)
        deferred = dict[PodUid, str]()
        for lease in leases:
            if self._has_arrived(lease.pod) or self._is_done(lease, allocated):
                continue
            was_refused = lease.pod in self._refused
            is_admitted = lease.pod in self._waiting and not was_refused
            signatures = signatures_of(lease, node) if distinct else frozenset()
            devices = _devices_of(lease)
            has_room = is_admitted or (
                len(coming) < most
                and pending.isdisjoint(signatures)
                and devices.isdisjoint(kept.union(*map(_devices_of, coming.values())))
                and self._has_same_numa_nodes(lease, coming.values())
            )
            reason = self._refusal(lease, node) if has_room or was_refused else ""
            if reason:
                self._refused.setdefault(lease.pod, (self.ticks(), self.ticks()))
                self.node.compare_due.set()
            if reason or not has_room:
                deferred[lease.pod] = reason
                coming.pop(lease.pod, None)
                kept |= frozenset() if reason else devices
                if not self._is_bound(lease.pod):
                    self._waiting.pop(lease.pod, None)
            elif not is_admitted:
                self._refused.pop(lease.pod, None)
                self._waiting[lease.pod] = lease, self.ticks()
                coming[lease.pod] = lease
                pending |= signatures
        return deferred

    def _most_in_flight(self) -> int:
        recently = self.node.clock.now() - RECENT_S
        is_proven = not self.node.unproven and self.node.checkpoint.allocated_since(recently)
        return MAX_IN_FLIGHT if is_proven else 1

    def _update(self) -> None:
        allocated = self.node.checkpoint.allocated
        now = self.ticks()
        refused = self.node.refused
        bound = {
            pod: lease
            for pod, lease in self.leases.leases.items()
            if pod not in refused and is_expected(lease, allocated)
        }
        self._waiting = {
            pod: (lease, since)
            for pod, (lease, since) in self._waiting.items()
            if pod in bound
            or (
                now - since < PERMIT_S
                and pod not in refused
                and not self._is_done(lease, allocated)
            )
        }
        for pod, lease in bound.items():
            self._waiting.setdefault(pod, (lease, now))

    def _late_pod(self) -> Lease | None:
        late = self.ticks() - LATE_S
        for pod, lease in self.coming().items():
            is_expected_now = self._is_bound(pod) and pod not in self._refused
            if is_expected_now and self._waiting[pod][1] <= late:
                return lease
        return None

    def _is_bound(self, pod: PodUid) -> bool:
        lease = self.leases.find(pod)
        return lease is not None and lease.state is LeaseState.BOUND

    def _has_arrived(self, pod: PodUid) -> bool:
        lease = self.leases.find(pod)
        return lease is not None and lease.state is LeaseState.ACTIVE

    def _has_same_numa_nodes(self, lease: Lease, others: Iterable[Lease]) -> bool:
        snapshot = self.node.snapshot
        if not self.aligns_numa or snapshot is None:
            return True
        nodes = numa_nodes_of(lease, snapshot.devices)
        return all(numa_nodes_of(other, snapshot.devices) == nodes for other in others)

    def _is_done(self, lease: Lease, allocated: Set[tuple[PodUid, str]]) -> bool:
        return self.leases.has_ended(lease) or all(
            (lease.pod, name) in allocated for name in lease.containers
        )


def numa_nodes_of(lease: Lease, devices: Mapping[DeviceUuid, Device]) -> frozenset[int]:
    own = {share.device: devices.get(share.device) for share in lease.shares}
    nodes = {device.numa if device is not None else None for device in own.values()}
    return frozenset() if None in nodes else frozenset(numa for numa in nodes if numa is not None)


def _devices_of(lease: Lease) -> frozenset[DeviceUuid]:
    return frozenset(share.device for share in lease.shares)


def _closed(leases: Sequence[Lease], reason: str) -> BindReply:
    deferred = tuple(lease.pod for lease in leases)
    return BindReply(deferred_pods=deferred, reason=reason, window_open=False, node_closed=True)
