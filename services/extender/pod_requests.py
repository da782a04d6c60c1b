"""Pods as kube-scheduler sends them, or the API server has them, parsed and remembered."""

from typing import Protocol

from services.extender.pod_memory import PodMemory, RememberedPod
from services.extender.scheduler_api import ExtenderBindingArgs
from shared.dialects import KUBE_SCHEDULER
from shared.kubernetes.types import ApiPod, ApiPodSpec
from shared.model.errors import RequestError
from shared.model.names import OFFER, PodUid, offered_node
from shared.pods.observed_pod import queued
from shared.pods.pod_anti_affinity import widest
from shared.pods.pod_parser import PodParser

GANG = (
    "the pod belongs to a gang, which starts together or not at all; kube-scheduler binds pods one "
    "by one: set schedulerName leasehold"
)


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def has_preferences(spec: ApiPodSpec) -> bool:
    """Return whether a pod prefers nodes to others, which only kube-scheduler weighs."""
    affinity = spec.affinity
    if affinity is not None:
        if affinity.node_affinity is not None and affinity.node_affinity.preferred:
            return True
        if any(
            (each or {}).get(PREFERRED)
            for each in (affinity.pod_affinity, affinity.pod_anti_affinity)
        ):
            return True
    return any(
        each.get("whenUnsatisfiable") == "ScheduleAnyway"
        for each in spec.topology_spread_constraints
    )


class PodLookup(Protocol):
    """Pods of the API server."""

    async def get(self, namespace: str, name: str) -> ApiPod | None:
        """Return a pod; None: there is none."""
        ...


class PodRequests:
    """The pods that kube-scheduler asks about."""

    def __init__(self, parser: PodParser, pods: PodLookup) -> None:
        self.parser = parser
        self.pods = pods
        self.memory = PodMemory()

    def observe(self, seen: ApiPod) -> RememberedPod:
        """Return the pod. Raises RequestError if it can never be placed this way."""
        meta = seen.metadata
        known = self.memory.current(PodUid(meta.uid), meta.resource_version)
        if known is not None:
            return known
        observed = self.parser.parse(seen)
        if not observed.by_kube_scheduler:
            raise RequestError(
                f"schedulerName {seen.spec.scheduler_name} is not {KUBE_SCHEDULER}: name the "
                "profile so in kube-scheduler's configuration"
            )
        if observed.request is None:
            raise RequestError(observed.request_error)
        gang = observed.request.gang
        if observed.group is not None or (gang is not None and gang.min_member > 1):
            raise RequestError(GANG)
        pod = self.memory.put(queued(observed, observed.request))
        pod.repels = widest(observed.repels)
        pod.has_claims = any(volume.persistent_volume_claim for volume in seen.spec.volumes)
        pod.has_preferences = has_preferences(seen.spec)
        pod.offered_on = offered_node(meta.annotations.get(OFFER, "")) or None
        return pod

    async def known(self, args: ExtenderBindingArgs) -> RememberedPod | None:
        """Return the pod to bind, None if it is gone; another replica may have filtered it."""
        pod = self.memory.get(args.uid)
        if pod is not None:
            return pod
        found = await self.pods.get(args.namespace, args.name)
        if found is None or found.metadata.uid != args.uid:
            return None
        return self.observe(found)
