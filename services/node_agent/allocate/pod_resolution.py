"""Resolves the container that the kubelet allocates for, from the kubelet's lists; pure.

The kubelet allocates devices to one container after the other, init containers first, and shows
them in PodResources. So the container is the first one of its pod that requests the resource and
does not have it yet.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from services.node_agent.kubelet.pods import KubeletContainer, KubeletPod, PodResources
from services.node_agent.records.checkpoint_entry import ContainerPlace
from shared.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerCandidate:
    pod: KubeletPod
    container: KubeletContainer

    def __str__(self) -> str:
        return f"{self.pod.namespace}/{self.pod.name}, container {self.container.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationHistory:
    allocated: Mapping[tuple[PodUid, str], tuple[str, ...]] = field(default_factory=dict)
    refused: Set[PodUid] = frozenset()
    over: Set[PodUid] = frozenset()


@dataclass(frozen=True, slots=True)
class AmbiguousContainer:
    candidates: tuple[ContainerCandidate, ...]

    def __str__(self) -> str:
        if not self.candidates:
            return "no pod in the kubelet's list waits for these devices"
        named = "; ".join(str(candidate) for candidate in self.candidates)
        return f"{len(self.candidates)} containers are possible ({named})"


def resolve_container(
    resource: str,
    count: int,
    *,
    pods: Iterable[KubeletPod],
    pod_resources: PodResources,
    history: AllocationHistory,
    device_ids: Sequence[str] | None = None,
) -> ContainerCandidate | AmbiguousContainer:
    """The kubelet repeats a call for a refused or served pod only after losing its checkpoint.

    A pod that PodResources do not list has ended, unless they list none.
    """
    live = [
        pod
        for pod in pods
        if not pod.terminal
        and pod.uid not in history.over
        and (not pod_resources.pods or (pod.namespace, pod.name) in pod_resources.pods)
    ]
    holders = pod_resources.holders(resource)
    waiting = [
        candidate
        for pod in live
        if (candidate := _next_of(pod, resource, holders, history)) is not None
        and candidate.container.limits[resource] == count
    ]
    fresh = [candidate for candidate in waiting if candidate.pod.uid not in history.refused]
    again = _answered_before(live, resource, count, holders, history)
    repeated = [
        c
        for c in again
        if device_ids is not None
        and set(history.allocated[c.pod.uid, c.container.name]) == set(device_ids)
    ]
    for candidates in (fresh, repeated, [*waiting, *again]):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            return AmbiguousContainer(tuple(candidates))
    return AmbiguousContainer(())


def _next_of(
    pod: KubeletPod, resource: str, holders: Set[ContainerPlace], history: AllocationHistory
) -> ContainerCandidate | None:
    if pod.phase == "Running":
        return None
    requesting = [
        container for container in pod.containers if container.limits.get(resource, 0) > 0
    ]
    served = [
        number
        for number, container in enumerate(requesting)
        if (pod.namespace, pod.name, container.name) in holders
        or (pod.uid, container.name) in history.allocated
    ]
    following = served[-1] + 1 if served else 0
    return (
        ContainerCandidate(pod=pod, container=requesting[following])
        if following < len(requesting)
        else None
    )


def _answered_before(
    pods: Iterable[KubeletPod],
    resource: str,
    count: int,
    holders: Set[ContainerPlace],
    history: AllocationHistory,
) -> list[ContainerCandidate]:
    """The kubelet repeats calls in the order of the containers, but shows no init containers."""
    return [
        ContainerCandidate(pod=pod, container=container)
        for pod in pods
        for container in _up_to_first_main(
            container
            for container in pod.containers
            if container.limits.get(resource, 0) > 0
            and (pod.uid, container.name) in history.allocated
            and (pod.namespace, pod.name, container.name) not in holders
        )
        if container.limits[resource] == count
    ]


def _up_to_first_main(containers: Iterable[KubeletContainer]) -> list[KubeletContainer]:
    leading: list[KubeletContainer] = []
    for container in containers:
        leading.append(container)
        if not container.init:
            break
    return leading
