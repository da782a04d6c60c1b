"""A pod as the API server last reported it; pure."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from shared.dialects.pod_groups import PodGroupReference
from shared.kubernetes.types import PodStatus
from shared.model.bounds import cut
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import CLAIMS_FIELD
from shared.model.requests.pod_rules import PodSelection
from shared.model.requests.request import PodRequest
from shared.pods.pod_anti_affinity import PodAntiAffinity
from shared.pods.pod_volumes import ClaimUse
from shared.pods.storage import ClaimKey

TERMINAL = frozenset({"Succeeded", "Failed"})


class AwaitedClaims(msgspec.Struct, frozen=True):
    """What a pod of another scheduler waits for that has ResourceClaims and no node."""

    scheduler: str
    names: tuple[str, ...]


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    pod: PodUid
    namespace: Namespace
    name: str
    resource_version: str
    ours: bool
    """Its `schedulerName` is one that Leasehold serves."""
    by_kube_scheduler: bool = False
    """A kube-scheduler with Leasehold's extender chooses its node."""
    handed_over: str = ""
    """The fields for which kube-scheduler chooses its node, or ""."""
    node: NodeName | None = None
    phase: str = "Pending"
    rejection: str = ""
    """`REASON: MESSAGE` of the kubelet that rejected it, or ""."""
    deleting: bool = False
    gated: bool = False
    budget_gated: bool = False
    """It has our scheduling gate: it waits for its namespace's budget."""
    priority: int = 0
    shown: int = 0
    """0 without a reason in its PodScheduled condition."""
    has_lease: bool = False
    """It has a copy of its lease, so the ledger counts its usage."""
    grown: Mapping[str, int] = {}
    """What it uses more than its lease since it was resized in place."""
    leased_volumes: Mapping[str, int] = {}
    """How many volumes its lease counts against the limits of CSI drivers."""
    created_at: float = 0.0
    labels: Mapping[str, str] = {}
    repels: tuple[PodAntiAffinity, ...] = ()
    selections: Mapping[str, PodSelection] = {}
    """What its rules about other pods select, by the resource as which it is counted."""
    counted: frozenset[str] = frozenset()
    """The resources as which its lease counts it for the rules of other pods."""
    resources: Mapping[str, int] = {}
    request: PodRequest | None = None
    """None if it is invalid, or if the pod is not ours and awaits no ResourceClaim."""
    request_error: str = ""
    claims: tuple[ClaimUse, ...] = ()
    """PersistentVolumeClaims; `request.claims` is set once they are known."""
    awaited: AwaitedClaims | None = None
    """None for pods that are ours: their scheduler knows them."""
    reviewed: str = ""
    """When its admission review began and ended, as the webhook wrote it."""
    reason: str = ""
    """For a pod that kube-scheduler places or of a PodGroup of Kubernetes, and for all if the
    parser keeps reasons.
    """
    group: PodGroupReference | None = None

    @property
    def claim_keys(self) -> set[ClaimKey]:
        return {(self.namespace, use.claim) for use in self.claims}

    @property
    def is_terminated(self) -> bool:
        return self.phase in TERMINAL

    @property
    def has_ended(self) -> bool:
        """Whether no container runs any more, or will: an API server binds no deleted pod."""
        return self.is_terminated or (self.deleting and self.node is None)

    @property
    def is_pending(self) -> bool:
        """Whether it waits for Leasehold to choose a node."""
        return self._waits and not self.by_kube_scheduler

    @property
    def awaits_kube_scheduler(self) -> bool:
        """Whether it waits for kube-scheduler with Leasehold's extender to choose a node."""
        return self._waits and self.by_kube_scheduler

    @property
    def _waits(self) -> bool:
        return self.ours and not (self.node or self.is_terminated or self.deleting or self.gated)

    @property
    def placed_elsewhere(self) -> str:
        """The group of a pod that another scheduler has placed, or ""."""
        elsewhere = self.by_kube_scheduler or not self.ours
        if self.group is None or self.node is None or not elsewhere or self.phase == "Failed":
            return ""
        return self.group.name

    @property
    def unleased_resources(self) -> Mapping[str, int]:
        """What it uses of its node that no lease accounts for."""
        if self.node is None or self.is_terminated:
            return {}
        return self.grown if self.ours and self.has_lease else self.resources


def queued(pod: ObservedPod, request: PodRequest, *, requeue_number: int = 0) -> PodQueued:
    """The request is valid."""
    return PodQueued(
        pod=pod.pod,
        namespace=pod.namespace,
        name=pod.name,
        resource_version=pod.resource_version,
        request=request,
        created_at=pod.created_at,
        requeue_number=requeue_number,
        shown=pod.shown,
        labels=pod.labels,
        by_kube_scheduler=pod.by_kube_scheduler,
        handed_over=pod.handed_over,
    )


def queued_elsewhere(pod: ObservedPod) -> PodQueued:
    """Return a pod that another scheduler places, once that has allocated its ResourceClaims.

    `handed_over` names its claims if no group, and no GPU by a resource name, keeps it from getting
    devices. With an invalid request, or too large fields, the event has names and priority alone.
    """
    request = pod.request or PodRequest(priority=pod.priority)
    claims_alone = pod.request is not None and not request.containers and pod.group is None
    return replace(
        queued(pod, request),
        labels=pod.labels if pod.request is not None else {},
        by_kube_scheduler=True,
        handed_over=CLAIMS_FIELD if claims_alone else "",
        scheduler=pod.awaited.scheduler if pod.awaited else "",
    )


OUT_OF = "OutOf"
"""The resource follows of which the node has too little."""

AGENT_REFUSES = "Leasehold refuses"
"""The node's agent refused the devices; the kubelet quotes its error."""


def rejection_of(status: PodStatus) -> str:
    """Return `REASON: MESSAGE`, or "".

    A kubelet reports the status of each container only of a pod that it has accepted.
    """
    if status.phase != "Failed" or not status.reason or status.container_statuses:
        return ""
    return cut(f"{status.reason}: {status.message}")


def causes(rejection: str) -> str:
    reason = rejection.partition(":")[0]
    if not reason.startswith(OUT_OF):
        return "its lease has ended; a controller creates another pod, a bare pod is lost"
    return (
        "its lease has ended; a controller creates another pod, a bare pod is lost. Another "
        "scheduler has bound a pod to the node at the same time, which took its last "
        f"{reason.removeprefix(OUT_OF)}: neither scheduler sees the other's choice before it is "
        "bound"
    )


def advice(rejection: str, node: str) -> str:
    if rejection.startswith(OUT_OF):
        return (
            "if it happens often, have one scheduler place the pods of these nodes: "
            "docs/troubleshooting.md"
        )
    return f"kubectl describe node {node}"
