"""How far claims of placed pods are from being bound."""

from datetime import UTC, datetime

import pytest

from services.binder.bind.claim_progress import (
    BIND_COMPLETED,
    SELECTED_NODE,
    ClaimStage,
    progress_of,
)
from shared.kubernetes.storage_objects import ApiVolumeClaim, ClaimSpec, ClaimStatus
from shared.kubernetes.types import ObjectMeta
from shared.model.names import NodeName
from shared.model.requests.request import PodClaim

CLAIM = PodClaim(name="data", uid="u1")
N1 = NodeName("n1")


def stored(
    volume: str = "",
    phase: str = "Pending",
    *,
    uid: str = "u1",
    deleted: bool = False,
    **annotations: str,
) -> ApiVolumeClaim:
    keys = {"node": SELECTED_NODE, "bound": BIND_COMPLETED}
    meta = ObjectMeta(
        name="data",
        uid=uid,
        annotations={keys[key]: value for key, value in annotations.items()},
        deletion_timestamp=datetime(2026, 1, 1, tzinfo=UTC) if deleted else None,
    )
    spec = ClaimSpec(volume_name=volume)
    return ApiVolumeClaim(metadata=meta, spec=spec, status=ClaimStatus(phase=phase))


@pytest.mark.parametrize(
    ("claim", "stage"),
    [
        (stored(), ClaimStage.OPEN),
        (stored(node=""), ClaimStage.OPEN),
        (stored(node="n1"), ClaimStage.SELECTED),
        (stored("pv"), ClaimStage.SELECTED),
        (stored("pv", "Bound", bound="yes"), ClaimStage.BOUND),
        (stored("pv", "Bound", bound="yes", node="n2"), ClaimStage.BOUND),
    ],
)
def test_a_claim_is_bound_once_its_controller_has_finished(
    claim: ApiVolumeClaim, stage: ClaimStage
) -> None:
    assert progress_of(CLAIM, claim, [N1]).stage is stage


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (None, "does not exist any more"),
        (stored(uid="u2"), "was replaced by another one of its name"),
        (stored("pv", "Bound", bound="yes", deleted=True), "is being deleted"),
        (stored("pv", "Lost"), "has lost its volume pv"),
        (stored(node="n2"), "gets its volume for node n2"),
    ],
)
def test_a_claim_that_cannot_be_bound_on_the_node_has_a_reason(
    claim: ApiVolumeClaim | None, reason: str
) -> None:
    progress = progress_of(CLAIM, claim, [N1])

    assert (progress.stage, progress.reason) == (ClaimStage.FAILED, f"claim data {reason}")


def test_a_claim_that_pods_share_may_get_its_volume_for_the_node_of_any() -> None:
    assert progress_of(CLAIM, stored(node="n2"), [N1, NodeName("n2")]).stage is ClaimStage.SELECTED
