"""Pods of the API server, as the commands read them; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.dialects.vocabulary import unknown_gpus
from shared.kubernetes.types import ApiPod
from shared.model.names import Namespace, PodUid
from shared.pods.observed_pod import rejection_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    """A pod as the API server has it."""

    pod: PodUid
    namespace: Namespace
    name: str
    node: str = ""
    phase: str = ""
    scheduler: str = ""
    gates: tuple[str, ...] = ()
    """Its scheduling gates."""
    claims: tuple[str, ...] = ()
    """What its spec calls its ResourceClaims."""
    unknown: tuple[str, ...] = ()
    """Resources that it requests and no dialect has, for GPUs by their names."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    unschedulable_message: str = ""
    """The message of the condition PodScheduled while it is false."""
    rejection: str = ""
    """Why its kubelet rejected it, as `reason: message`; empty if it did not."""

    @property
    def is_active(self) -> bool:
        """Whether its containers run or may still run."""
        return self.phase not in {"Succeeded", "Failed"}


def summary_of(pod: ApiPod) -> PodSummary:
    """Return the summary of a decoded pod."""
    return PodSummary(
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        node=pod.spec.node_name,
        phase=pod.status.phase,
        scheduler=pod.spec.scheduler_name,
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        claims=tuple(claim.name for claim in pod.spec.resource_claims),
        unknown=tuple(
            unknown_gpus(
                name
                for container in (*pod.spec.init_containers, *pod.spec.containers)
                for name in {**container.resources.requests, **container.resources.limits}
            )
        ),
        annotations=pod.metadata.annotations,
        rejection=rejection_of(pod.status),
        unschedulable_message=next(
            (
                condition.message
                for condition in pod.status.conditions
                if condition.type == "PodScheduled" and condition.status == "False"
            ),
            "",
        ),
    )
