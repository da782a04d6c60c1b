"""The leases of this node that the agent knows; pure.

Updates may arrive twice, late, or never: a lease with a lower version than one already seen changes
nothing.
"""

import math
from collections.abc import Iterable

from shared.model.leases.lease import LIVE, Lease
from shared.model.names import NodeName, PodUid

MAX_ENDED = 4096
TERMINATED = (math.inf, math.inf)
"""Creation and version after which no lease of a pod is newer."""


class KnownLeases:
    """A pod's leases follow one another in `created_at`, and the states of one lease in `version`.

    The clocks of two placers may differ, so a higher version is newer whatever its `created_at`.
    """

    def __init__(self, node: NodeName, *, synced: bool = False) -> None:
        self.node = node
        self.leases: dict[PodUid, Lease] = {}
        self.ended: dict[PodUid, tuple[float, float]] = {}
        self.revision = 0
        self.synced = synced
        self._revisions: dict[PodUid, int] = {}

    def observe(self, leases: Iterable[Lease]) -> list[Lease]:
        return [lease for lease in leases if self._observe(lease)]

    def _observe(self, lease: Lease) -> bool:
        stamp = (lease.created_at, lease.version)
        current = self.leases.get(lease.pod)
        seen = [self.ended.get(lease.pod, (-1.0, -1))]
        seen += [(current.created_at, current.version)] if current else []
        is_old = any(stamp <= earlier and lease.version <= earlier[1] for earlier in seen)
        if lease.node != self.node or (is_old and not (current and was_resized(lease, current))):
            return False
        self.revision += 1
        if lease.state in LIVE:
            self.ended.pop(lease.pod, None)
            self.leases[lease.pod] = lease
            self._revisions[lease.pod] = self.revision
        else:
            self._end(lease.pod, stamp)
        return True

    def observe_reply(self, leases: Iterable[Lease], *, since: int) -> None:
        """Apply leases as the ledger has them, requested at revision `since`.

        They replace what was known before, also with a lower version: the ledger may have lost a
        later lease or its end. A pod that has terminated stays ended, and a lease keeps a later
        size.
        """
        for lease in leases:
            current = self.leases.get(lease.pod)
            stays = current is not None and (current == lease or was_resized(current, lease))
            has_terminated = self.ended.get(lease.pod) == TERMINATED
            is_earlier = self._revisions.get(lease.pod, 0) <= since
            if lease.state in LIVE and is_earlier and not (stays or has_terminated):
                self._forget(lease.pod)
            self._observe(lease)

    def end(self, pods: Iterable[PodUid]) -> None:
        """A claim that is not prepared may get a later lease, or the same by `observe_reply`."""
        for pod in pods:
            lease = self.leases.get(pod)
            stamp = TERMINATED
            if lease is None:
                continue
            if lease.claim is not None:
                stamp = lease.created_at, lease.version
            self.revision += 1
            self._end(pod, stamp)

    def _end(self, pod: PodUid, stamp: tuple[float, float]) -> None:
        self.leases.pop(pod, None)
        self.ended[pod] = stamp
        self._revisions[pod] = self.revision
        while len(self.ended) > MAX_ENDED:
            self._forget(next(iter(self.ended)))

    def _forget(self, pod: PodUid) -> None:
        for records in (self.leases, self.ended, self._revisions):
            records.pop(pod, None)

    def has_ended(self, lease: Lease) -> bool:
        """False if only an earlier lease of the pod has ended."""
        created_at, version = self.ended.get(lease.pod, (-1.0, -1))
        return lease.created_at <= created_at and lease.version <= version

    def may_hold(self, pod: PodUid) -> bool:
        """Before the first sync any pod may hold a lease."""
        return pod in self.leases or not (self.synced or pod in self.ended)

    def find(self, pod: PodUid) -> Lease | None:
        return self.leases.get(pod)

    def sync(self, listed: Iterable[Lease], *, since: int) -> None:
        """A lease that was known at revision `since`, and is not in the list, has ended."""
        complete = tuple(listed)
        self.synced = True
        self.observe_reply(complete, since=since)
        there = {lease.pod for lease in complete}
        for pod in self.leases.keys() - there:
            if self._revisions[pod] <= since:
                self._forget(pod)


def was_resized(lease: Lease, earlier: Lease) -> bool:
    """The ledger may have lost writes unnoticed: a later size may have a lower version."""
    return lease.created_at == earlier.created_at and lease.resized_at > earlier.resized_at
