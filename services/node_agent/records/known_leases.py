"""The leases of this node that the agent was told of; pure.

News may arrive twice, late, or never: a lease with a lower version than one already seen changes
nothing, and the end of a lease stays in memory long enough for that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.model.lease import LIVE, Lease
from shared.model.names import NodeName, PodUid

MAX_ENDED = 4096


@dataclass(slots=True)
class KnownLeases:
    """By pod, the newest that was said of its lease.

    A pod's leases follow one another in `created_at`, and the states of one lease in `version`; the
    clocks of two placers may differ, so that a higher version is newer whatever its `created_at`.
    """

    node: NodeName
    leases: dict[PodUid, Lease] = field(default_factory=dict)
    ended: dict[PodUid, tuple[float, int]] = field(default_factory=dict)
    """Of ended leases, creation and version; oldest news first."""
    revision: int = 0
    revisions: dict[PodUid, int] = field(default_factory=dict)
    """Number of the news in which each live lease came."""
    synced: bool = False
    """The complete list has been told at least once."""

    def observe(self, leases: Iterable[Lease]) -> list[Lease]:
        """Take news; return what was new in them."""
        return [lease for lease in leases if self._note(lease)]

    def _note(self, lease: Lease) -> bool:
        stamp = (lease.created_at, lease.version)
        known = self.leases.get(lease.pod)
        seen = [self.ended.get(lease.pod, (-1.0, -1))]
        seen += [(known.created_at, known.version)] if known else []
        is_old = any(stamp <= each and lease.version <= each[1] for each in seen)
        if lease.node != self.node or is_old:
            return False
        self.revision += 1
        if lease.state in LIVE:
            self.leases[lease.pod] = lease
            self.revisions[lease.pod] = self.revision
            self.ended.pop(lease.pod, None)
            return True
        self._drop(lease.pod)
        self.ended[lease.pod] = stamp
        while len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]
        return True

    def find(self, pod: PodUid) -> Lease | None:
        """Return the pod's live lease, if one was told."""
        return self.leases.get(pod)

    def sync(self, listed: Iterable[Lease], *, since: int) -> None:
        """Take the complete list of the node's leases, asked for when `news` was `asked_at`.

        A lease that was known before the question, and is not in the answer, has ended.
        """
        complete = tuple(listed)
        self.synced = True
        self.observe(complete)
        there = {lease.pod for lease in complete}
        for pod, heard in list(self.revisions.items()):
            if pod not in there and heard <= since:
                self._drop(pod)

    def _drop(self, pod: PodUid) -> None:
        self.leases.pop(pod, None)
        self.revisions.pop(pod, None)
