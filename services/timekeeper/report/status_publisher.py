"""Publishes budgets as the status of their objects and as Kubernetes Events."""

import asyncio
import hashlib
import logging
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from services.timekeeper.accounts.consequences import consequence
from services.timekeeper.config.budget_sources import BudgetObjects, ConfiguredObjects
from services.timekeeper.config.budget_spec import KIND
from services.timekeeper.report.budget_reports import budget_status, quota_status
from shared.kubernetes.kinds.custom_kinds import API_VERSION, ObjectStatus
from shared.kubernetes.paths import objects_path
from shared.kubernetes.types import RawObject
from shared.ledger.ledger_totals import LedgerQuotas
from shared.model.bounds import cut
from shared.model.budgets.budget import Account, Balance, Budget, BudgetState, LeaseClass, amount
from shared.model.budgets.quota import Quota
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.quantity import timestamp

logger = logging.getLogger(__name__)

CHECKPOINT_MS = 60_000
USAGE_MS = 10_000
_IN_FORCE = ("observedGeneration", "conditions", "specInForce")
WRITE_TIMEOUT_S = 2.0
"""Time limit of a write: counting does not wait, what was not written is written later."""
RETRY_MS = 30_000
"""Pause after a request without a response, so that counting does not wait."""


@dataclass(slots=True)
class StatusPublisher:
    objects: BudgetObjects | None = None
    quotas: ConfiguredObjects[Quota] | None = None
    _written: dict[str, int] = field(default_factory=dict)
    """By path."""
    _paused_until_ms: int = 0
    """By the clock of the ledger or of this host, either of which may be set back."""

    async def publish(
        self, budget: Budget, account: Account, current: Balance, *, changed: bool
    ) -> None:
        if self.objects is None:
            return
        name = account.namespace
        objects = self.objects
        item = objects.latest.items.get(name)
        if item and objects.find(name) == budget:  # no other since it was counted
            status = budget_status(account, current, item, objects.latest.specs.get(name))
            await self._write_status(
                objects, item, status, current.at_ms, every_ms=0 if changed else CHECKPOINT_MS
            )
        if changed:
            for body in event_bodies(item.metadata.uid if item else "", budget, account, current):
                path = objects_path(body["metadata"]["namespace"], "events")
                create = objects.client.create(path, body)
                await self._write(create, f"Event of {name}", current.at_ms)

    async def publish_quotas(self, ledger_quotas: LedgerQuotas, at_ms: int) -> None:
        if self.quotas is None or not self.quotas.latest.items:
            return
        quotas = self.quotas
        totals = await ledger_quotas.totals(charges=False)
        for name, item in sorted(quotas.latest.items.items()):
            status = quota_status(name, quotas.latest, totals, at=timestamp(at_ms // 1000))
            await self._write_status(quotas, item, status, at_ms, every_ms=USAGE_MS)

    async def _write_status(
        self,
        objects: ConfiguredObjects[Any],
        item: RawObject,
        status: ObjectStatus,
        at_ms: int,
        *,
        every_ms: int,
    ) -> None:
        """Write at once if other specs are in force, else after `every_ms`."""
        path = f"{objects.path}/{quote(item.metadata.name, safe='')}/status"
        written = item.status or {}
        wanted = msgspec.to_builtins(status)
        same = all(written.get(key) == wanted.get(key) for key in _IN_FORCE)
        recent = 0 <= at_ms - self._written.get(path, 0) < every_ms
        if written != wanted and not (same and recent):
            self._written[path] = at_ms
            operation = {"op": "add", "path": "/status", "value": wanted}
            await self._write(objects.client.patch_json(path, [operation]), path, at_ms)

    async def _write(self, write: Coroutine[Any, Any, object], what: str, at_ms: int) -> None:
        if at_ms < self._paused_until_ms <= at_ms + RETRY_MS:
            write.close()
            return
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await write
        except ConflictError:
            return
        except (UnavailableError, TimeoutError) as error:
            self._written.pop(what, None)
            self._paused_until_ms = at_ms + RETRY_MS
            logger.warning("%s was not written: %r", what, error)
        except RequestError as error:
            logger.warning("%s was not written: %s", what, error)


def event_bodies(
    uid: str, budget: Budget, account: Account, current: Balance
) -> Iterator[Mapping[str, Any]]:
    """Every replica gives the core/v1 Events the same names.

    One regards the GPUBudget object, if there is one with this uid, the other the namespace, where
    its users see it.
    """
    name = account.namespace
    if uid:
        regarding = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": uid}
        yield _event("default", regarding, budget, account, current)
    regarding = {"apiVersion": "v1", "kind": "Namespace", "name": name, "namespace": name}
    yield _event(name, regarding, budget, account, current)


_LEASES = {
    LeaseClass.GUARANTEED: "its pods are preempted by pods of higher priority only",
    LeaseClass.RECLAIMABLE: "its pods may be preempted",
    LeaseClass.EXPIRED: "its pods are preempted first",
}
_NEW_PODS = {
    "admit": "new pods are admitted",
    "queue": "new pods wait",
    "deny": "new pods are denied",
}


def _event(
    namespace: str, regarding: Mapping[str, str], budget: Budget, account: Account, current: Balance
) -> Mapping[str, Any]:
    follows = consequence(budget, current.state)
    state = BudgetState.INVALID if budget.problem else current.state
    remaining = current.remaining_units
    window = current.window.id
    left = "no limit" if remaining is None else f"{amount(remaining, budget.currency)} left"
    used = amount(current.used_units, budget.currency)
    invalid = f"{budget.problem}. " if budget.problem else ""
    message = invalid + (
        f"the GPU budget of namespace {account.namespace} is {current.state}: "
        f"{used}{'' if budget.currency else ' GPU-minutes'} used in {window}, {left}; "
        f"{_LEASES[follows.lease_class]}, {_NEW_PODS[follows.new_pods]}"
    )
    identity = (
        f"{account.state.since_ms} {current.state} {current.warned_percent} {window} {invalid}"
    )
    digest = hashlib.blake2s(identity.encode(), digest_size=8).hexdigest()
    at = timestamp(current.at_ms // 1000)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{account.namespace}.{digest}", "namespace": namespace},
        "involvedObject": dict(regarding),
        "reason": f"Budget{str(state).capitalize()}",
        "message": cut(message),
        "type": "Normal" if state is BudgetState.OK else "Warning",
        "source": {"component": "leasehold"},
        "reportingComponent": "leasehold",
        "reportingInstance": "",
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
    }
