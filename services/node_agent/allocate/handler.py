"""Serves the kubelet's calls: resolves the container, and gives it the shares of its lease.

A refused pod fails permanently, so a call waits for what cannot be seen.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from msgspec import structs

from services.node_agent.allocate.allocation import (
    HONOURED_STATES,
    NodeSnapshot,
    OtherDevicesError,
    check_present,
    grant,
    preferred_device_ids,
    refusal_text,
    valid_lease,
)
from services.node_agent.allocate.expected_requests import implied_pods, unlisted_pods
from services.node_agent.allocate.grants import Grants
from services.node_agent.allocate.patience import Patience
from services.node_agent.allocate.pod_resolution import (
    AllocationHistory,
    AmbiguousContainer,
    ContainerCandidate,
    resolve_container,
)
from services.node_agent.kubelet.device_ids import compact
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pods import KubeletPod
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry, ContainerPlace
from services.node_agent.views.node_views import ViewWriter
from shared.dialects.dialect import ContainerSetup
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.node_events import ShareRefused
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import PodUid

ROOM_S = 4.0
"""How long Allocate looks for ended pods on a full device: longer than a process takes to start,
and than the 3 s for which the kubelet caches which pods run."""
RESOLVE_S = 2.0
"""How long an ambiguous container is resolved again: the kubelet soon drops a rejected pod."""
LEASE_WAIT_S = 4.0
"""How long a lease that is unknown, or only reserved, is requested."""
LOOK_AGAIN_S = 0.1
"""Interval of looks at the kubelet's pods for the container."""
LOOK_LATER_S = 0.5
"""Interval of looks beyond `RESOLVE_S`."""
FETCH_PAUSE_S = 0.2
"""Pause between requests for a lease."""


class AllocationHandler:
    def __init__(self, node: Node, pods: NodePods, grants: Grants, views: ViewWriter) -> None:
        self.node = node
        self.pods = pods
        self.grants = grants
        self.views = views
        self.patience = Patience(node.clock, node.timing.sight_s)
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._partitioning: dict[tuple[str, PodUid, str], tuple[str, ...]] = {}
        self._preferred: dict[str, tuple[PodUid, str]] = {}
        """The container of the latest reply, by resource."""
        self._registrations = 0

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Return no IDs if the container is ambiguous."""
        snapshot = self.node.require_snapshot()
        async with self.patience.serving(), self._locks[resource]:
            candidate = await self._resolve(resource, size)
            if isinstance(candidate, AmbiguousContainer):
                return []
            lease = await self._lease_of(candidate)
        preferred = preferred_device_ids(
            lease,
            candidate,
            snapshot,
            resource=resource,
            available=available,
            must_include=must_include,
            size=size,
        )
        self._preferred.pop(resource, None)
        if preferred:
            self._preferred[resource] = candidate.pod.uid, candidate.container.name
        return preferred

    def note_registered(self) -> None:
        """The kubelet may have another configuration."""
        self._registrations += 1
        self.node.unproven = True

    async def allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        """Return the setup, whose files are on disk.

        Raises RequestError or UnavailableError with a sentence for the pod's owner.
        """
        try:
            async with (
                self.patience.serving(),
                self.grants.counted(resource),
                self._locks[resource],
            ):
                return await self._allocate(resource, device_ids)
        except LeaseholdError as error:
            kind = UnavailableError if isinstance(error, UnavailableError) else RequestError
            raise kind(refusal_text(str(error), self.node.name, resource, device_ids)) from error

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        """Raises RequestError if another container has the IDs, or they were not allocated.

        PodResources omit init containers.
        """
        ids = compact(device_ids)
        node = self.node
        entries = [
            entry
            for entry in node.checkpoint.of_resource(resource)
            if entry.allocation.device_ids == ids
        ]
        holders = {
            holding.place
            for holding in (await node.pod_resources.list_holdings()).holdings
            if holding.resource == resource and compact(holding.device_ids) == ids
        }
        matching = [
            entry for entry in entries if (entry.place in holders if holders else entry.init)
        ]
        if not matching:
            why = (
                f"the kubelet shows them with {_listed(holders)}, and they were allocated to "
                f"{_listed(entry.place for entry in entries)}"
            )
            raise RequestError(refusal_text(why, node.name, resource, device_ids))
        for entry in matching:
            shares = entry.lease.shares_of(entry.allocation.container)
            check_present(shares, node.require_snapshot())
            await self.grants.prepare_again(entry, starting=True)
            node.checkpoint.note_call(entry, node.clock.now(), starts=True)

    async def _allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        ids = compact(device_ids)
        node = self.node
        candidate = await self._resolve(resource, len(device_ids), ids)
        if isinstance(candidate, AmbiguousContainer):
            node.outbox.add(ShareRefused(node=node.name, reason=f"{resource}: {candidate}"))
            unreadable = self.pods.unreadable_reason
            because = f", and {unreadable}" if unreadable else ""
            reason = f"its container is ambiguous: {candidate}{because}"
            self.grants.failed.close_node(
                f"the kubelet requested {resource}, and {reason}",
                partial(self._check_resolved, resource, candidate.candidates),
            )
            raise RequestError(reason)
        try:
            entry = await self._give(candidate, resource, device_ids)
        except LeaseholdError as error:
            if isinstance(error, OtherDevicesError):
                self._close_as_chosen(candidate, resource, len(device_ids), str(error))
            self._report_refused(candidate, str(error))
            raise
        node.unproven = False
        node.checkpoint.note_call(entry, node.clock.now(), starts=False)
        return entry.setup

    async def _give(
        self, candidate: ContainerCandidate, resource: str, device_ids: Sequence[str]
    ) -> CheckpointEntry:
        """A repeated call gets the same setup."""
        node = self.node
        container = candidate.container
        ids = compact(device_ids)
        lease = valid_lease(await self._lease_of(candidate), candidate, node.name)
        previous = node.checkpoint.find(candidate.pod.uid, container.name, resource)
        if previous is not None and previous.allocation.device_ids == ids:
            check_present(lease.shares_of(container.name), node.require_snapshot())
            await self.grants.prepare_again(previous)
            return previous

        def decide(snapshot: NodeSnapshot) -> CheckpointEntry:
            reusable = self._of_init_containers(lease.pod, resource)
            return grant(
                lease,
                candidate,
                snapshot,
                resource=resource,
                device_ids=device_ids,
                reusable=reusable,
            )

        entry = await self.grants.give(
            lease,
            container.name,
            resource,
            decide,
            records_s=LEASE_WAIT_S,
            room_s=ROOM_S,
            blind_until=self.patience.until,
            waiting=lambda: self._unlocked((resource, lease.pod, container.name), ids),
        )
        node.refused.discard(lease.pod)
        self.views.show_allocated(lease, self._activated(lease))
        return entry

    def _close_as_chosen(
        self, candidate: ContainerCandidate, resource: str, count: int, reason: str
    ) -> None:
        """Close the devices of a lease, since the kubelet chose others.

        They open once the kubelet has the lease's IDs free, or has restarted, if it ignored the
        preferred ones.
        """
        node = self.node
        name = candidate.container.name
        lease = node.leases.find(candidate.pod.uid)
        if lease is None:
            return
        is_ignored = self._preferred.get(resource) == (candidate.pod.uid, name)
        registrations = self._registrations
        shares = lease.shares_of(name)

        async def try_again() -> None:
            present = node.require_snapshot()
            for uuid in {share.device for share in shares}:
                if uuid not in present.devices or uuid in present.absent:
                    raise RequestError(f"device {uuid}, of the same lease, has left the node")
            if is_ignored and self._registrations == registrations:
                raise UnavailableError("the kubelet has not restarted")
            holdings = (await node.pod_resources.list_holdings()).holdings
            held = {
                text
                for holding in holdings
                if holding.resource == resource
                for text in holding.device_ids
            }
            snapshot = node.require_snapshot()
            available = [text for text in snapshot.served.get(resource, {}) if text not in held]
            chosen = preferred_device_ids(
                lease,
                candidate,
                snapshot,
                resource=resource,
                available=available,
                must_include=(),
                size=count,
            )
            if not chosen:
                raise UnavailableError("the kubelet does not have the devices of the lease free")

        self.grants.failed.close_devices(shares, reason, try_again)

    @asynccontextmanager
    async def _unlocked(
        self, call: tuple[str, PodUid, str], ids: tuple[str, ...]
    ) -> AsyncIterator[None]:
        """Let other calls for the resource go on, for which this container counts as served."""
        lock = self._locks[call[0]]
        self._partitioning[call] = ids
        lock.release()
        try:
            yield
        finally:
            await lock.acquire()
            self._partitioning.pop(call, None)

    def _report_refused(self, candidate: ContainerCandidate, reason: str) -> None:
        pod = candidate.pod
        node = self.node
        node.refused.add(pod.uid)
        node.compare_due.set()
        node.outbox.add(
            ShareRefused(
                node=node.name,
                reason=reason,
                pod=pod.uid,
                namespace=pod.namespace,
                name=pod.name,
                container=candidate.container.name,
            )
        )
        lease = node.leases.find(pod.uid)
        if lease is not None:
            self.views.show_failed(lease)

    def _activated(self, lease: Lease) -> frozenset[str]:
        allocated = self.node.checkpoint.allocated
        return frozenset(container for pod, container in allocated if pod == lease.pod)

    def _of_init_containers(self, pod: PodUid, resource: str) -> list[str]:
        return [
            text
            for entry in self.node.checkpoint.of_resource(resource)
            if entry.init and entry.allocation.pod == pod
            for text in entry.allocation.device_ids
        ]

    def _history(self, resource: str) -> AllocationHistory:
        allocated = {
            (entry.allocation.pod, entry.allocation.container): entry.allocation.device_ids
            for entry in self.node.checkpoint.of_resource(resource)
        }
        for (of_resource, pod, container), ids in self._partitioning.items():
            if of_resource == resource:
                allocated[pod, container] = ids
        return AllocationHistory(
            allocated=allocated,
            refused=frozenset(self.node.refused),
            over=frozenset(self.grants.reconciler.over),
        )

    async def _resolve(
        self,
        resource: str,
        count: int,
        device_ids: tuple[str, ...] | None = None,
    ) -> ContainerCandidate | AmbiguousContainer:
        """Return the container that `count` devices are for.

        With `device_ids`, the chosen ones, an ambiguous container is resolved again for
        `RESOLVE_S`, or until the deadline of `patience` while something cannot be seen. Raises
        UnavailableError after the deadline.
        """
        ticks = self.node.clock.ticks
        until = ticks() + RESOLVE_S
        is_held = device_ids is not None and bool(self.node.unresolved_reason)
        if is_held:
            until = max(until, self.patience.until)
        while True:
            result, blind = await self._look(resource, count, device_ids)
            if not isinstance(result, AmbiguousContainer):
                return result
            is_late = ticks() > until
            if blind:
                if ticks() > max(until, self.patience.until):
                    raise UnavailableError(
                        f"the container that the kubelet asks for cannot be seen: {blind}"
                    )
            elif is_late or device_ids is None or not (result.candidates or is_held):
                return result
            await self.node.clock.sleep(LOOK_LATER_S if is_late else LOOK_AGAIN_S)

    async def _check_resolved(
        self, resource: str, candidates: Iterable[ContainerCandidate]
    ) -> None:
        pods = {pod.uid for pod in await self.pods.list_pods() if not pod.terminal}
        served = self._history(resource).allocated
        left = tuple(
            candidate
            for candidate in candidates
            if candidate.pod.uid in pods - self.node.refused
            and (candidate.pod.uid, candidate.container.name) not in served
        )
        if left:
            raise UnavailableError(str(AmbiguousContainer(left)))

    async def _look(
        self, resource: str, count: int, device_ids: tuple[str, ...] | None
    ) -> tuple[ContainerCandidate | AmbiguousContainer, str]:
        """Return what is resolved now; if it is ambiguous, also what cannot be seen, if anything.

        A container that was served or refused before counts only if no unlisted pod with a lease
        waits: an old list may have the earlier pod of the same name. A pod whose lease is only
        reserved, as after a rollback of the ledger, is waited for.
        """
        node = self.node
        snapshot = self.node.require_snapshot()
        try:
            pods, pod_resources = await asyncio.gather(
                self.pods.list_pods(), node.pod_resources.list_holdings()
            )
        except UnavailableError as error:
            return AmbiguousContainer(()), str(error)

        def resolve(pods: Iterable[KubeletPod]) -> ContainerCandidate | AmbiguousContainer:
            return resolve_container(
                resource,
                count,
                pods=pods,
                pod_resources=pod_resources,
                history=self._history(resource),
                device_ids=device_ids,
            )

        def unlisted(leases: Iterable[Lease]) -> tuple[KubeletPod, ...]:
            implied = implied_pods(leases, snapshot, node.checkpoint.allocated)
            return unlisted_pods(pods, implied, pod_resources)

        result = resolve(pods)
        candidates = _candidates_of(result)
        blind = self.pods.unreadable_reason if candidates and self.pods.is_passing else ""
        if self._unanswered(candidates, resource):
            return result, blind
        no_reply = await self._fetch_leases()
        if no_reply and not self._served(candidates, resource):
            blind = no_reply
        possible_pods = [pod for pod in pods if not (no_reply and pod.uid in node.refused)]
        leases = node.leases.leases.values()
        result = resolve((*possible_pods, *unlisted(leases)))
        if self._unanswered(_candidates_of(result), resource):
            return result, blind
        once_committed = resolve(unlisted(_committed(leases)))
        awaited = self._unanswered(_candidates_of(once_committed), resource)
        if awaited:
            pod = awaited[0].pod
            return (
                AmbiguousContainer(awaited),
                f"the lease of pod {pod.namespace}/{pod.name} is only reserved",
            )
        return result, blind

    async def _fetch_leases(self) -> str:
        try:
            await self.node.lease_sync.fetch()
        except UnavailableError as error:
            return f"no reply on which pods hold leases: {error}; are the binder and NATS running?"
        return ""

    def _served(
        self, candidates: Iterable[ContainerCandidate], resource: str
    ) -> tuple[ContainerCandidate, ...]:
        served = self._history(resource).allocated
        return tuple(
            candidate
            for candidate in candidates
            if (candidate.pod.uid, candidate.container.name) in served
        )

    def _unanswered(
        self, candidates: Sequence[ContainerCandidate], resource: str
    ) -> tuple[ContainerCandidate, ...]:
        served = self._served(candidates, resource)
        return tuple(
            candidate
            for candidate in candidates
            if candidate not in served and candidate.pod.uid not in self.node.refused
        )

    async def _lease_of(self, candidate: ContainerCandidate) -> Lease | None:
        """Return the pod's lease, requested if need be.

        Without a reply it is requested until the deadline of `patience`, then raises
        UnavailableError.
        """
        pod = candidate.pod.uid
        began = self.node.clock.ticks()
        until = began + LEASE_WAIT_S
        while True:
            lease = self.node.leases.find(pod)
            if lease and lease.state in HONOURED_STATES and not _is_other(lease, candidate):
                return lease
            try:
                fetched = await self.node.lease_sync.fetch(pod)
            except UnavailableError as error:
                now = self.node.clock.ticks()
                if now + FETCH_PAUSE_S > max(until, self.patience.until):
                    raise UnavailableError(
                        f"no reply within {now - began:.0f} s on whether pod "
                        f"{candidate} holds a lease: {error}; are the binder and NATS running?"
                    ) from error
            else:
                is_reserved = any(
                    fetched_lease.pod == pod and fetched_lease.state is LeaseState.RESERVED
                    for fetched_lease in fetched
                )
                lease = self.node.leases.find(pod)
                late = self.node.clock.ticks() > until
                other = lease is not None and _is_other(lease, candidate)
                if other and late:
                    raise RequestError(
                        f"pod {candidate} was bound with another lease than the one that it holds "
                        "now: delete the pod"
                    )
                if late or not (is_reserved or other):
                    return lease
            await self.node.clock.sleep(FETCH_PAUSE_S)


def _committed(leases: Iterable[Lease]) -> Iterator[Lease]:
    for lease in leases:
        if lease.state is LeaseState.RESERVED:
            yield structs.replace(lease, state=LeaseState.BOUND)


def _candidates_of(
    result: ContainerCandidate | AmbiguousContainer,
) -> tuple[ContainerCandidate, ...]:
    return result.candidates if isinstance(result, AmbiguousContainer) else (result,)


def _is_other(lease: Lease, candidate: ContainerCandidate) -> bool:
    return candidate.pod.leased_at not in {0.0, lease.created_at}


def _listed(places: Iterable[ContainerPlace]) -> str:
    return ", ".join("/".join(place) for place in sorted(places)) or "no container"
