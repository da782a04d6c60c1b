"""Expiry of reservations, and offers of freed capacity to waiting pods."""

import asyncio
import contextlib
from collections.abc import Iterator

from services.binder.ledger_sync.ledger_updates import binding_failed
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, until_next, wait_for_event
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BindingFailed, PodQueued, ResyncRequested

SWEEP_S = 1.0
OFFER_S = 0.5
"""How often the capacity number is read while pods wait, else every `SWEEP_S`; nothing else is done
while it does not change."""
NEXT_OFFER_S = 0.05
"""An offer is decided in about this time; if it is refused, the next pods get the same offer."""
REPEAT_OFFERS_S = 30.0
"""Interval of offers without freed capacity, in case an offer was lost."""


class Sweeper:
    """Sweeps every second, and at once when capacity was freed here."""

    def __init__(self, ledger: RedisLeases, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self._freed = asyncio.Event()
        self._offered_capacity = -1
        self._offered_at = 0.0
        self._offers_complete = True
        self._have_waited = False
        """Whether pods waited when the ledger's status was read last."""
        self._resync_needed = False
        """Whether something may have ended or been offered without an event."""

    @contextlib.contextmanager
    def resync_on_failure(self) -> Iterator[None]:
        """Require a resync if the block fails: its write may have succeeded nevertheless."""
        try:
            yield
        except UnavailableError:
            self._resync_needed = True
            raise

    def capacity_freed(self) -> None:
        """Offer capacity that was freed here without delay."""
        self._freed.set()

    async def expire(self) -> list[BindingFailed | ResyncRequested]:
        """End reservations that have expired; their pods must be placed again."""
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
        ended = await self.ledger.expire(self.clock.now())
        if ended:
            self.capacity_freed()
        return [
            binding_failed(
                lease,
                "no binder committed the reservation within "
                f"{lease.expires_at - lease.created_at:g} s",
                lease.trace,
            )
            for lease in ended
        ]

    async def offer(self) -> list[PodQueued]:
        """Return the waiting pods that may fit now, if capacity was freed since the last time."""
        now, has_freed = self.clock.ticks(), self._freed.is_set()
        self._freed.clear()
        max_age_s = 0.0 if has_freed or not self._offers_complete else OFFER_S / 2
        status = await self.ledger.status(now=now, max_age_s=max_age_s)
        if status is None:
            return []
        capacity, self._have_waited = status.capacity, status.waiting > 0
        if capacity == self._offered_capacity and now < self._offered_at + REPEAT_OFFERS_S:
            return []
        offers = await self.ledger.waiting_pods.choose_offers(now=self.clock.now())
        self._offers_complete = offers.complete
        if offers.complete:
            self._offered_capacity, self._offered_at = capacity, now
        return list(offers.pods)

    async def wait(self) -> None:
        """Return when capacity was freed here, or after a pause."""
        every_s = OFFER_S if self._have_waited else SWEEP_S
        pause_s = until_next(self.clock.ticks(), every_s) if self._offers_complete else NEXT_OFFER_S
        await wait_for_event(self._freed, pause_s)
