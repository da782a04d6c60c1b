"""What a rebuild reads of a real ledger grows with the cluster, and each reply stays small."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.binder.ledger_sync.rebuild import LedgerRebuild, RebuildTiming
from shared.ledger.connection import LedgerConnection
from shared.ledger.leases import RedisLeases
from shared.ledger.rebuild_evidence import LedgerStaging
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.pod_events import LedgerRebuilt, ListedPods, PodsListed
from shared.model.lease import Lease
from tests.support.binder.claims import holders
from tests.support.binder.events import activation, bound, report
from tests.support.binder.world import FakePods, lease

PODS_PER_CHUNK = 5


class CountedConnection(LedgerConnection):
    """Notes the size of each script's reply."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(url, prefix=prefix)
        self.reply_bytes: list[int] = []

    async def run_raw(
        self, script: str, *args: object, state: str = "ready", tail: bytes = b""
    ) -> Any:
        reply = await super().run_raw(script, *args, state=state, tail=tail)
        parts = reply if isinstance(reply, list) else [reply]
        self.reply_bytes.append(sum(len(part or b"") for part in parts))
        return reply


class ReportingClock(SystemClock):
    """While the rebuild sleeps, one more node reports."""

    def __init__(self, staging: LedgerStaging, leases: Sequence[Lease]) -> None:
        self.staging = staging
        self.left = list(leases)

    async def sleep(self, duration_s: float) -> None:
        if self.left:
            of = self.left.pop()
            await self.staging.save_reports([report(of.node, activation(of))])


async def reply_bytes(url: str, nodes: int) -> list[int]:
    """Rebuild a ledger of so many nodes, which report one after the other."""
    leases = [lease(f"p{number}", f"n{number}") for number in range(nodes)]
    prefix = f"lh-size-{nodes}:"
    async with (
        CountedConnection(url, prefix) as connection,
        LedgerStaging.connect(url, prefix=prefix) as elsewhere,
    ):
        staging = LedgerStaging(connection)

        async def publish(events: Sequence[Event]) -> None:
            [request] = events
            await RedisLeases(connection).quotas.save((), read_at=0.0)
            firsts = range(0, nodes, PODS_PER_CHUNK)
            for number, first in enumerate(firsts):
                pods = tuple(map(bound, leases[first : first + PODS_PER_CHUNK]))
                await elsewhere.save_chunk(
                    PodsListed(
                        listing_id="l1",
                        chunk=number,
                        chunks=len(firsts),
                        pods=ListedPods(bound=pods),
                        request_ids=(request.request_id,),  # type: ignore[attr-defined]
                    )
                )

        rebuild = LedgerRebuild(
            ledger=RedisLeases(connection),
            staging=staging,
            publish=publish,
            holders=holders(FakePods()),
            clock=ReportingClock(elsewhere, leases),
            bindings_in_flight=lambda: 0,
            timing=RebuildTiming(settle_s=0.0, poll_s=0.0),
        )
        assert any(isinstance(event, LedgerRebuilt) for event in await rebuild.step())
        read = list(connection.reply_bytes)
        found = [each async for page in RedisLeases(connection).load_all() for each in page]
        assert len(found) == nodes
        return read


@pytest.mark.parametrize(("few", "many"), [(40, 160)])
async def test_what_a_rebuild_reads_is_in_proportion_to_the_nodes(
    url: str, few: int, many: int
) -> None:
    of_few, of_many = await reply_bytes(url, few), await reply_bytes(url, many)

    assert sum(of_many) < 1.2 * many / few * sum(of_few)
    assert len(of_many) < 1.2 * many / few * len(of_few)
    assert max(of_many) < 2 * max(of_few)
