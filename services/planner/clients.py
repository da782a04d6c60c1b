"""The planner's client of the API server: it only reads."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import quote

from msgspec import Struct

from shared.kubernetes.claim_specs import ClaimWithSpec, ClassWithSpec
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.paths import pod_path
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.resource_claims import CLASSES_PATH, claim_path
from shared.kubernetes.types import ApiDisruptionBudget, ApiObject, ApiPod, LabelSelector
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import DRIVER
from shared.placing.anti_affinity import matches_labels
from shared.pods.pod_anti_affinity import requirements_of
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot, snapshot_of

PODS = "/api/v1/pods"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
DISRUPTION_BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
Item = TypeVar("Item", bound=Struct)


@dataclass(eq=False)
class PlannerClient:
    client: KubernetesClient

    def __post_init__(self) -> None:
        self._pods: dict[PodUid, PodSnapshot] = {}
        self._followed: Reflector[ApiPod] | None = None
        """None until all pods are listed."""

    async def follow_pods(self) -> None:
        """Watch all pods, for `list_pods`. Raises RequestError without the permission."""
        reflector = Reflector(self.client, PODS, ApiPod)
        self._pods = {}
        try:
            async with aclosing(reflector.batches()) as batches:
                async for batch in batches:
                    for named, pod in batch.changed:
                        self._note(PodUid(named.uid), pod)
                    if batch.listed:
                        self._followed = reflector
        finally:
            self._followed = None

    def _note(self, uid: PodUid, pod: ApiPod | None) -> None:
        if pod is None:
            self._pods.pop(uid, None)
        else:  # the copy of the lease is the largest part of a pod, and is not read here
            self._pods[uid] = replace(snapshot_of(pod), annotations={})

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        pod = await self._get(pod_path(namespace, name), ApiPod)
        return None if pod is None else snapshot_of(pod)

    async def get_claim(self, namespace: str, name: str) -> ClaimWithSpec | None:
        return await self._get(claim_path(namespace, name), ClaimWithSpec)

    async def get_class(self, name: str) -> ClassWithSpec | None:
        return await self._get(f"{CLASSES_PATH}/{quote(name, safe='')}", ClassWithSpec)

    async def has_slices(self, node: NodeName) -> bool:
        path = f"{SLICES}/{quote(f'{node}-{DRIVER}', safe='')}"
        return await self._get(path, ApiObject) is not None

    async def _get(self, path: str, kind: type[Item]) -> Item | None:
        try:
            return await self.client.read(path, kind)
        except NotFoundError:
            return None

    async def list_pods(self) -> tuple[dict[PodUid, PodSnapshot], list[DisruptionBudget]]:
        budgets, pods = await asyncio.gather(
            self._list(DISRUPTION_BUDGETS, ApiDisruptionBudget), self._list_pods()
        )
        return pods, _disruptions(budgets, pods.values())

    async def _list_pods(self) -> dict[PodUid, PodSnapshot]:
        if self._followed is not None and not self._followed.has_failed:
            return dict(self._pods)
        return {pod.pod: pod for pod in map(snapshot_of, await self._list(PODS, ApiPod))}

    async def _list(self, path: str, kind: type[Item]) -> list[Item]:
        return [item async for page in self.client.pages(path) for item in page.read(kind)]


def _disruptions(
    budgets: Iterable[ApiDisruptionBudget], pods: Iterable[PodSnapshot]
) -> list[DisruptionBudget]:
    by_namespace = defaultdict[Namespace, list[PodSnapshot]](list)
    for pod in pods:
        by_namespace[pod.namespace].append(pod)
    return [
        DisruptionBudget(
            name=f"{budget.metadata.namespace}/{budget.metadata.name}",
            pods=frozenset(
                pod.pod
                for pod in by_namespace.get(Namespace(budget.metadata.namespace), ())
                if selects(budget.spec.selector, pod.labels)
            ),
            allowed=budget.status.disruptions_allowed,
        )
        for budget in budgets
    ]


def selects(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """An empty selector matches all, None matches nothing."""
    return selector is not None and matches_labels(requirements_of(selector), labels)
