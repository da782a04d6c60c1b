"""How far a claim of a placed pod is from being bound; pure.

https://kubernetes.io/docs/concepts/storage/storage-classes/#volume-binding-mode
"""

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from shared.kubernetes.storage_objects import ApiVolumeClaim
from shared.model.names import NodeName
from shared.model.requests.request import PodClaim

SELECTED_NODE = "volume.kubernetes.io/selected-node"
BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
"""kube-controller-manager sets it once both the claim and its volume are bound."""


class ClaimStage(StrEnum):
    OPEN = "open"
    SELECTED = "selected"
    """Its volume is being provisioned for the pod's node, or bound to it."""
    BOUND = "bound"
    FAILED = "failed"


class ClaimProgress(NamedTuple):
    stage: ClaimStage
    reason: str = ""


def progress_of(
    claim: PodClaim, stored: ApiVolumeClaim | None, nodes: Collection[NodeName]
) -> ClaimProgress:
    """A claim whose volume is provisioned for another node has FAILED."""
    failure = _failure(claim, stored, nodes)
    if failure or stored is None:
        return ClaimProgress(ClaimStage.FAILED, f"claim {claim.name} {failure}")
    if stored.spec.volume_name:
        is_complete = BIND_COMPLETED in stored.metadata.annotations
        return ClaimProgress(ClaimStage.BOUND if is_complete else ClaimStage.SELECTED)
    is_selected = bool(stored.metadata.annotations.get(SELECTED_NODE))
    return ClaimProgress(ClaimStage.SELECTED if is_selected else ClaimStage.OPEN)


def _failure(claim: PodClaim, stored: ApiVolumeClaim | None, nodes: Collection[NodeName]) -> str:
    if stored is None:
        return "does not exist any more"
    if claim.uid not in {"", stored.metadata.uid}:
        return "was replaced by another one of its name"
    if stored.metadata.deletion_timestamp is not None:
        return "is being deleted"
    if stored.status.phase == "Lost":
        return f"has lost its volume {stored.spec.volume_name}"
    selected = stored.metadata.annotations.get(SELECTED_NODE)
    if selected and not stored.spec.volume_name and selected not in nodes:
        return f"gets its volume for node {selected}"
    return ""
