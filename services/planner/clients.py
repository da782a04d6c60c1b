"""The planner's client of the API server: it only reads."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.paths import pod_path
from shared.kubernetes.types import ApiDisruptionBudget, ApiPod, LabelSelector
from shared.model.names import PodUid
from shared.placing.anti_affinity import matches_labels
from shared.pods.pod_anti_affinity import requirements_of
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot, snapshot_of

PODS = "/api/v1/pods"
DISRUPTION_BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
Item = TypeVar("Item", bound=Struct)


@dataclass(eq=False)
class PlannerClient:
    client: KubernetesClient

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        try:
            return snapshot_of(await self.client.read(pod_path(namespace, name), ApiPod))
        except NotFoundError:
            return None

    async def list_pods(self) -> tuple[dict[PodUid, PodSnapshot], list[DisruptionBudget]]:
        listed, budgets = await asyncio.gather(
            self._list(PODS, ApiPod), self._list(DISRUPTION_BUDGETS, ApiDisruptionBudget)
        )
        pods = {pod.pod: pod for pod in map(snapshot_of, listed)}
        return pods, [_disruptions(budget, pods.values()) for budget in budgets]

    async def _list(self, path: str, kind: type[Item]) -> list[Item]:
        return [item async for page in self.client.pages(path) for item in page.read(kind)]


def _disruptions(budget: ApiDisruptionBudget, pods: Iterable[PodSnapshot]) -> DisruptionBudget:
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
    return selector is not None and matches_labels(requirements_of(selector), labels)
