"""Whatever happens to timekeepers, every lease is charged weight x (end - begin), to the unit."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.timekeeper.service import Timekeeper
from shared.model.budgets.budget import Period, PolicyType
from shared.model.leases.lease import Lease
from tests.support.servers.valkey import ValkeyServer
from tests.support.stateful import run_machine
from tests.support.timekeeper.accounts import (
    T0,
    TEAM,
    AccountLedger,
    CrashedError,
    Timeline,
    account_ledger,
    budget,
    lease,
)

HOUR_MS = 3_600_000
POLICIES: tuple[dict[str, Any], ...] = (
    {"period": Period.HOUR},
    {"period": Period.DAY, "time_zone": "Europe/Berlin", "rollover_percent": 50},
    {"period": Period.WEEK, "time_zone": "America/Sao_Paulo"},
    {"period": Period.MONTH, "time_zone": "Europe/Berlin"},
    {"type": PolicyType.SLIDING, "length_ms": 6 * HOUR_MS},
    {"type": PolicyType.BUCKET, "refill_units_per_hour": 600_000_000},
    {"type": PolicyType.NONE},
)
steps = st.sampled_from((1, 999, 61_000, 901_000, HOUR_MS, 26 * HOUR_MS + 7, 9 * 24 * HOUR_MS))


class Accounts(RuleBasedStateMachine):
    """Two replicas, which crash, sleep, wake with old knowledge, and count twice."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.accounts: AccountLedger = self.run(
            self.stack.enter_async_context(account_ledger(self.url))
        )
        self.now = T0 - 3 * HOUR_MS
        self.live: dict[str, tuple[Lease, int]] = {}
        self.over: dict[str, tuple[Lease, int, int]] = {}
        self.keepers: list[Timekeeper] = []
        self.made = 0
        self.again: set[str] = set()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def teardown(self) -> None:
        try:
            self.check_totals()
        finally:
            self.run(self.stack.aclose())
            self.runner.close()

    @initialize(policy=st.sampled_from(POLICIES), start=st.integers(0, 40 * 24))
    def begin(self, policy: dict[str, Any], start: int) -> None:
        # Up to 40 days before May, so that the changes of daylight saving are among them.
        self.now -= start * HOUR_MS
        self.accounts.config.given[TEAM] = budget(100, **policy)
        self.keepers = [self.accounts.timekeeper(charge_every_s=1800) for _ in range(2)]

    @rule(step=steps)
    def time_passes(self, step: int) -> None:
        self.now += step

    @rule(mib=st.sampled_from((1, 4_000, 8_000, 16_000)), reserved_ms=st.integers(0, 30_000))
    def bind(self, mib: int, reserved_ms: int) -> None:
        self.made += 1
        held = lease(f"p{self.made}", created_ms=self.now - reserved_ms, mib=mib)
        self.run(self.accounts.journal("held", self.now, held))
        self.live[held.pod] = (held, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ended, since = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.run(self.accounts.journal("ended", self.now, ended))
        self.over[ended.pod] = (ended, since, self.now)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A lease that was given back comes again from its pod's copy: it was held all the time."""
        again, since, _ = self.over.pop(data.draw(st.sampled_from(sorted(self.over))))
        self.run(self.accounts.journal("restored", self.now, again))
        self.live[again.pod] = (again, since)
        self.again.add(again.name)

    @rule(replica=st.integers(0, 1))
    def count(self, replica: int) -> None:
        self.run(self.accounts.count(self.now, keeper=self.keepers[replica]))

    @rule(replica=st.integers(0, 1), at=st.integers(0, 4), after=st.booleans())
    def crash(self, replica: int, at: int, after: bool) -> None:
        keeper = self.accounts.timekeeper(crash_at=at, crash_after=after)
        with suppress(CrashedError):
            self.run(self.accounts.count(self.now, keeper=keeper))
        self.keepers[replica] = self.accounts.timekeeper(charge_every_s=1800)

    @rule(replica=st.integers(0, 1), what=st.sampled_from(("save", "apply_journal")))
    def old_decision(self, replica: int, what: str) -> None:
        """A replica decides, sleeps while the other counts, and only then writes."""
        self.bind(8_000, 0)
        self.now += HOUR_MS
        keeper = self.keepers[replica]
        other = self.keepers[1 - replica]
        timeline = keeper.store
        assert isinstance(timeline, Timeline)
        written = getattr(timeline, what)

        async def late(*decided: Any, **more: Any) -> bool:
            setattr(timeline, what, written)
            ended, since = self.live.pop(max(self.live))
            await self.accounts.journal("ended", self.now, ended)
            self.over[ended.pod] = (ended, since, self.now)
            await self.accounts.count(self.now, keeper=other)
            done: bool = await written(*decided, **more)
            return done

        setattr(timeline, what, late)
        self.run(self.accounts.count(self.now, keeper=keeper))
        setattr(timeline, what, written)

    @rule(policy=st.sampled_from(POLICIES), limit=st.sampled_from((None, 1, 100)))
    def reconfigure(self, policy: dict[str, Any], limit: int | None) -> None:
        bucket = policy.get("type") is PolicyType.BUCKET
        self.accounts.config.given[TEAM] = budget(limit or (100 if bucket else None), **policy)

    @invariant()
    def windows_are_the_sums_of_their_entries(self) -> None:
        charges = self.run(self.accounts.charges())
        for window in self.run(self.accounts.store.windows(TEAM)):
            mine = [entry for entry in charges if entry.window == window.id]
            assert window.used_units == sum(entry.units for entry in mine)
            for entry in mine:
                assert entry.units == entry.weight * (entry.to_ms - entry.from_ms)
                late = entry.pod in self.again  # its gap may reach into windows that are closed
                assert late or window.start_ms <= entry.from_ms
                assert entry.from_ms < entry.to_ms
                assert window.end_ms is None or entry.to_ms <= window.end_ms

    def check_totals(self) -> None:
        """After a last count every tenure is charged wholly, once, without gaps."""
        self.run(self.accounts.count(self.now))
        charges = self.run(self.accounts.charges())
        weights = {1: 1, 4_000: 250, 8_000: 500, 16_000: 1000}
        live = [(held, since, self.now) for held, since in self.live.values()]
        self.accounts.config.given[TEAM] = budget(7, period=Period.HOUR)
        self.run(self.accounts.count(self.now))
        charges = self.run(self.accounts.charges())
        for held, since, until in (*self.over.values(), *live):
            mine = [entry for entry in charges if entry.lease.startswith(f"{held.pod}/")]
            weight = weights[held.shares[0].memory_mib]
            assert sum(entry.units for entry in mine) == weight * (until - since), held.pod
            ends = [since, *(entry.to_ms for entry in mine)]
            assert [entry.from_ms for entry in mine] == ends[:-1]
            assert all(entry.weight == weight for entry in mine)


def test_gpusharing_12_and_14_every_total_is_exact(server: ValkeyServer) -> None:
    Accounts.url = server.url
    run_machine(Accounts, examples=40, steps=25)
