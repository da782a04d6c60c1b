"""Reads the pods of a gang from the API server before the first of them is bound.

A pod may have been deleted after its gang was counted, and its event may not have arrived yet.
"""

import asyncio
from collections.abc import Iterable

from services.binder.ledger_sync.current_pods import CurrentPods
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.pod_client import PodClient
from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import (
    BindingFailed,
    LeaseChanged,
    PlacementChosen,
    PodTerminated,
)
from shared.model.lease import LeaseState


class GangCheck:
    """Ends the reservations of gangs that have lost a pod before any of their pods was bound."""

    def __init__(self, ledger: RedisLeases, pods: PodClient, updater: LedgerUpdater) -> None:
        self.ledger = ledger
        self.current_pods = CurrentPods(pods)
        self.updater = updater
        self._checks: dict[str, asyncio.Task[list[PodTerminated]]] = {}

    async def end_short(
        self, placements: Iterable[PlacementChosen]
    ) -> list[LeaseChanged | BindingFailed]:
        """Check the gangs of these pods; return events for the leases that ended.

        Raises UnavailableError while the API server does not respond.
        """
        gangs = sorted({each.lease.gang for each in placements if each.lease.gang})
        if not gangs:
            return []
        found = await asyncio.gather(*map(self._check_once, gangs))
        gone = [event for events in found for event in events]
        return await self.updater.end_terminated(gone) if gone else []

    async def _check_once(self, gang: str) -> list[PodTerminated]:
        """Check a gang; several batches with its pods share one check."""
        check = self._checks.get(gang)
        if check is None:
            check = self._checks[gang] = asyncio.create_task(self._find_gone(gang))
            check.add_done_callback(lambda done: self._forget(gang, done))
        return await asyncio.shield(check)

    def _forget(self, gang: str, check: asyncio.Task[list[PodTerminated]]) -> None:
        """Forget a check that has ended; nothing may wait for its error any more."""
        self._checks.pop(gang, None)
        if not check.cancelled():
            check.exception()

    async def _find_gone(self, gang: str) -> list[PodTerminated]:
        leases = await self.ledger.load_gang(gang)
        if any(lease.state is not LeaseState.RESERVED for lease in leases):
            return []
        return [
            PodTerminated(
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                node=None,
                phase="",
                trace=lease.trace,
            )
            for lease, pod in await self.current_pods.read(leases)
            if pod is None or pod.terminal or pod.deleting
        ]
