"""Pods as kube-scheduler sends them, or the API server has them, remembered."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.extender.scheduler_api import ExtenderBindingArgs
from shared.dialects import KUBE_SCHEDULER
from shared.kubernetes.types import ApiPod, ApiPodSpec
from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.node import AntiAffinityTerm
from shared.model.errors import RequestError
from shared.model.events.pod_events import PodQueued
from shared.model.names import OFFER, NodeName, PodUid, offered_node
from shared.pods.observed_pod import queued
from shared.pods.pod_anti_affinity import widest
from shared.pods.pod_parser import PodParser

REMEMBERED_PODS = 16_384
ELSEWHERE_S = 15.0
"""For this long, a pod that has a lease on one node is offered no other."""
GANG = "the pod belongs to a gang, which starts together, and kube-scheduler binds pods one by one"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
GetPod = Callable[[str, str], Awaitable[ApiPod | None]]
"""Returns a pod of a namespace by name, or None if it does not exist."""


@dataclass(slots=True)
class CachedPod:
    queued: PodQueued
    repels: tuple[AntiAffinityTerm, ...] = ()
    has_claims: bool = False
    """Volumes may be provisioned before the Binding."""
    has_preferences: bool = False
    """By affinity or spread."""
    offered_on: NodeName | None = None
    """A preemption makes room there."""
    published: tuple[str, int] | None = None
    """The reason and the capacity number that were last published for it."""
    excesses: tuple[QuotaExcess, ...] = ()
    """Exceeded quotas that refused it at the Binding."""
    excess_capacity: int = -1
    """Once it rises, the ledger decides again."""
    node: NodeName | None = None
    """Of its lease."""
    node_until: float = 0.0


def has_preferences(spec: ApiPodSpec) -> bool:
    """Only kube-scheduler weighs these."""
    affinity = spec.affinity
    if affinity is not None:
        if affinity.node_affinity is not None and affinity.node_affinity.preferred:
            return True
        if any(
            (terms or {}).get(PREFERRED)
            for terms in (affinity.pod_affinity, affinity.pod_anti_affinity)
        ):
            return True
    return any(
        constraint.get("whenUnsatisfiable") == "ScheduleAnyway"
        for constraint in spec.topology_spread_constraints
    )


@dataclass(eq=False)
class PodRequests:
    parser: PodParser
    get_pod: GetPod

    def __post_init__(self) -> None:
        self._pods: OrderedDict[PodUid, CachedPod] = OrderedDict()
        """Least recently used first."""

    def observe(self, seen: ApiPod) -> CachedPod:
        """Raise RequestError if the pod can never be placed this way.

        For example, a pod of a gang is refused, since kube-scheduler binds pods one by one.
        """
        meta = seen.metadata
        cached = self._pods.get(PodUid(meta.uid))
        if (
            cached
            and meta.resource_version
            and cached.queued.resource_version == meta.resource_version
        ):
            self._pods.move_to_end(cached.queued.pod)
            return cached
        observed = self.parser.parse(seen)
        if not observed.by_kube_scheduler:
            raise RequestError(
                f"schedulerName {seen.spec.scheduler_name} is not {KUBE_SCHEDULER}: name the "
                "profile so in kube-scheduler's configuration"
            )
        if observed.request is None:
            raise RequestError(observed.request_error)
        gang = observed.request.gang
        if observed.group is not None or (gang is not None and gang.decided_as_one):
            mend = "leave schedulerName out"
            if observed.handed_over:
                mend = f"a gang cannot have {observed.handed_over}"
            raise RequestError(f"{GANG}: {mend}")
        pod = self._remember(queued(observed, observed.request))
        pod.repels = widest(observed.repels)
        pod.has_claims = any(volume.persistent_volume_claim for volume in seen.spec.volumes)
        pod.has_preferences = has_preferences(seen.spec)
        pod.offered_on = offered_node(meta.annotations.get(OFFER, "")) or None
        return pod

    def _remember(self, queued: PodQueued) -> CachedPod:
        pod = self._pods.get(queued.pod)
        if pod is None:
            if len(self._pods) >= REMEMBERED_PODS:
                self._pods.popitem(last=False)
            pod = self._pods[queued.pod] = CachedPod(queued)
        elif pod.queued.request != queued.request:
            pod.excesses = ()
        pod.queued = queued
        self._pods.move_to_end(queued.pod)
        return pod

    def forget(self, pod: PodUid) -> None:
        self._pods.pop(pod, None)

    async def load(self, args: ExtenderBindingArgs) -> CachedPod | None:
        """Return the pod to bind, or None if it is gone; another replica may have filtered it."""
        pod = self._pods.get(args.uid)
        if pod is not None:
            return pod
        stored = await self.get_pod(args.namespace, args.name)
        if stored is None or stored.metadata.uid != args.uid:
            return None
        return self.observe(stored)
