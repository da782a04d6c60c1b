"""The admission window: which pods may be bound to this node now.

A kubelet requests devices for one pod after the other. If its agent is killed, it permanently fails
every pod that still waits for devices. So only `MAX_IN_FLIGHT` pods are admitted before they have
devices. A pod that Allocate would refuse by the agent's records, whose device is not healthy, or
could not be given its MIG layout, is not admitted: it would fail, and its controller's next one,
too.

If the kubelet's pod list cannot be read, a container is identified only by its request: then pods
with the same request are bound one after the other.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from services.node_agent.allocate.allocation import NodeSnapshot, check_shares
from services.node_agent.allocate.expected_requests import (
    RequestSignature,
    is_expected,
    resources_of,
    signatures_of,
)
from services.node_agent.kubelet.pods import Unserved, explain_unserved
from services.node_agent.mig.instances import find_layout
from services.node_agent.node import Node
from services.node_agent.records.device_guard import check_open, check_room
from shared.model.bounds import cut
from shared.model.device import Device
from shared.model.errors import RequestError
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, PodUid

PERMIT_S = 10.0
"""A pod that is admitted without the pod list, and not bound within this time, does not count."""
MAX_IN_FLIGHT = 2
"""Admitted pods without devices: the one that the kubelet serves, and the next."""
IN_FLIGHT_S = 5.0
"""An admitted pod without a request of the kubelet within this time no longer blocks others."""
SETTLE_S = 1.0
"""A pod that would be refused waits as others do for this long: the pod before it may just have
ended."""
REFUSED_S = 5.0
"""How long a refusal is remembered after the last request for its pod."""
DRAINING = "its agent is being stopped"
WINDOW_FULL = "the kubelet has not requested devices for earlier pods yet"
LEASES_NOT_SYNCED = "its agent does not know yet which pods the kubelet may request devices for"

NOTHING: Mapping[str, Unserved] = {}


class AdmissionWindow:
    """Admits pods for binding; remembers admitted pods until the kubelet requests their devices."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.leases = node.leases
        self.ticks = node.clock.ticks
        self.draining = False
        self.aligns_numa = False
        """The kubelet aligns devices with CPUs: pods in flight must have the same NUMA nodes."""
        self._admitted: dict[PodUid, tuple[Lease, float]] = {}
        """Leases of admitted pods without devices, and until when each counts."""
        self._refused: dict[PodUid, tuple[float, float]] = {}
        """Pods that Allocate would refuse: since when, and at the last request."""

    def in_flight(self) -> dict[PodUid, Lease]:
        """Return the leases of all pods that wait for devices, bound or only admitted."""
        allocated = self._forget_arrived()
        expected = {
            pod: lease
            for pod, lease in self.leases.leases.items()
            if pod not in self.node.refused and is_expected(lease, allocated)
        }
        return {pod: lease for pod, (lease, _) in self._admitted.items()} | expected

    def coming(self) -> list[Lease]:
        """Return the leases of the pods that the kubelet probably serves next."""
        self._forget_arrived()
        admitted = [lease for lease, _ in self._admitted.values()]
        return admitted or list(self.in_flight().values())

    def admit_binds(
        self,
        leases: Sequence[Lease],
        unready_reason: str | None,
        *,
        unreadable_reason: str,
        unserved: Mapping[str, Unserved] = NOTHING,
    ) -> BindReply:
        """Return which pods must wait.

        `unready_reason` is why no pod may be bound, `unreadable_reason` why the kubelet's pod list
        cannot be read; either may be empty. `unserved` are the resources that the kubelet cannot
        allocate: pods that request one of them wait, others do not.
        """
        if self.draining:
            return _closed(leases, DRAINING)
        node = self.node.snapshot
        if node is None or unready_reason:
            return _closed(leases, unready_reason or "its devices are not known yet")
        if unserved.keys() >= node.served.keys():
            return _closed(leases, explain_unserved(unserved))
        missing = {
            lease.pod: names
            for lease in leases
            if (names := resources_of(lease, node) & unserved.keys())
        }
        served = [lease for lease in leases if lease.pod not in missing]
        reply = self._admit_served(served, node, unreadable_reason)
        if not missing:
            return reply
        why = {name: unserved[name] for name in frozenset().union(*missing.values())}
        return replace(
            reply,
            unserved_pods=tuple(missing),
            unserved_reason=explain_unserved(why),
            unserved_s=min(each.for_s for each in why.values()),
        )

    def _admit_served(
        self, leases: Sequence[Lease], node: NodeSnapshot, unreadable_reason: str
    ) -> BindReply:
        """Return which of the pods must wait whose resources are registered."""
        for lease in leases:
            admitted = self._admitted.get(lease.pod)
            if admitted and admitted[0].created_at != lease.created_at:  # it was placed again
                del self._admitted[lease.pod]
        if not unreadable_reason:
            deferred, reason = self._admit_ahead(leases, node), WINDOW_FULL
        elif not self.leases.synced:
            return _closed(leases, LEASES_NOT_SYNCED)
        else:
            deferred = self._admit_distinct(leases, node)
            reason = f"a pod with the same request must be served first, as {unreadable_reason}"
        refusals = self._settled(deferred)
        waiting = tuple(pod for pod in deferred if pod not in refusals)
        reasons = filter(None, deferred.values())
        return BindReply(
            deferred_pods=waiting,
            reason=next(reasons, reason) if waiting else "",
            window_open=False,
            retry_soon=True,
            refusals=refusals,
        )

    def _settled(self, deferred: Mapping[PodUid, str]) -> dict[PodUid, str]:
        """Return the pods that would have been refused for a while now, each with the reason."""
        now = self.ticks()
        self._refused = {
            pod: (since, now if deferred.get(pod) else last)
            for pod, (since, last) in self._refused.items()
            if deferred.get(pod) or now - last < REFUSED_S
        }
        return {
            pod: reason
            for pod, reason in deferred.items()
            if reason and now - self._refused[pod][0] >= SETTLE_S
        }

    def _refusal(self, lease: Lease, node: NodeSnapshot) -> str:
        """Return why Allocate would refuse the pod by the records as they are now, or nothing."""
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
            self._refused.setdefault(lease.pod, (self.ticks(), self.ticks()))
            self.node.compare_due.set()
            return cut(str(error))
        self._refused.pop(lease.pod, None)
        return ""

    def _admit_ahead(self, leases: Sequence[Lease], node: NodeSnapshot) -> dict[PodUid, str]:
        """Admit pods until `MAX_IN_FLIGHT` are in flight; return the others.

        Only one is in flight while nothing was given since the kubelet registered the resources: it
        may choose other devices than those of leases, for all of them. Each of the others has the
        reason why Allocate would refuse it, or nothing if it comes next.
        """
        allocated = self._forget_arrived()
        deferred = dict[PodUid, str]()
        most = 1 if self.node.unproven else MAX_IN_FLIGHT
        for lease in leases:
            is_admitted = lease.pod in self._admitted
            may_be_bound = is_admitted and lease.state is not LeaseState.RESERVED
            if may_be_bound or self._is_done(lease, allocated):
                continue
            has_room = is_admitted or (len(self._admitted) < most and self._may_be_next(lease))
            reason = self._refusal(lease, node) if has_room else ""
            if reason or not has_room:
                self._admitted.pop(lease.pod, None)
                deferred[lease.pod] = reason
            elif not is_admitted:
                self._admitted[lease.pod] = lease, self.ticks() + IN_FLIGHT_S
        return deferred

    def _forget_arrived(self) -> frozenset[tuple[PodUid, str]]:
        """Drop pods that are no longer in flight; return the checkpoint's `allocated`."""
        allocated, now = self.node.checkpoint.allocated, self.ticks()
        self._admitted = {
            pod: (lease, until)
            for pod, (lease, until) in self._admitted.items()
            if now < until and pod not in self.node.refused and not self._is_done(lease, allocated)
        }
        return allocated

    def _may_be_next(self, lease: Lease) -> bool:
        """Return whether the pod may be in flight together with those that are.

        They have the same NUMA nodes, where that counts, and no other one needs a MIG layout of the
        same device of which it is not known yet whether it can be made: both would fail.
        """
        laid_out = self.node.laid_out
        unproven = {
            share.device
            for share in lease.shares
            if share.mig is not None and laid_out.get(share.device) != share.mig.layout
        }
        if unproven and any(
            pod != lease.pod and any(share.device in unproven for share in other.shares)
            for pod, other in self.in_flight().items()
        ):
            return False
        snapshot = self.node.snapshot
        if not self.aligns_numa or snapshot is None:
            return True
        nodes = numa_nodes_of(lease, snapshot.devices)
        return all(
            numa_nodes_of(each, snapshot.devices) == nodes for each, _ in self._admitted.values()
        )

    def _is_done(self, lease: Lease, allocated: Set[tuple[PodUid, str]]) -> bool:
        return self.leases.has_ended(lease) or all(
            (lease.pod, name) in allocated for name in lease.containers
        )

    def _admit_distinct(self, leases: Sequence[Lease], node: NodeSnapshot) -> dict[PodUid, str]:
        """Admit pods whose requests differ from those in flight; return as `_admit_ahead` does."""
        pending: dict[RequestSignature, PodUid] = {}
        for lease in self.in_flight().values():
            pending.update(dict.fromkeys(signatures_of(lease, node), lease.pod))
        on_their_way = set(pending.values())
        deferred = dict[PodUid, str]()
        for lease in leases:
            signatures = signatures_of(lease, node)
            is_admitted = lease.pod in self._admitted and lease.state is LeaseState.RESERVED
            if lease.pod in on_their_way and not is_admitted:
                continue
            has_room = is_admitted or (
                pending.keys().isdisjoint(signatures) and self._may_be_next(lease)
            )
            reason = self._refusal(lease, node) if has_room else ""
            if reason or not has_room:
                self._admitted.pop(lease.pod, None)
                deferred[lease.pod] = reason
            elif not is_admitted:
                self._admitted[lease.pod] = lease, self.ticks() + PERMIT_S
                pending.update(dict.fromkeys(signatures, lease.pod))
        return deferred


def numa_nodes_of(lease: Lease, devices: Mapping[DeviceUuid, Device]) -> frozenset[int]:
    """Return the NUMA nodes of a lease's devices; none if one is not known."""
    known = {share.device: devices.get(share.device) for share in lease.shares}
    nodes = {device.numa if device is not None else None for device in known.values()}
    return frozenset() if None in nodes else frozenset(numa for numa in nodes if numa is not None)


def _closed(leases: Sequence[Lease], reason: str) -> BindReply:
    deferred = tuple(lease.pod for lease in leases)
    return BindReply(deferred_pods=deferred, reason=reason, window_open=False, node_closed=True)
