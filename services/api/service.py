"""The API: observes events, reads changes from the ledger, and publishes them to pages.

The change feed and events only mark what is stale; values are always read as a whole, so nothing
depends on receiving every event once and in order. A periodic resync finds the rest.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from msgspec import structs

from services.api.projection.lease_views import finished_pod
from services.api.projection.problems import (
    API_SERVER,
    NATS_SERVER,
    REDIS,
    AffectedObject,
    ComponentMonitor,
    DataAge,
    Problem,
    clock_problems,
    slow_servers,
)
from services.api.projection.projection import DATA, PROBLEMS, ChangeKey, Projection
from services.api.projection.recent_events import PodEvent, pod_of
from services.api.projection.visible_cluster import NamespaceFilter, VisibleCluster, all_namespaces
from services.api.reports.cluster_metrics import export_cluster, export_servers, observe_bound
from services.api.reports.history import RANGES, sample_of
from services.api.reports.promises import PromiseJournal, export_promises
from services.api.reports.recent_history import RecentHistory
from shared.ledger.connection_pool import LATEST_REPLIES, LedgerClock
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.ledger.waiting_pods import GatedPods
from shared.model.clock import Clock, wait_for_event
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.pod_events import BudgetChanged, Heartbeat, LeaseChanged, PodBound
from shared.model.events.request_reply import (
    DryRunRequest,
    GrantRequest,
    ReadUsage,
    ResizeRequest,
    UsageRequest,
)
from shared.model.leases.lease import IDLE_AFTER_S, Lease, LeaseState
from shared.model.leases.ledger import LedgerChange, LedgerSnapshot, WaitingPod
from shared.model.names import NodeName, PodUid
from shared.model.quantity import parse_decimal
from shared.runtime.service import loops, observes, publishes

MAX_CHANGES = 2_000
MOST_GONE = 2_000


class ChangeFeed:
    """A reader that is further behind must start again."""

    def __init__(self) -> None:
        self.id = uuid4().hex[:12]
        self.version = 0
        self._rounds: deque[tuple[int, frozenset[ChangeKey]]] = deque(maxlen=MAX_CHANGES)
        self._changed = asyncio.Event()

    @property
    def position(self) -> str:
        return f"{self.id}-{self.version}"

    def publish(self, keys: Iterable[ChangeKey]) -> None:
        changed_keys = frozenset(keys)
        if not changed_keys:
            return
        self.version += 1
        self._rounds.append((self.version, changed_keys))
        self._changed.set()
        self._changed = asyncio.Event()

    def since(self, position: str) -> frozenset[ChangeKey] | None:
        """Return None if the position is not known."""
        feed_id, _, number = position.rpartition("-")
        after = parse_decimal(number)
        if feed_id != self.id or after is None or after > self.version:
            return None
        if after < self.version and (not self._rounds or self._rounds[0][0] > after + 1):
            return None
        return frozenset(key for version, keys in self._rounds if version > after for key in keys)

    async def wait_after(self, position: str, *, limit_s: float) -> bool:
        changed = self._changed
        if position != self.position:
            return True
        return await wait_for_event(changed, limit_s)


logger = logging.getLogger(__name__)

NODES_PER_ROUND = 200
PAST_EVICTIONS_S = 3600.0
"""The page shows evictions of this time: longer lists take longer to read."""
REREAD_S = 1.0
"""Delay before an event's nodes and pods are read again: the ledger may change after it."""
RESYNC_S = 30.0
"""Interval at which all is read again, in case an event was lost."""
METRICS_S = 5.0
"""Interval of updated metrics: Prometheus seldom reads more often."""
COMPONENTS_S = 1.0
"""Interval of checks of what is wrong."""
VERSION_S = 5.0
"""Interval of requests that measure how long the API server takes to reply."""
DATA_S = 10.0
"""Interval of notices of how old the data is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiTiming:
    round_s: float = 0.15
    """Interval of reads: changes of the meantime are published together."""
    usage_s: float = 5.0
    """Interval of requests for the measured usage of shares."""
    preemptions_s: float = 5.0
    """Interval of readings of the evictions of the last hour, and of promised starts that ended."""
    finished_s: float = 2.0
    """Interval of records of pods that have finished, which events explain meanwhile."""
    idle_after_s: float = IDLE_AFTER_S
    """A share that has not been used for so long is marked as idle."""


@publishes(UsageRequest, ResizeRequest, GrantRequest, DryRunRequest)
class ApiService:
    """Any number of replicas may run: each receives all events."""

    def __init__(
        self,
        ledger: RedisLeases,
        clock: Clock,
        *,
        read_usage: ReadUsage,
        preemptions: Preemptions,
        ledger_clock: LedgerClock,
        read_version: Callable[[], Awaitable[object]] | None = None,
        timing: ApiTiming | None = None,
    ) -> None:
        self.ledger = ledger
        self.clock = clock
        self.ledger_clock = ledger_clock
        self.read_version = read_version
        self.read_usage = read_usage
        self.preemptions = preemptions
        self.timing = timing or ApiTiming()
        self.projection = Projection()
        self.history = RecentHistory()
        self.promises = PromiseJournal()
        self.components = ComponentMonitor(clock.now())
        self.feed = ChangeFeed()
        self.missing: list[AffectedObject] = []
        self.clocks: Mapping[str, tuple[str, float]] = {}
        """By name, the service, and by how many seconds its clock is ahead of most."""
        self.replies_s: Mapping[str, float] = {}
        self._replies_of_api_server: deque[float] = deque(maxlen=LATEST_REPLIES)
        self.data = DataAge()
        self.synced = False
        self._stale_nodes: set[NodeName] = set()
        self._stale_pods: set[PodUid] = set()
        self._all_pods_stale = True
        self._wake = asyncio.Event()
        self._problems: tuple[Problem, ...] = ()
        self._ended: dict[PodUid, tuple[Lease, float]] = {}
        self.gone: deque[tuple[float, Lease | WaitingPod]] = deque(maxlen=MOST_GONE)
        """The last leases that have ended and pods that do not wait any more, and when."""

    def unready_reason(self) -> str | None:
        return None if self.synced else "the ledger was not read yet"

    def cluster(
        self, visible: NamespaceFilter, idle_after_s: float | None = None
    ) -> VisibleCluster:
        return VisibleCluster(
            projection=self.projection,
            components=[
                *self.missing,
                *slow_servers(self.replies_s),
                *clock_problems(self.clocks),
            ],
            data=self.data,
            visible=visible,
            now=self.clock.now(),
            idle_after_s=self.timing.idle_after_s if idle_after_s is None else idle_after_s,
        )

    async def begin(self) -> None:
        self.components.started_at = self.clock.now()

    # Events

    @observes
    async def observe_pod_events(self, events: Sequence[PodEvent]) -> None:
        times_of = self.projection.events.times_of
        bound = {event.lease.pod: event for event in events if isinstance(event, PodBound)}
        first = [event for pod, event in bound.items() if "bound" not in times_of(pod)]
        self.feed.publish(self.projection.add_events(events, self.clock.now()))
        for event in first:
            observe_bound(event, times_of(event.lease.pod))
        affected = [pod_of(event) for event in events]
        self._mark_stale_twice(
            {NodeName(node) for *_, node in affected if node},
            {pod for pod, *_ in affected if pod},
        )

    @observes
    async def observe_leases(self, events: Sequence[LeaseChanged]) -> None:
        self._mark_stale({event.lease.node for event in events})

    @observes
    async def observe_budgets(self, events: Sequence[BudgetChanged]) -> None:
        self.feed.publish(self.projection.update_budgets(events))

    @observes
    async def observe_heartbeats(self, events: Sequence[Heartbeat]) -> None:
        for event in events:
            self.components.record(event, self.clock.now())

    # Reads of the ledger

    @loops
    async def follow_ledger(self) -> None:
        snapshot = await self.ledger.snapshot()
        self._mark_all_stale(snapshot)
        async for changes in self.ledger.changes(snapshot.position):
            self._mark_stale(name for change in changes for name in self._nodes_of(change))

    @loops(every_s=RESYNC_S, waits_first=True)
    async def resync(self) -> None:
        """An event or a change may have been missed."""
        self._mark_all_stale(await self.ledger.snapshot())

    @loops(every_s=lambda service: service.timing.round_s)
    async def refresh_all(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        while self._stale_nodes or self._stale_pods or self._all_pods_stale:
            await self.refresh()
        self.synced = True

    async def refresh(self) -> None:
        """If it fails, they stay stale."""
        nodes = sorted(self._stale_nodes)[:NODES_PER_ROUND]
        pods = sorted(self._stale_pods)
        all_pods = self._all_pods_stale
        self._stale_nodes.difference_update(nodes)
        self._stale_pods = set()
        self._all_pods_stale = False
        try:
            totals = await self.ledger.totals.of_nodes(nodes) if nodes else []
            before = self.projection.leases_of(nodes)
            waited = dict(self.projection.waiting)
            changed = self.projection.update_nodes(nodes, totals)
            self._record_ended(before, self.projection.leases_of(nodes))
            if all_pods:
                changed |= self.projection.update_waiting(await self.ledger.waiting_pods.load())
            elif pods:
                waiting = await self.ledger.waiting_pods.load(pods)
                changed |= self.projection.update_waiting(waiting, requested=pods)
            left = waited.keys() - self.projection.waiting.keys()
            self.gone.extend((self.clock.now(), waited[pod]) for pod in left)
        except BaseException:
            self._stale_nodes.update(nodes)
            self._stale_pods.update(pods)
            self._all_pods_stale = self._all_pods_stale or all_pods
            self._wake.set()
            raise
        self.feed.publish(changed)

    @loops(every_s=COMPONENTS_S)
    async def watch_problems(self) -> None:
        nodes = {view.node for view in self.projection.devices.values()}
        now = self.clock.now()
        self.missing = self.components.missing(nodes, now)
        self.clocks = self.components.clocks(self._clock_of_redis(now), now)
        self.replies_s = {
            REDIS: self.ledger_clock.slowest_reply_s,
            NATS_SERVER: self.components.lateness_s(),
            API_SERVER: max(self._replies_of_api_server, default=0.0),
        }
        cluster = self.cluster(all_namespaces)
        affected = {(item.name, item.cause) for item in cluster.affected_objects()}
        self.feed.publish(self.projection.add_problems(affected, self.clock.now()))
        problems = cluster.all_problems()
        if problems != self._problems:
            self._problems = problems
            self.feed.publish({PROBLEMS})

    def _clock_of_redis(self, now: float) -> dict[str, float]:
        try:
            return {REDIS: self.ledger_clock.now() - now}
        except UnavailableError:
            return {}

    @loops(every_s=VERSION_S)
    async def measure_api_server(self) -> None:
        if self.read_version is None:
            return
        began_s = self.clock.ticks()
        with suppress(LeaseholdError):
            await self.read_version()
        self._replies_of_api_server.append(self.clock.ticks() - began_s)

    @loops(every_s=DATA_S)
    async def publish_data_age(self) -> None:
        """This also shows that the stream goes on."""
        self.feed.publish({DATA})

    @loops(every_s=METRICS_S, waits_first=True)
    async def export_metrics(self) -> None:
        export_cluster(self.projection, self.missing, self.clock.now())
        export_servers(self.clocks, self.replies_s)
        now = self.clock.now()
        export_promises(self.promises.view(all_namespaces, now, None, None).total)

    @loops(every_s=lambda service: service.timing.usage_s)
    async def update_usage(self) -> None:
        """A node that does not reply has no usage."""
        nodes = [view.node for view in self.projection.nodes.values() if view.devices]
        usage = await self.read_usage(nodes)
        now = self.clock.now()
        after_s = self.timing.idle_after_s
        if any(usage.values()):
            self.data = structs.replace(self.data, usage_at=now)
        update = self.projection.update_measured
        changes = [
            update(name, reply, now=now, idle_after_s=after_s) for name, reply in usage.items()
        ]
        self.feed.publish(frozenset[ChangeKey]().union(*changes))

    @loops(every_s=lambda service: service.timing.preemptions_s)
    async def watch_preemptions(self) -> None:
        """Evictions are not published as events."""
        state = await self.preemptions.state(now=self.clock.now(), past_s=PAST_EVICTIONS_S)
        self.data = structs.replace(self.data, ledger_at=self.clock.now())
        self.feed.publish(self.projection.update_preemptions(state))

    @loops(every_s=lambda service: service.timing.preemptions_s)
    async def read_promises(self) -> None:
        await self.promises.read(self.preemptions)

    @loops(every_s=lambda service: service.timing.preemptions_s)
    async def watch_gated_pods(self) -> None:
        store = self.ledger.part(GatedPods)
        pods = [
            pod for namespace in await store.namespaces() for pod in await store.load(namespace)
        ]
        self.feed.publish(self.projection.update_gated(pods))

    @loops(every_s=RESYNC_S)
    async def read_run_times(self) -> None:
        self.projection.run_times = await self.ledger.run_times.load()

    @loops(every_s=lambda service: service.until_sample_s)
    async def sample_history(self) -> None:
        if self.synced:
            devices = list(self.projection.devices.values())
            reasons = [waiting.reason_code for waiting in self.projection.waiting_pods()]
            make = partial(sample_of, devices, reasons, dict(self.projection.hardware))
            self.history.add(await asyncio.to_thread(make), self.clock.now())

    @property
    def until_sample_s(self) -> float:
        return RANGES[0].step_s if self.synced else self.timing.round_s

    @loops(every_s=lambda service: service.timing.finished_s)
    async def record_finished(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, {}
            events = self.projection.events
            pods = [
                finished_pod(lease, at, events.end_of(pod)) for pod, (lease, at) in ended.items()
            ]
            self.history.add_finished(pods, self.clock.now())

    def _record_ended(self, before: Mapping[PodUid, Lease], after: Mapping[PodUid, Lease]) -> None:
        now = self.clock.now()
        for pod in before.keys() - after.keys():
            self.gone.append((now, before[pod]))
            if before[pod].state is not LeaseState.RESERVED:
                self._ended[pod] = before[pod], now
        for pod in after:
            self._ended.pop(pod, None)

    def _mark_all_stale(self, snapshot: LedgerSnapshot) -> None:
        self._all_pods_stale = True
        self._mark_stale({*self.projection.nodes, *(node.facts.name for node in snapshot.nodes)})
        self._wake.set()

    def _mark_stale(self, nodes: Iterable[NodeName], pods: Iterable[PodUid] = ()) -> None:
        self._stale_nodes.update(nodes)
        self._stale_pods.update(pods)
        if self._stale_nodes or self._stale_pods:
            self._wake.set()

    def _mark_stale_twice(self, nodes: set[NodeName], pods: set[PodUid]) -> None:
        self._mark_stale(nodes, pods)
        loop = asyncio.get_running_loop()
        loop.call_later(REREAD_S, self._mark_stale, nodes, pods)

    def _nodes_of(self, change: LedgerChange) -> set[NodeName]:
        devices = self.projection.devices
        return {
            *(node.facts.name for node in change.nodes),
            *change.removed,
            *change.used,
            *(devices[uuid].node for uuid in change.devices if uuid in devices),
        }
