"""What the extender remembers of pods between kube-scheduler's calls; pure.

Nothing of it is the truth: the ledger decides at the Binding. Losing it costs a retry.
"""

from collections import OrderedDict
from dataclasses import dataclass

from shared.model.events.pod_events import PodQueued
from shared.model.names import NodeName, PodUid
from shared.model.node import AntiAffinityTerm
from shared.model.placement import Placement
from shared.model.quota import QuotaExcess

REMEMBERED_PODS = 16_384
ELSEWHERE_S = 15.0
"""For this long, a pod that has a lease on one node is offered no other."""


@dataclass(slots=True)
class RememberedPod:
    """One pod."""

    queued: PodQueued
    repels: tuple[AntiAffinityTerm, ...] = ()
    """Its required anti-affinity, for the binder."""
    has_claims: bool = False
    """It has PersistentVolumeClaims: their volumes may be provisioned before it is bound."""
    has_preferences: bool = False
    """It prefers nodes to others, by affinity or spread."""
    offered_on: NodeName | None = None
    """The node on which a preemption makes room for it."""
    published: tuple[str, int] | None = None
    """The reason and the capacity number that were last published for it."""
    excesses: tuple[QuotaExcess, ...] = ()
    """Exceeded quotas that refused it at the Binding."""
    excess_capacity: int = -1
    """The capacity number of that refusal: once it rises, the ledger decides again."""
    node: NodeName | None = None
    """The node on which it has a lease."""
    node_until: float = 0.0


class PodMemory:
    """Pods by uid; those used least recently are forgotten."""

    def __init__(self) -> None:
        self._pods: OrderedDict[PodUid, RememberedPod] = OrderedDict()

    def get(self, pod: PodUid) -> RememberedPod | None:
        """Return the pod, if it is known."""
        return self._pods.get(pod)

    def current(self, pod: PodUid, resource_version: str) -> RememberedPod | None:
        """Return the pod, if it is known as of this version."""
        known = self._pods.get(pod)
        if (
            known is None
            or known.queued.resource_version != resource_version
            or not resource_version
        ):
            return None
        self._pods.move_to_end(pod)
        return known

    def put(self, queued: PodQueued) -> RememberedPod:
        """Return the pod with its current request."""
        pod = self._pods.get(queued.pod)
        if pod is None:
            if len(self._pods) >= REMEMBERED_PODS:
                self._pods.popitem(last=False)
            pod = self._pods[queued.pod] = RememberedPod(queued)
        elif pod.queued.request != queued.request:
            pod.excesses = ()
        pod.queued = queued
        self._pods.move_to_end(queued.pod)
        return pod

    def forget(self, pod: PodUid) -> None:
        """Forget a pod that is bound."""
        self._pods.pop(pod, None)


class SoftHolds:
    """The tentative reservations of the mirror that no Binding has followed yet."""

    def __init__(self) -> None:
        self._holds: dict[PodUid, tuple[float, Placement]] = {}

    def put(self, pod: PodUid, placement: Placement, ends_at: float) -> None:
        """Note what is reserved, and when that ends."""
        self._holds[pod] = ends_at, placement

    def take(self, pod: PodUid) -> Placement | None:
        """Return the reservation, once: a Binding follows."""
        _, placement = self._holds.pop(pod, (0.0, None))
        return placement

    def take_ended(self, now: float) -> list[PodUid]:
        """Return the reservations that have ended, once."""
        ended = [pod for pod, (ends_at, _) in self._holds.items() if ends_at <= now]
        for pod in ended:
            del self._holds[pod]
        return ended
