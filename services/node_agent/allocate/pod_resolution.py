"""For whom does the kubelet ask? Found, never guessed, from what the kubelet itself shows; pure.

The kubelet adds a pod to its list just before it admits it, gives devices to one container after
the other (init containers first), and shows in PodResources what it has given. So the container in
question is the first one of its pod that asks for the resource and has not been given it.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from shared.model.names import Namespace, PodUid

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletContainer:
    """What the kubelet's pod list says of one container."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    """Extended resources only."""
    init: bool = False
    """It ends before the next one starts (a sidecar is no init container here)."""
    variables: tuple[str, ...] = ()
    """Names of the variables that the pod sets itself."""
    prefixes: tuple[str, ...] = ()
    """Prefixes under which variables come from a config map or a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletPod:
    """One pod of the kubelet's list."""

    uid: PodUid
    namespace: Namespace
    name: str
    phase: str = "Pending"
    containers: tuple[KubeletContainer, ...] = ()
    """In the order in which the kubelet serves them: init containers first."""
    container_ids: Mapping[str, str] = field(default_factory=dict)
    """Names of its containers by the runtime's id, as far as they have been made."""

    @property
    def terminal(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in TERMINAL_PHASES


@dataclass(frozen=True, slots=True)
class Holding:
    """What PodResources shows for one container: devices of one resource."""

    namespace: str
    name: str
    container: str
    resource: str
    device_ids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """PodResources' answer: who holds what, and which pods the kubelet calls active."""

    holdings: tuple[Holding, ...] = ()
    pods: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of every pod listed, devices or not."""

    def holders(self, resource: str) -> frozenset[tuple[str, str, str]]:
        """Return namespace, pod name and container of everyone with devices of a resource."""
        return frozenset(
            (held.namespace, held.name, held.container)
            for held in self.holdings
            if held.resource == resource
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationHistory:
    """What the agent itself remembers, by (pod, container), of one resource."""

    answered: Mapping[tuple[PodUid, str], tuple[str, ...]] = field(default_factory=dict)
    """Device IDs that Allocate was answered for."""
    refused: Set[PodUid] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerCandidate:
    """The container in question."""

    pod: KubeletPod
    container: KubeletContainer

    def __str__(self) -> str:
        """Name it as its owner would."""
        return f"{self.pod.namespace}/{self.pod.name}, container {self.container.name}"


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """It cannot be told; `candidates` might be meant, none of them surely."""

    candidates: tuple[ContainerCandidate, ...]

    def __str__(self) -> str:
        """Say which, or that there is none."""
        if not self.candidates:
            return "no pod of the kubelet's list waits for it"
        named = "; ".join(str(candidate) for candidate in self.candidates)
        return f"{len(self.candidates)} containers could be meant ({named})"


def resolve_container(
    resource: str,
    count: int,
    *,
    pods: Iterable[KubeletPod],
    pod_resources: PodResources,
    history: AllocationHistory,
    device_ids: Sequence[str] | None = None,
) -> ContainerCandidate | Ambiguous:
    """Return the one container that the kubelet can be asking for `count` devices for.

    A pod that was refused, or answered, may be asked for again only after the kubelet has lost its
    own record: such candidates count when there are no others.
    """
    live = [pod for pod in pods if not pod.terminal]
    holders = pod_resources.holders(resource)
    asking = [
        candidate
        for pod in live
        if (candidate := _next_of(pod, resource, holders, history)) is not None
        and candidate.container.limits[resource] == count
    ]
    fresh = [candidate for candidate in asking if candidate.pod.uid not in history.refused]
    again = _asked_again(live, resource, count, holders, history)
    repeated = [c for c in again if _same_ids(c, history, device_ids)]
    for candidates in (fresh, repeated, [*asking, *again]):
        if candidates:
            return _only(candidates, pod_resources)
    return Ambiguous(())


def _next_of(
    pod: KubeletPod, resource: str, holders: Set[tuple[str, str, str]], told: AllocationHistory
) -> ContainerCandidate | None:
    """Return the container after the last one that has been served; a running pod is all served."""
    if pod.phase == "Running":
        return None
    asking = [container for container in pod.containers if container.limits.get(resource, 0) > 0]
    served = [
        number
        for number, container in enumerate(asking)
        if _is_served(pod, container, holders, told)
    ]
    following = served[-1] + 1 if served else 0
    return (
        ContainerCandidate(pod=pod, container=asking[following])
        if following < len(asking)
        else None
    )


def _is_served(
    pod: KubeletPod,
    container: KubeletContainer,
    holders: Set[tuple[str, str, str]],
    told: AllocationHistory,
) -> bool:
    shown = (pod.namespace, pod.name, container.name) in holders
    return shown or (pod.uid, container.name) in told.answered


def _asked_again(
    pods: Iterable[KubeletPod],
    resource: str,
    count: int,
    holders: Set[tuple[str, str, str]],
    told: AllocationHistory,
) -> list[ContainerCandidate]:
    """Return containers that we answered for while the kubelet shows nothing of it."""
    return [
        ContainerCandidate(pod=pod, container=container)
        for pod in pods
        for container in pod.containers
        if container.limits.get(resource) == count
        and (pod.uid, container.name) in told.answered
        and (pod.namespace, pod.name, container.name) not in holders
    ]


def _same_ids(
    candidate: ContainerCandidate, told: AllocationHistory, device_ids: Sequence[str] | None
) -> bool:
    answered = told.answered[candidate.pod.uid, candidate.container.name]
    return device_ids is not None and set(answered) == set(device_ids)


def _only(
    candidates: list[ContainerCandidate], shown: PodResources
) -> ContainerCandidate | Ambiguous:
    """Return the one that is left; a pod that the kubelet does not call active is not meant."""
    active = [c for c in candidates if (c.pod.namespace, c.pod.name) in shown.pods]
    left = active if len(candidates) > 1 and active else candidates
    return left[0] if len(left) == 1 else Ambiguous(tuple(left))
