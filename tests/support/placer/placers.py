"""Placers on a real ledger, each following it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.placer.metrics import PrometheusPlacerMetrics
from services.placer.service import Placer
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from tests.support.build import dice
from tests.support.waiting import until


class FakePlacerMetrics(PrometheusPlacerMetrics):
    """Decisions by outcome."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, outcome: str, amount: int = 1) -> None:
        self.counts[outcome] += amount


@asynccontextmanager
async def placers(leases: RedisLeases, count: int) -> AsyncIterator[list[Placer]]:
    """Start independent placers; yield them once they can decide."""
    several = [
        Placer(leases, SystemClock(), FakePlacerMetrics(), dice(seed), ttl_s=30.0)
        for seed in range(count)
    ]
    following = [asyncio.create_task(placer.follow_ledger()) for placer in several]
    try:
        await until(lambda: not any(placer.unready_reason() for placer in several))
        yield several
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
