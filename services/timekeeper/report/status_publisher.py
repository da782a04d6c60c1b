"""Who is told how budgets stand: metrics, the objects' statuses, and Kubernetes Events."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from prometheus_client import Counter, Gauge, Histogram

from services.timekeeper.accounts.budget import consequence
from services.timekeeper.config.configuration import API_VERSION, KIND
from services.timekeeper.config.sources import PATH, BudgetObjects
from services.timekeeper.report.statuses import minutes, stamp, status_of
from shared.model.budget import UNITS_PER_GPU_MINUTE, Account, Balance, Budget, BudgetState
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

CHECKPOINT_MS = 60_000
PATIENCE_S = 2.0
AGAIN_MS = 30_000
"""After an API server was silent, so long nothing is written to it: counting must not wait."""

REMAINING = Gauge(
    "leasehold_budget_remaining_gpu_minutes", "GPU-minutes left; none: no limit.", ["namespace"]
)
USED = Gauge("leasehold_budget_used_gpu_minutes", "GPU-minutes used.", ["namespace"])
BURN = Gauge("leasehold_budget_burn_milli_gpu", "Milli-GPU held now.", ["namespace"])
STATE = Gauge("leasehold_budget_state", "1 for the state that it is in.", ["namespace", "state"])
LATE = Histogram(
    "leasehold_budget_late_charge_seconds",
    "How much later than usual held time was charged.",
    buckets=(1, 5, 15, 60, 300, 900, 3600),
)
MISTAKES = Counter(
    "leasehold_ledger_invariant_violations", "What must not happen in the accounts.", ["kind"]
)
for _kind in ("ended-before-charged", "journal-cut"):
    MISTAKES.labels(_kind)  # at 0 from the start, or the first one would be no increase
REPORTS = Counter(
    "leasehold_budget_ignored_reports", "Calls of the proof of concept's /report and /increase."
)


@dataclass(slots=True)
class Told:
    """Metrics always; statuses and Events where there are objects."""

    objects: BudgetObjects | None = None
    _written: dict[Namespace, int] = field(default_factory=dict)
    _silent_until_ms: int = 0

    def late(self, behind_ms: int) -> None:
        """Hear how much later than usual something was charged."""
        LATE.observe(behind_ms / 1000)

    def mistake(self, kind: str, count: int) -> None:
        """Hear of something that must not happen."""
        MISTAKES.labels(kind).inc(count)

    async def tell(self, budget: Budget, account: Account, seen: Balance, *, changed: bool) -> None:
        """Set the metrics, and write the status when something changed, or every minute.

        An API server that is away costs a status, never the counting.
        """
        name = account.namespace
        _measure(budget, seen)
        if self.objects is None or seen.at_ms < self._silent_until_ms:
            return
        fresh = seen.at_ms - self._written.get(name, 0) < CHECKPOINT_MS
        writes: list[Callable[[], Awaitable[object]]] = []
        if name in self.objects.uids and (changed or not fresh):
            self._written[name] = seen.at_ms
            status = status_of(account, seen, problem=self.objects.problems.get(name, ""))
            path = f"{PATH}/{quote(name, safe='')}/status"
            writes.append(partial(self.objects.kube.patch_merge, path, {"status": status}))
        if changed:
            uid = self.objects.uids.get(name, "")
            writes += [
                partial(self.objects.kube.create, _events_of(body), body)
                for body in event_bodies(uid, budget, account, seen)
            ]
        for write in writes:
            if seen.at_ms >= self._silent_until_ms:
                await self._write(write, name, seen.at_ms)

    async def _write(
        self, write: Callable[[], Awaitable[object]], name: Namespace, at_ms: int
    ) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await write()
        except ConflictError:
            return
        except (UnavailableError, TimeoutError) as error:
            self._written.pop(name, None)
            self._silent_until_ms = at_ms + AGAIN_MS
            logger.warning("how the budget of %s stands was not written: %r", name, error)
        except RequestError as error:
            logger.warning("how the budget of %s stands was not written: %s", name, error)


def _measure(budget: Budget, seen: Balance) -> None:
    name = seen.namespace
    USED.labels(name).set(seen.used_units / UNITS_PER_GPU_MINUTE)
    BURN.labels(name).set(seen.current_rate_milli_gpu)
    if seen.remaining_units is not None:
        REMAINING.labels(name).set(seen.remaining_units / UNITS_PER_GPU_MINUTE)
    else:
        with suppress(KeyError):  # it may never have had a limit
            REMAINING.remove(name)
    for state in BudgetState:
        STATE.labels(name, state).set(int(state is seen.state))


def event_bodies(
    uid: str, budget: Budget, account: Account, seen: Balance
) -> Iterator[Mapping[str, Any]]:
    """Yield the core/v1 Events of a change, whose names are the same whoever writes them.

    One is about the object, if there is one with this uid, among those of the whole cluster; one
    about the namespace, in it, where its people look.
    """
    name = account.namespace
    if uid:
        about = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": uid}
        yield _event("default", about, budget, account, seen)
    about = {"apiVersion": "v1", "kind": "Namespace", "name": name, "namespace": name}
    yield _event(name, about, budget, account, seen)


def _events_of(body: Mapping[str, Any]) -> str:
    return f"/api/v1/namespaces/{quote(body['metadata']['namespace'], safe='')}/events"


def _event(
    where: str, about: Mapping[str, str], budget: Budget, account: Account, seen: Balance
) -> Mapping[str, Any]:
    follows = consequence(budget, seen.state)
    left = "no limit" if seen.remaining_units is None else f"{minutes(seen.remaining_units)} left"
    message = (
        f"the GPU budget of namespace {account.namespace} is {seen.state}: "
        f"{minutes(seen.used_units)} GPU-minutes used in {seen.window.id}, {left}; its leases are "
        f"{follows.lease_class}, new pods: {follows.new_pods}"
    )
    told = f"{account.state.since_ms} {seen.state} {seen.warned_percent} {seen.window.id}"
    digest = hashlib.blake2s(told.encode(), digest_size=8).hexdigest()
    at = stamp(seen.at_ms)
    calm = seen.state is BudgetState.OK
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{account.namespace}.{digest}", "namespace": where},
        "involvedObject": dict(about),
        "reason": f"Budget{str(seen.state).capitalize()}",
        "message": message,
        "type": "Normal" if calm else "Warning",
        "source": {"component": "leasehold"},
        "reportingComponent": "leasehold",
        "reportingInstance": "",
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
    }
