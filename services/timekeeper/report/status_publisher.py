"""Publishes budgets as the status of their objects and as Kubernetes Events."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from services.timekeeper.config.budget_sources import PATH, BudgetObjects
from services.timekeeper.config.budget_spec import KIND
from services.timekeeper.report.budget_reports import budget_status, stamp
from shared.kubernetes.custom_kinds import API_VERSION
from shared.model.balance import consequence
from shared.model.bounds import cut
from shared.model.budget import Account, Balance, Budget, BudgetState, LeaseClass, minutes
from shared.model.errors import ConflictError, RequestError, UnavailableError
from shared.model.names import Namespace

logger = logging.getLogger(__name__)

CHECKPOINT_MS = 60_000
WRITE_TIMEOUT_S = 2.0
RETRY_MS = 30_000
"""Pause after a request without a response, so that counting does not wait for the API server."""


@dataclass(slots=True)
class StatusPublisher:
    """Writes statuses and Events, if the cluster has GPUBudget objects."""

    objects: BudgetObjects | None = None
    _written: dict[Namespace, int] = field(default_factory=dict)
    _specs: dict[Namespace, object] = field(default_factory=dict)
    """The specs in force that were written."""
    _paused_until_ms: int = 0

    async def publish(
        self, budget: Budget, account: Account, current: Balance, *, changed: bool
    ) -> None:
        """Write the status when it has changed, and every minute; write Events of a change.

        If the API server does not respond, a status is lost and counting continues.
        """
        if self.objects is None or current.at_ms < self._paused_until_ms:
            return
        name, objects = account.namespace, self.objects
        recent = current.at_ms - self._written.get(name, 0) < CHECKPOINT_MS
        writes: list[Callable[[], Awaitable[object]]] = []
        unwritten = self._specs.get(name) != objects.specs.get(name)
        if name in objects.uids and (changed or unwritten or not recent):
            self._written[name], self._specs[name] = current.at_ms, objects.specs.get(name)
            status = budget_status(account, current, spec=objects.specs.get(name))
            path = f"{PATH}/{quote(name, safe='')}/status"
            writes.append(partial(objects.client.patch_merge, path, {"status": status}))
        if changed:
            writes += [
                partial(objects.client.create, _events_path(body), body)
                for body in event_bodies(objects.uids.get(name, ""), budget, account, current)
            ]
        for write in writes:
            if current.at_ms >= self._paused_until_ms:
                await self._write(write, name, current.at_ms)

    async def _write(
        self, write: Callable[[], Awaitable[object]], name: Namespace, at_ms: int
    ) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await write()
        except ConflictError:
            return
        except (UnavailableError, TimeoutError) as error:
            self._written.pop(name, None)
            self._paused_until_ms = at_ms + RETRY_MS
            logger.warning("the status of the budget of %s was not written: %r", name, error)
        except RequestError as error:
            logger.warning("the status of the budget of %s was not written: %s", name, error)


def event_bodies(
    uid: str, budget: Budget, account: Account, current: Balance
) -> Iterator[Mapping[str, Any]]:
    """Yield the core/v1 Events of a change; every replica gives them the same names.

    One regards the GPUBudget object, if there is one with this uid. The other regards the
    namespace, where its users see it.
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


def _events_path(body: Mapping[str, Any]) -> str:
    return f"/api/v1/namespaces/{quote(body['metadata']['namespace'], safe='')}/events"


def _event(
    namespace: str, regarding: Mapping[str, str], budget: Budget, account: Account, current: Balance
) -> Mapping[str, Any]:
    follows = consequence(budget, current.state)
    state = BudgetState.INVALID if budget.problem else current.state
    remaining, window = current.remaining_units, current.window.id
    left = "no limit" if remaining is None else f"{minutes(remaining)} left"
    invalid = f"{budget.problem}. " if budget.problem else ""
    message = invalid + (
        f"the GPU budget of namespace {account.namespace} is {current.state}: "
        f"{minutes(current.used_units)} GPU-minutes used in {window}, {left}; "
        f"{_LEASES[follows.lease_class]}, {_NEW_PODS[follows.new_pods]}"
    )
    identity = (
        f"{account.state.since_ms} {current.state} {current.warned_percent} {window} {invalid}"
    )
    digest = hashlib.blake2s(identity.encode(), digest_size=8).hexdigest()
    at = stamp(current.at_ms)
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
