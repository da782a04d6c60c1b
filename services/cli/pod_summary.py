"""Pods of the API server, as the commands read them; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.dialects import GPU_RESOURCES
from shared.dialects.dialect import ContainerManifest, PodManifest
from shared.dialects.kai.elsewhere import as_resources
from shared.dialects.vocabulary import unknown_gpus
from shared.kubernetes.types import ApiPod, ObjectMeta, PodStatus
from shared.model.bounds import cut
from shared.model.errors import RequestError
from shared.model.names import Namespace, PodUid
from shared.model.quantity import parse_count, parse_quantity
from shared.model.requests.claim import EXTENDED_RESOURCES
from shared.pods.observed_pod import rejection_of
from shared.pods.pod_snapshot import claim_names


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    pod: PodUid
    namespace: Namespace
    name: str
    node: str = ""
    phase: str = ""
    scheduler: str = ""
    gates: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    claim_objects: tuple[str, ...] = ()
    """Names of the ResourceClaims that exist, also for extended resources."""
    requests_gpus: bool = True
    """By a resource of a dialect with more than 0, or by a claim."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Resources that no dialect has, and whose names are those of GPUs."""
    requested: frozenset[str] = frozenset()
    """Resources of dialects with more than 0."""
    none: frozenset[str] = frozenset()
    """Resources of dialects with 0."""
    annotated: str = ""
    """How a pod without a GPU requests by resources what its annotations stand for."""
    controller: str = ""
    """Such as `Job train`."""
    deployment: str = ""
    revision: str = ""
    """The label of that Deployment's ReplicaSet."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    unschedulable_message: str = ""
    """Of the condition PodScheduled while it is false."""
    rejection: str = ""
    """Of its kubelet, as `reason: message`."""
    failure: str = ""
    """Of its kubelet or the container that failed first."""

    @property
    def is_active(self) -> bool:
        return self.phase not in {"Succeeded", "Failed"}


POD_TEMPLATE_HASH = "pod-template-hash"


def _deployment_of(meta: ObjectMeta) -> str:
    """The names of a Deployment's ReplicaSets end with their revision."""
    suffix = f"-{meta.labels.get(POD_TEMPLATE_HASH, '')}"
    owners = (owner.name for owner in meta.owner_references if owner.kind == "ReplicaSet")
    return next((name.removesuffix(suffix) for name in owners if name.endswith(suffix)), "")


def _controller_of(meta: ObjectMeta) -> str:
    owners = (f"{owner.kind} {owner.name}" for owner in meta.owner_references if owner.controller)
    return next(owners, "")


def _amounts(pod: ApiPod) -> Iterator[tuple[str, object]]:
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        yield from {**container.resources.requests, **container.resources.limits}.items()


def _is_none(amount: object) -> bool:
    try:
        return parse_quantity(str(amount)) == 0
    except RequestError:
        return False


def _whole(amount: object) -> int:
    try:
        return parse_count(str(amount))
    except RequestError:
        return 0


def _claim_objects(pod: ApiPod) -> Iterator[str]:
    yield from claim_names(pod)
    if (extended := pod.status.extended_resource_claim_status) is not None:
        yield extended.resource_claim_name


def _annotated(pod: ApiPod) -> str:
    containers = (
        *(ContainerManifest(name=it.name, init=True) for it in pod.spec.init_containers),
        *(ContainerManifest(name=it.name) for it in pod.spec.containers),
    )
    meta = pod.metadata
    manifest = PodManifest(
        namespace=Namespace(meta.namespace), containers=containers, annotations=meta.annotations
    )
    instead = as_resources(manifest)
    return instead.text if instead is not None else ""


def _failure_of(status: PodStatus) -> str:
    if status.phase != "Failed":
        return ""
    if status.reason:
        return cut(f"{status.reason}: {status.message}".removesuffix(": "))
    for container in (*status.init_container_statuses, *status.container_statuses):
        ended = container.state.terminated or {}
        if ended.get("exitCode"):
            reason = ended.get("reason") or "Error"
            return cut(f"container {container.name}: {reason}, exit code {ended['exitCode']}")
    return ""


def summary_of(pod: ApiPod) -> PodSummary:
    amounts = dict(_amounts(pod))
    return PodSummary(
        requests_gpus=bool(pod.spec.resource_claims)
        or any(
            name.startswith(EXTENDED_RESOURCES) or (name in GPU_RESOURCES and not _is_none(amount))
            for name, amount in _amounts(pod)
        ),
        controller=_controller_of(pod.metadata),
        deployment=_deployment_of(pod.metadata),
        revision=pod.metadata.labels.get(POD_TEMPLATE_HASH, ""),
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        node=pod.spec.node_name,
        phase=pod.status.phase,
        scheduler=pod.spec.scheduler_name,
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        claims=tuple(claim.name for claim in pod.spec.resource_claims),
        claim_objects=tuple(filter(None, _claim_objects(pod))),
        requested=frozenset(
            name
            for name, amount in amounts.items()
            if name in GPU_RESOURCES and not _is_none(amount)
        ),
        none=frozenset(
            name for name, amount in amounts.items() if name in GPU_RESOURCES and _is_none(amount)
        ),
        annotated=_annotated(pod),
        unknown={name: _whole(amounts[name]) for name in unknown_gpus(amounts)},
        annotations=pod.metadata.annotations,
        rejection=rejection_of(pod.status),
        failure=_failure_of(pod.status),
        unschedulable_message=next(
            (
                condition.message
                for condition in pod.status.conditions
                if condition.type == "PodScheduled" and condition.status == "False"
            ),
            "",
        ),
    )
