"""What a binder remembers of lists of pods and agents' reports, to compare and to rebuild."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.model.clock import ExpiringMap
from shared.model.events.node_events import Allocation, DeviceReported, DevicesRegistered
from shared.model.events.pod_events import LEASE_PRESENT, ListedPods, PodsListed
from shared.model.names import NodeName
from shared.runtime.service import observes

MOST_LISTINGS = 4
LISTING_S = 600.0
"""How long a list of pods of which parts are missing is kept."""
MOST_REPORTS = 16
"""Of one node: one that always reports something else would hold up a rebuild."""


@dataclass(slots=True)
class Listing:
    chunks: int
    pages: dict[int, ListedPods] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.pages) >= self.chunks


class CollectedEvidence:
    """Reports and the leases' texts are kept only while this binder rebuilds."""

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._listings: ExpiringMap[str, Listing] = ExpiringMap(
            ticks, expires_s=LISTING_S, most=MOST_LISTINGS
        )
        self._answers: ExpiringMap[str, str] = ExpiringMap(
            ticks, expires_s=LISTING_S, most=MOST_LISTINGS
        )
        """The complete list that answers each request."""
        self._is_rebuilding = False
        self._newest: dict[NodeName, DeviceReported] = {}
        self._counts = Counter[NodeName]()
        self._unread: dict[NodeName, tuple[Allocation, ...]] = {}

    @observes
    async def observe_lists(self, events: Sequence[PodsListed]) -> None:
        self.add_chunks(events)

    @observes
    async def observe_reports(self, events: Sequence[DeviceReported | DevicesRegistered]) -> None:
        self.add_reports(events)

    def add_chunks(self, chunks: Iterable[PodsListed]) -> None:
        for chunk in chunks:
            listing = self._listings.get(chunk.listing_id) or Listing(chunk.chunks)
            pods = chunk.pods if self._is_rebuilding else _without_leases(chunk.pods)
            listing.pages[chunk.chunk] = pods
            self._listings.set(chunk.listing_id, listing)
            for request_id in chunk.request_ids if listing.is_complete else ():
                self._answers.set(request_id, chunk.listing_id)

    def listed(self, listing_id: str) -> list[ListedPods] | None:
        listing = self._listings.get(listing_id)
        if listing is None or not listing.is_complete:
            return None
        return list(listing.pages.values())

    def answer_to(self, request_id: str) -> list[ListedPods] | None:
        """Return a complete list that began after this request, or None."""
        listing_id = self._answers.get(request_id)
        return None if listing_id is None else self.listed(listing_id)

    def begin_rebuild(self) -> None:
        self.end_rebuild()
        self._is_rebuilding = True

    def end_rebuild(self) -> None:
        self._is_rebuilding = False
        for collected in (self._newest, self._counts, self._unread):
            collected.clear()

    def add_reports(self, reports: Iterable[DeviceReported]) -> None:
        for report in reports if self._is_rebuilding else ():
            newest = self._newest.get(report.node)
            if newest is not None and newest.reported_at > report.reported_at:
                continue
            self._newest[report.node] = report
            if newest is not None and newest.allocations == report.allocations:
                continue
            self._counts[report.node] += 1
            if self._counts[report.node] <= MOST_REPORTS:
                self._unread[report.node] = report.allocations

    def take_reports(self) -> Mapping[NodeName, tuple[Allocation, ...]]:
        """Return the newest allocations that have changed since the last call."""
        taken, self._unread = self._unread, {}
        return taken


def _without_leases(pods: ListedPods) -> ListedPods:
    bound = tuple(replace(pod, lease=pod.lease and LEASE_PRESENT) for pod in pods.bound)
    claims = tuple(replace(claim, lease=claim.lease and LEASE_PRESENT) for claim in pods.claims)
    return replace(pods, bound=bound, claims=claims)
