"""Pods and PodDisruptionBudgets at the API server, as far as evicting needs them."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from services.binder.preempt.rules import DisruptionBudget, PodFacts
from services.binder.report.explanations import stamp
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import (
    EvictionBlockedError,
    KubernetesConflictError,
    NotFoundError,
    OverloadedError,
    RequestRejectedError,
)
from shared.kubernetes.types import SelectorRequirement
from shared.model.names import Namespace, PodUid
from shared.model.preemption import PREEMPT_AT, PREEMPTIBLE, EvictionOutcome, Victim

logger = logging.getLogger(__name__)

PAGE = 500
BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
SEVERAL_BUDGETS = 500
"""Answer where several PodDisruptionBudgets count the pod: it can never be evicted."""
T = TypeVar("T")


class _Owner(Struct, frozen=True):
    uid: str = ""
    controller: bool = False


class _Metadata(Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    deletion_timestamp: datetime | None = None
    owner_references: tuple[_Owner, ...] = ()


class _PodSpec(Struct, frozen=True, rename="camel"):
    node_name: str = ""
    priority: int | None = None
    preemption_policy: str = ""
    termination_grace_period_seconds: float | None = None


class _Pod(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    spec: _PodSpec = _PodSpec()


class _Selector(Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[SelectorRequirement, ...] = ()


class _BudgetSpec(Struct, frozen=True):
    selector: _Selector | None = None


class _BudgetStatus(Struct, frozen=True, rename="camel"):
    disruptions_allowed: int = 0


class _Budget(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    spec: _BudgetSpec = _BudgetSpec()
    status: _BudgetStatus = _BudgetStatus()


class EvictionClient:
    """Reads who could be evicted, tells them, and evicts."""

    def __init__(self, kube: KubernetesClient) -> None:
        self.kube = kube

    async def everybody(self) -> tuple[dict[PodUid, PodFacts], list[DisruptionBudget]]:
        """Return all pods by uid, and which of them each PodDisruptionBudget counts."""
        pods, budgets = await asyncio.gather(
            self._list("/api/v1/pods", _Pod), self._list(BUDGETS, _Budget)
        )
        known = {facts.pod: facts for facts in map(_facts, pods)}
        return known, [_disruptions(each, known.values()) for each in budgets]

    async def look(self, namespace: Namespace, name: str) -> PodFacts | None:
        """Return the pod of this name; None: there is none."""
        try:
            return _facts(await self.kube.read(pod_path(namespace, name), _Pod))
        except NotFoundError:
            return None

    async def announce(self, victim: Victim, at: float) -> bool:
        """Write on the pod when it will be evicted; False if it is gone, or cannot be changed."""
        return await self._annotate(victim, stamp(at))

    async def withdraw(self, victim: Victim) -> bool:
        """Take that off the pod again; False if it is gone."""
        return await self._annotate(victim, None)

    async def evict(self, victim: Victim, *, dry_run: bool = False) -> tuple[EvictionOutcome, str]:
        """Evict the pod of exactly this uid, or ask whether that is allowed; say why not.

        Raises UnavailableError if the API server does not answer.
        """
        try:
            await self.kube.evict(victim.namespace, victim.name, uid=victim.pod, dry_run=dry_run)
        except EvictionBlockedError as error:
            return EvictionOutcome.BLOCKED, error.answer.message
        except (NotFoundError, KubernetesConflictError) as error:
            return EvictionOutcome.GONE, error.answer.message
        except RequestRejectedError as error:
            # An admission policy of the cluster's, say: it is for others to say why.
            return EvictionOutcome.BLOCKED, error.answer.message
        except OverloadedError as error:
            if error.answer.code == SEVERAL_BUDGETS:
                return EvictionOutcome.BLOCKED, error.answer.message
            raise
        return EvictionOutcome.EVICTED, ""

    async def _annotate(self, victim: Victim, value: str | None) -> bool:
        metadata: dict[str, Any] = {"uid": victim.pod, "annotations": {PREEMPT_AT: value}}
        try:
            path = pod_path(victim.namespace, victim.name)
            await self.kube.patch_merge(path, {"metadata": metadata})
        except (NotFoundError, KubernetesConflictError):
            return False
        except RequestRejectedError as error:
            logger.warning("pod %s/%s is not told: %s", victim.namespace, victim.name, error)
            return False
        return True

    async def _list(self, path: str, kind: type[T]) -> list[T]:
        found: list[T] = []
        token = ""
        while True:
            page = await self.kube.list_page(path, query={}, limit=PAGE, continue_token=token)
            found += [msgspec.json.decode(item, type=kind) for item in page.items or ()]
            token = page.metadata.continue_
            if not token:
                return found


def _facts(pod: _Pod) -> PodFacts:
    metadata, spec = pod.metadata, pod.spec
    grace_s = spec.termination_grace_period_seconds
    return PodFacts(
        pod=PodUid(metadata.uid),
        namespace=Namespace(metadata.namespace),
        name=metadata.name,
        owner=next((each.uid for each in metadata.owner_references if each.controller), ""),
        labels=metadata.labels,
        priority=spec.priority or 0,
        preempts=spec.preemption_policy != "Never",
        preemptible=metadata.labels.get(PREEMPTIBLE) != "false",
        node=spec.node_name,
        ending=metadata.deletion_timestamp is not None,
        grace_s=30.0 if grace_s is None else grace_s,
    )


def _disruptions(budget: _Budget, pods: Iterable[PodFacts]) -> DisruptionBudget:
    metadata = budget.metadata
    return DisruptionBudget(
        name=f"{metadata.namespace}/{metadata.name}",
        pods=frozenset(
            pod.pod
            for pod in pods
            if pod.namespace == metadata.namespace and selects(budget.spec.selector, pod.labels)
        ),
        allowed=budget.status.disruptions_allowed,
    )


def selects(selector: _Selector | None, labels: Mapping[str, str]) -> bool:
    """Say whether a label selector matches; an empty one matches all, a missing one nothing."""
    if selector is None:
        return False
    return all(labels.get(key) == value for key, value in selector.match_labels.items()) and all(
        _holds(need, labels) for need in selector.match_expressions
    )


def _holds(need: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(need.key)
    return {
        "In": value is not None and value in need.values,
        "NotIn": value not in need.values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }.get(need.operator, False)
