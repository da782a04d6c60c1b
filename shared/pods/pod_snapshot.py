"""Pods and PodDisruptionBudgets as binder and planner read them from the API server; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from shared.kubernetes.types import ApiPod, Condition
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.names import PREEMPTIBLE, Namespace, NodeName, PodUid
from shared.pods.observed_pod import TERMINAL

_NO_NAMESPACE = Namespace("")


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """A pod as the API server has it now, or an allocated ResourceClaim."""

    pod: PodUid
    node: NodeName | None
    _: KW_ONLY
    namespace: Namespace = _NO_NAMESPACE
    name: str = ""
    resource_version: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    priority: int = 0
    preempts: bool = True
    grace_s: float = 30.0
    deleting: bool = False
    terminal: bool = False
    """Its phase is Succeeded or Failed."""
    scheduled: Condition = field(default_factory=Condition)
    claims: tuple[str, ...] = ()
    """ResourceClaims; "" for one that is not made from its template yet."""

    @property
    def lease(self) -> str:
        """The copy of its lease, or ""."""
        return self.annotations.get(ANNOTATION, "")

    @property
    def preemptible(self) -> bool:
        """Whether no label forbids its preemption."""
        return self.labels.get(PREEMPTIBLE) != "false"


def snapshot_of(pod: ApiPod) -> PodSnapshot:
    metadata = pod.metadata
    spec = pod.spec
    grace_s = spec.termination_grace_period_seconds
    conditions = (
        condition for condition in pod.status.conditions if condition.type == "PodScheduled"
    )
    return PodSnapshot(
        PodUid(metadata.uid),
        NodeName(spec.node_name) or None,
        namespace=Namespace(metadata.namespace),
        name=metadata.name,
        resource_version=metadata.resource_version,
        annotations=metadata.annotations,
        labels=metadata.labels,
        owner=next((owner.uid for owner in metadata.owner_references if owner.controller), ""),
        priority=spec.priority or 0,
        preempts=spec.preemption_policy != "Never",
        grace_s=30.0 if grace_s is None else grace_s,
        deleting=metadata.deletion_timestamp is not None,
        terminal=pod.status.phase in TERMINAL,
        scheduled=next(conditions, Condition()),
        claims=tuple(claim_names(pod)),
    )


def claim_names(pod: ApiPod) -> Iterator[str]:
    """Yield the names of its ResourceClaims; "" for one that is not made yet."""
    made = {claim.name: claim.resource_claim_name for claim in pod.status.resource_claim_statuses}
    for claim in pod.spec.resource_claims:
        yield claim.resource_claim_name or made.get(claim.name) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisruptionBudget:
    """A PodDisruptionBudget: the pods it selects, and how many of them may be evicted now."""

    name: str
    """`NAMESPACE/NAME`."""
    pods: frozenset[PodUid]
    allowed: int


def generation_of(lease: Lease) -> str:
    """Return which allocation of a claim a lease is for, or "" for that of a pod."""
    return lease.claim.generation if lease.claim else ""
