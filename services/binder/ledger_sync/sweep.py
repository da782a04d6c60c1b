"""What happens by itself: reservations expire, and what was freed is offered to who waits."""

import asyncio
import contextlib
from collections.abc import Iterator

from services.binder.ports.ledger import Ledger
from shared.model.clock import Clock
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BindingFailed, PodQueued

SWEEP_S = 1.0
OFFER_S = 0.25
"""How often the capacity number is looked at; hardly more is done while it stands still."""
PASS_ON_S = 0.05
"""What is offered is decided in about this time; if it is refused, others are offered the same."""
OFFER_AGAIN_S = 30.0
"""How often offers that had no answer are looked for although nothing was freed."""


class Sweeper:
    """Looks every second, and at once when told that something was freed."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self._freed = asyncio.Event()
        self._offered_for = -1
        self._offered_at = 0.0
        self._settled = True
        self.resync_needed = False
        """Something may have been ended or offered, and nobody was told."""

    @contextlib.contextmanager
    def resync_on_failure(self) -> Iterator[None]:
        """Record it if what is done here has no answer: it may have been done all the same."""
        try:
            yield
        except UnavailableError:
            self.resync_needed = True
            raise

    def freed(self) -> None:
        """Say that something was freed here: it is offered without delay."""
        self._freed.set()

    async def expire(self) -> list[BindingFailed]:
        """End reservations whose time is over; their pods have to be placed again."""
        if await self.ledger.generation() is None:
            return []
        ended = await self.ledger.expire(self.clock.now())
        if ended:
            self.freed()
        return [
            BindingFailed(
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                reason=f"no binder took the reservation within "
                f"{lease.expires_at - lease.created_at:g} s",
                trace=lease.trace,
            )
            for lease in ended
        ]

    async def offer(self) -> list[PodQueued]:
        """Return the waiting pods that may fit now, if anything was freed since the last time."""
        self._freed.clear()
        if await self.ledger.generation() is None:
            return []
        now, capacity = self.clock.ticks(), await self.ledger.capacity()
        if capacity == self._offered_for and now < self._offered_at + OFFER_AGAIN_S:
            return []
        offers = await self.ledger.waiting_pods.choose_offers(now=self.clock.now())
        self._settled = offers.complete
        if offers.complete:
            self._offered_for, self._offered_at = capacity, now
        return list(offers.pods)

    async def wait(self) -> None:
        """Return when something was freed here, or after a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OFFER_S if self._settled else PASS_ON_S):
                await self._freed.wait()
