"""Expiry of reservations, and offers of freed capacity to waiting pods."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.binder.clients import PodClient
from services.binder.ledger_sync.ledger_updates import binding_failed
from shared.ledger.leases import RedisLeases
from shared.ledger.waiting_pods import WaitingPods
from shared.model.clock import Clock, until_next, wait_for_event
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.pod_events import (
    BindingFailed,
    PodFilteredOut,
    PodHandedOver,
    PodQueued,
    ResyncRequested,
)
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import WaitingPod, waits_for_kube_scheduler
from shared.model.names import OFFER, NodeName, PodUid
from shared.runtime.service import handles, loops

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
"""What expires, ends or is freed is noticed this late, at most."""
OFFER_S = 0.5
"""How often the capacity number is read while pods wait, else every `SWEEP_S`."""
NEXT_OFFER_S = 0.05
"""An offer is decided in about this time; if it is refused, the next pods get it."""
GANG_S = 2.0
"""While pods of a gang come or go, the verdicts of all of them are decided again this often."""
REPEAT_OFFERS_S = 30.0
"""Interval of offers without freed capacity, in case an offer was lost."""
OFFER_CONCURRENCY = 8


@dataclass(eq=False)
class Sweeper:
    ledger: RedisLeases
    clock: Clock
    forsake: Callable[[Iterable[Lease]], None]
    """Undoes what was written to claims."""

    def __post_init__(self) -> None:
        self._offered_capacity = -1
        self._offered_at = 0.0
        self._gangs_at = 0.0
        self._offers_complete = True
        self._have_waited = False
        self._resync_needed = False

    @contextlib.contextmanager
    def resync_on_failure(self) -> Iterator[None]:
        """A write that fails may have succeeded nevertheless."""
        try:
            yield
        except UnavailableError:
            self._resync_needed = True
            raise

    @loops(every_s=SWEEP_S)
    async def expire_reservations(self) -> list[BindingFailed | ResyncRequested]:
        if self._resync_needed:
            await self.ledger.generation()
            self._resync_needed = False
            return [ResyncRequested(reason="the ledger was unavailable")]
        with self.resync_on_failure():
            return [*await self._expire()]

    async def _expire(self) -> list[BindingFailed]:
        status = await self.ledger.status(now=self.clock.ticks())
        if status is None or not 0 < status.expires_at <= self.clock.now():
            return []
        expired = await self.ledger.expire(self.clock.now())
        self.forsake(expired)
        return [
            binding_failed(
                lease,
                "no binder committed the reservation within "
                f"{lease.expires_at - lease.created_at:g} s",
                lease.trace,
            )
            for lease in expired
        ]

    async def offer(self) -> list[PodQueued]:
        now = self.clock.ticks()
        has_freed = self.ledger.freed.is_set()
        self.ledger.freed.clear()
        max_age_s = 0.0 if has_freed or not self._offers_complete else OFFER_S / 2
        status = await self.ledger.status(now=now, max_age_s=max_age_s)
        if status is None:
            return []
        capacity = status.capacity
        self._have_waited = status.waiting > 0
        if not status.changed_gangs:
            self._gangs_at = now + GANG_S
        with_gangs = now >= self._gangs_at
        is_due = capacity != self._offered_capacity or now >= self._offered_at + REPEAT_OFFERS_S
        if not (is_due or with_gangs):
            return []
        offers = await self.ledger.waiting_pods.choose_offers(
            now=self.clock.now(), with_gangs=with_gangs
        )
        if with_gangs:
            self._gangs_at = now + GANG_S
        self._offers_complete = offers.complete
        if offers.complete:
            self._offered_capacity = capacity
            self._offered_at = now
        return list(offers.pods)

    async def wait(self) -> None:
        every_s = OFFER_S if self._have_waited else SWEEP_S
        pause_s = until_next(self.clock.ticks(), every_s) if self._offers_complete else NEXT_OFFER_S
        await wait_for_event(self.ledger.freed, pause_s)


@dataclass(eq=False)
class SchedulerOffers:
    """Makes kube-scheduler try a waiting pod again, once the ledger may have room for it.

    It does so when a pod changes, so an annotation of the pod is written.
    https://kubernetes.io/docs/concepts/scheduling-eviction/scheduling-framework/#queueinghint
    """

    waiting_pods: WaitingPods
    pods: PodClient
    clock: Clock

    def __post_init__(self) -> None:
        self._writes = asyncio.Semaphore(OFFER_CONCURRENCY)

    @handles
    async def save_handed_over(self, events: Sequence[PodHandedOver]) -> None:
        newest = {event.queued.pod: event for event in events}
        now = self.clock.now()
        await self.waiting_pods.hand_over(
            [
                waits_for_kube_scheduler(event.queued, event.reason, now)
                for event in newest.values()
                if not event.bound
            ]
        )
        await self.waiting_pods.remove_bound([pod for pod, event in newest.items() if event.bound])

    @handles
    async def save_filtered_out(self, events: Sequence[PodFilteredOut]) -> None:
        newest = {event.queued.pod: event for event in events}
        now = self.clock.now()
        waiting = [
            WaitingPod(
                queued=event.queued,
                refusal=event.refusal,
                capacity=event.capacity,
                waiting_since=now,
            )
            for event in newest.values()
        ]
        result = await self.waiting_pods.enqueue(waiting)
        await self.make(newest[pod].queued for pod in result.stale)

    async def make(self, pods: Iterable[PodQueued]) -> list[PodQueued]:
        """Offer what was freed to pods of kube-scheduler; return the others."""
        others = list(pods)
        ours = [pod for pod in others if pod.by_kube_scheduler]
        await asyncio.gather(*(self.offer(pod.namespace, pod.name, pod.pod) for pod in ours))
        return [pod for pod in others if not pod.by_kube_scheduler]

    async def offer(
        self, namespace: str, name: str, uid: PodUid, node: NodeName | None = None
    ) -> None:
        value = f"{node or ''}@{self.clock.now() * 1000:.0f}"
        async with self._writes:
            try:
                await self.pods.annotate(namespace, name, uid, {OFFER: value})
            except LeaseholdError as error:
                logger.info("pod %s/%s was not offered capacity: %s", namespace, name, error)
