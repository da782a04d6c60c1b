"""Plays kube-scheduler's part in a few steps; with an extender also for pods with devices."""

import asyncio
import logging
from collections.abc import Callable

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import (
    Json,
    at_path,
    list_at,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.volumes import (
    BOUND_BY_CONTROLLER,
    CLAIMS,
    SELECTED_NODE,
    VOLUMES,
    reference_to,
)
from simcluster.ports import ClusterStore
from simcluster.scheduler.claim_allocator import Matches
from simcluster.scheduler.claim_scheduling import POLL_S, ClaimScheduling, WriteStatus
from simcluster.scheduler.extended_resources import (
    classes_by_resource,
    extended_requests,
    unserved_text,
)
from simcluster.scheduler.extender import ExtenderError, SchedulerExtender
from simcluster.scheduler.node_choice import NodeChoice, fitting_nodes
from simcluster.scheduler.pod_claims import PodClaims, claims_of

log = logging.getLogger(__name__)

NAME = "default-scheduler"
RETRY_S = 1.0
BindPod = Callable[[str, str, str], None]
"""Binds the pod of a namespace and a name to a node; `ApiError` if it is refused."""


class Scheduler:
    """Binds the pods of one profile, one pod at a time: of `default-scheduler`, or the extender's.

    Claims serve the extended resources of DeviceClasses. Without an extender, a pod with others
    waits for a scheduler that knows devices. Affinity between pods, spread and host ports are
    ignored. Claims are allocated by a small first-fit allocator, `matches` evaluates its CEL
    expressions.
    """

    def __init__(
        self,
        store: ClusterStore,
        bind: BindPod,
        matches: Matches,
        write_status: WriteStatus,
        *,
        extender: SchedulerExtender | None = None,
        binding_poll_s: float = POLL_S,
    ) -> None:
        self._store = store
        self._bind = bind
        self._extender = extender
        name = NAME if extender is None else extender.scheduler
        self._unbound = f"spec.schedulerName={name},spec.nodeName="
        self._retry_s = min(RETRY_S, binding_poll_s)
        self._claims = ClaimScheduling(store, matches, write_status, poll_s=binding_poll_s)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            watch = self._store.watch("pods", fields=self._unbound)
            try:
                while True:
                    watch.poll()
                    waiting = await self._schedule()
                    async with asyncio.timeout(self._retry_s if waiting else None):
                        await watch.wait()
            except TimeoutError:
                continue
            except ApiError as error:
                log.info("watching pods from the start: %s", error)

    async def _schedule(self) -> bool:
        """Bind the pods that fit; return whether others wait."""
        pending = [pod for pod in self._store.list("pods", fields=self._unbound) if _is_ready(pod)]
        self._claims.forget_others(pending)
        waiting = False
        for pod in pending:
            try:
                waiting |= not await self._schedule_pod(pod)
            except ExtenderError as error:
                waiting = True
                self._explain(pod, str(error))
            except ApiError as error:
                waiting = True
                log.info("pod %s/%s: %s", namespace_of(pod), name_of(pod), error)
        return waiting

    async def _schedule_pod(self, pod: Json) -> bool:
        """Return whether the pod is bound now."""
        extender = self._extender if self._extender and self._extender.is_interested(pod) else None
        volumes = self._volume_claims(pod)
        choice = await self._choose(pod, volumes, extender)
        if choice.refusal:
            self._explain(pod, choice.refusal)
        if not choice.node:
            return False
        if volumes.waiting:
            self._select_node(volumes, choice.node)
            return False
        if extender:
            await extender.bind(pod, choice.node)
        else:
            self._bind(namespace_of(pod), name_of(pod), choice.node)
        return True

    async def _choose(
        self, pod: Json, volumes: PodClaims, extender: SchedulerExtender | None
    ) -> NodeChoice:
        nodes = self._store.list("nodes")
        extended = [] if extender else extended_requests(pod)
        if extended:
            classes = classes_by_resource(self._store.list("deviceclasses"))
            if refusal := unserved_text(extended, classes, nodes):
                return NodeChoice(refusal=refusal)
        if extended or list_at(pod, "spec.resourceClaims"):
            return await self._claims.choose(pod, volumes, extended)
        pods = self._store.list("pods")
        fitting = fitting_nodes(pod, nodes, pods, volumes)
        if extender:
            fitting = await extender.narrow(pod, fitting)
        return fitting.choice

    def _volume_claims(self, pod: Json) -> PodClaims:
        claims = self._store.list("persistentvolumeclaims")
        own = {
            name_of(claim): claim for claim in claims if namespace_of(claim) == namespace_of(pod)
        }
        volumes = {name_of(volume): volume for volume in self._store.list("persistentvolumes")}
        kinds = {
            name_of(storage_class): storage_class
            for storage_class in self._store.list("storageclasses")
        }
        return claims_of(pod, own, volumes, kinds)

    def _select_node(self, claims: PodClaims, node: str) -> None:
        """Take volumes that are there for the claims, or have some provisioned for the node."""
        annotation = {"metadata": {"annotations": {SELECTED_NODE: node}}}
        chosen = self._store.read("nodes", None, node)
        for claim, _ in claims.waiting:
            volume = claims.static_volume(claim, chosen)
            if volume is None:
                self._store.patch(CLAIMS, namespace_of(claim), name_of(claim), annotation)
            elif at_path(volume, "spec.claimRef") is None:
                patch = {
                    "metadata": {"annotations": {BOUND_BY_CONTROLLER: "yes"}},
                    "spec": {"claimRef": reference_to(claim)},
                }
                self._store.patch(VOLUMES, None, name_of(volume), patch)

    def _explain(self, pod: Json, refusal: str) -> None:
        current = self._store.find("pods", namespace_of(pod), name_of(pod))
        if current is None or at_path(current.obj, "spec.nodeName"):
            return
        conditions = list_at(pod, "status.conditions")
        others = [condition for condition in conditions if condition.get("type") != "PodScheduled"]
        before: Json = next(
            (condition for condition in conditions if condition.get("type") == "PodScheduled"), {}
        )
        if before.get("message") == refusal:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": refusal,
            "lastTransitionTime": self._store.now(),
        }
        patch = {"status": {"conditions": [*others, condition]}}
        self._store.patch("pods", namespace_of(pod), name_of(pod), patch, subresource="status")


def _is_ready(pod: Json) -> bool:
    is_gated = bool(at_path(pod, "spec.schedulingGates"))
    return not (is_gated or metadata(pod).get("deletionTimestamp"))
