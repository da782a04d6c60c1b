"""Statuses are written again after a clock was set back."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.timekeeper.config.budget_sources import ConfiguredObjects
from services.timekeeper.report.status_publisher import RETRY_MS, USAGE_MS, StatusPublisher
from shared.kubernetes.kinds.custom_kinds import LatestSpecs
from shared.kubernetes.kinds.gpu_quotas import OBJECTS, parse_spec
from shared.kubernetes.types import ObjectMeta, RawObject
from shared.model.budgets.quota import QuotaTotals, QuotaUsage
from shared.model.errors import UnavailableError
from shared.model.names import Namespace

NOW_MS = 1_900_000_000_000
DAY_MS = 86_400_000
TEAM = Namespace("team")


class ApiServer:
    """Takes what is written to it, unless it is away; the timekeeper watches it."""

    def __init__(self) -> None:
        self.is_away = False
        self.written: list[Any] = []
        self.quotas = LatestSpecs(parse_spec)

    async def patch_json(self, _: str, operations: Sequence[Any]) -> None:
        if self.is_away:
            raise UnavailableError("no response")
        self.written.append(operations[0]["value"])
        self.show(self.written[-1])

    def show(self, status: Any) -> None:
        metadata = ObjectMeta(name=TEAM, generation=1)
        self.quotas.apply(RawObject(metadata=metadata, spec={"maxCards": 1}, status=status))


class Ledger:
    """What leases hold: more at each reading."""

    def __init__(self) -> None:
        self.milli_gpu = 0

    async def totals(self, *, charges: bool) -> QuotaTotals:
        self.milli_gpu += 1
        used = {TEAM: {"": QuotaUsage(milli_gpu=self.milli_gpu)}}
        return QuotaTotals(quotas={}, used=used)


@pytest.fixture
def server() -> ApiServer:
    made = ApiServer()
    made.show(None)
    return made


@pytest.fixture
def publisher(server: ApiServer) -> StatusPublisher:
    objects = ConfiguredObjects(server, OBJECTS, server.quotas)  # type: ignore[arg-type]
    return StatusPublisher(quotas=objects)


async def test_a_status_is_written_after_a_clock_was_set_back(
    server: ApiServer, publisher: StatusPublisher
) -> None:
    ledger: Any = Ledger()

    await publisher.publish_quotas(ledger, NOW_MS + DAY_MS)
    await publisher.publish_quotas(ledger, NOW_MS + DAY_MS + USAGE_MS - 1)
    assert len(server.written) == 1
    await publisher.publish_quotas(ledger, NOW_MS)

    assert len(server.written) == 2


async def test_after_a_write_without_a_response_statuses_wait_for_half_a_minute_only(
    server: ApiServer, publisher: StatusPublisher
) -> None:
    ledger: Any = Ledger()
    server.is_away = True
    await publisher.publish_quotas(ledger, NOW_MS + DAY_MS)
    server.is_away = False

    await publisher.publish_quotas(ledger, NOW_MS + DAY_MS + RETRY_MS - 1)
    assert not server.written
    await publisher.publish_quotas(ledger, NOW_MS)
    await publisher.publish_quotas(ledger, NOW_MS + USAGE_MS)

    assert len(server.written) == 2
