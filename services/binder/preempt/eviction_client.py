"""Evictions at the API server, with the pods and PodDisruptionBudgets that they concern."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from services.binder.observations import DisruptionBudget, PodFacts
from services.binder.report.explanations import stamp
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import (
    EvictionBlockedError,
    KubernetesConflictError,
    NotFoundError,
    OverloadedError,
    RequestRejectedError,
)
from shared.kubernetes.types import ApiDisruptionBudget, ApiPod, LabelSelector, SelectorRequirement
from shared.model.errors import UnavailableError
from shared.model.names import Namespace, PodUid
from shared.model.preemption import PREEMPT_AT, PREEMPTIBLE, EvictionOutcome, Victim

logger = logging.getLogger(__name__)

DISRUPTION_BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
SEVERAL_DISRUPTION_BUDGETS = 500
"""Status code where several PodDisruptionBudgets select the pod: it can never be evicted."""
Item = TypeVar("Item")


class EvictionClient:
    """Reads pods that may be evicted, announces evictions, and evicts."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client

    async def list_pods(self) -> tuple[dict[PodUid, PodFacts], list[DisruptionBudget]]:
        """Return all pods by uid, and all PodDisruptionBudgets with the pods they select."""
        pods, budgets = await asyncio.gather(
            self._list("/api/v1/pods", ApiPod),
            self._list(DISRUPTION_BUDGETS, ApiDisruptionBudget),
        )
        known = {facts.pod: facts for facts in map(_facts, pods)}
        return known, [_disruptions(each, known.values()) for each in budgets]

    async def get_pod(self, namespace: Namespace, name: str) -> PodFacts | None:
        """Return the pod of this name; None: there is none."""
        try:
            return _facts(await self.client.read(pod_path(namespace, name), ApiPod))
        except NotFoundError:
            return None

    async def announce(self, victim: Victim, at: float) -> bool:
        """Annotate the pod with the time of its eviction.

        False if the pod is gone, or cannot be changed. Raises UnavailableError as `evict` does.
        """
        return await self._annotate(victim, stamp(at))

    async def withdraw(self, victim: Victim) -> bool:
        """Remove that annotation; False if the pod is gone."""
        return await self._annotate(victim, None)

    async def evict(
        self, victim: Victim | PodFacts, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        """Evict the pod with exactly this uid, or check whether that is allowed.

        Returns the outcome and the reason for it. Raises UnavailableError if the API server does
        not answer, or reports a conflict although the pod is there.
        """
        try:
            await self.client.evict(victim.namespace, victim.name, uid=victim.pod, dry_run=dry_run)
        except EvictionBlockedError as error:
            return EvictionOutcome.BLOCKED, error.response.message
        except NotFoundError as error:
            return EvictionOutcome.GONE, error.response.message
        except KubernetesConflictError as error:
            await self._raise_unless_gone(victim, error)
            return EvictionOutcome.GONE, error.response.message
        except RequestRejectedError as error:
            # Rejected by an admission policy of the cluster, for example.
            return EvictionOutcome.BLOCKED, error.response.message
        except OverloadedError as error:
            if error.response.code == SEVERAL_DISRUPTION_BUDGETS:
                return EvictionOutcome.BLOCKED, error.response.message
            raise
        return EvictionOutcome.EVICTED, ""

    async def _annotate(self, victim: Victim, value: str | None) -> bool:
        metadata: dict[str, Any] = {"uid": victim.pod, "annotations": {PREEMPT_AT: value}}
        try:
            path = pod_path(victim.namespace, victim.name)
            await self.client.patch_merge(path, {"metadata": metadata})
        except NotFoundError:
            return False
        except KubernetesConflictError as error:
            await self._raise_unless_gone(victim, error)
            return False
        except RequestRejectedError as error:
            logger.warning("pod %s/%s is not annotated: %s", victim.namespace, victim.name, error)
            return False
        return True

    async def _raise_unless_gone(
        self, victim: Victim | PodFacts, error: KubernetesConflictError
    ) -> None:
        """Raise UnavailableError if the pod is there: the same write may succeed later."""
        found = await self.get_pod(victim.namespace, victim.name)
        if found is not None and found.pod == victim.pod:
            raise UnavailableError(
                f"pod {victim.namespace}/{victim.name}: {error.response.message}; tried again soon"
            ) from error

    async def _list(self, path: str, kind: type[Item]) -> list[Item]:
        return [item async for page in self.client.pages(path) for item in page.read(kind)]


def _facts(pod: ApiPod) -> PodFacts:
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
        deleting=metadata.deletion_timestamp is not None,
        grace_s=30.0 if grace_s is None else grace_s,
    )


def _disruptions(budget: ApiDisruptionBudget, pods: Iterable[PodFacts]) -> DisruptionBudget:
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


def selects(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches; an empty one matches all, a missing one nothing."""
    if selector is None:
        return False
    return all(labels.get(key) == value for key, value in selector.match_labels.items()) and all(
        _matches(requirement, labels) for requirement in selector.match_expressions
    )


def _matches(requirement: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    return {
        "In": value is not None and value in requirement.values,
        "NotIn": value not in requirement.values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }.get(requirement.operator, False)
