"""GPUs whose free room is kept for a pod: wherever they are shown, for viewers of its namespace."""

from dataclasses import replace

import pytest

from services.api.aggregated.objects import KINDS
from services.api.projection.projection import Projection
from services.cli.inspect import render
from shared.model.leases.ledger import reservation_for
from shared.model.leases.preemption import (
    EndingLease,
    Preemption,
    PreemptionState,
    StoredPreemption,
    StoredStart,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import Gang
from tests.support import build
from tests.support.api.board import devices_of, node_totals, projected, seen
from tests.support.snapshots import drawn

TEAM = Namespace("team")
PLACE = Placement(node=NodeName("n1"), shares=(build.share("GPU-n1-0", 0),))
WANTED = reservation_for(build.pod_queued("f", namespace=TEAM), (PLACE,))
START = StoredStart(
    id="f",
    wanted=(WANTED,),
    at_once=({},),
    waits_for=(
        EndingLease(
            pod=PodUid("e"), namespace=TEAM, name="e", ends_at=1_785_000_000.0, enforced=True
        ),
    ),
    at=1_785_000_000.0,
    enforced=True,
)
PREEMPTION = StoredPreemption(
    preemption=Preemption(id="f", victims=(), wanted=(WANTED,)), version=1, claimed=True
)
GANG = Gang(name="team/train", min_member=2)


def board_of(state: PreemptionState) -> Projection:
    board = projected(node_totals())
    board.update_preemptions(state)
    return board


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (PreemptionState(starts=(START,)), "reserved for team/f until 2026-07-25T17:20:00Z"),
        (
            PreemptionState(starts=(replace(START, gang=GANG),)),
            "reserved for team/gang train until 2026-07-25T17:20:00Z",
        ),
        (PreemptionState(open=(PREEMPTION,)), "reserved for team/f"),
    ],
)
def test_who_sees_the_pods_namespace_sees_for_which_pod_a_gpu_is_reserved(
    state: PreemptionState, text: str
) -> None:
    board = board_of(state)
    [reserved, free] = devices_of(seen(board))
    [hidden, _] = devices_of(seen(board, {"other"}.__contains__))

    assert reserved.reservation is not None
    assert reserved.reservation.text == text
    assert free.reservation is None
    assert hidden.reservation is not None
    assert hidden.reservation.text == text.replace("team/gang train", "another pod").replace(
        "team/f", "another pod"
    )
    assert f"      {text}" in drawn(render.gpus(seen(board).gpus(), 160), 160).splitlines()


def test_a_reserved_gpu_is_not_ready_in_kubectl_and_names_no_pod() -> None:
    [devices] = [kind for kind in KINDS if kind.kind == "GPUDevice"]

    objects = list(devices.read(seen(board_of(PreemptionState(starts=(START,))))))

    assert [(item.status.phase, item.status.message) for item in objects] == [
        ("Reserved", "reserved for another pod until 2026-07-25T17:20:00Z"),
        ("Ready", ""),
    ]


def test_the_end_of_a_reservation_is_a_change_of_its_gpu_alone() -> None:
    board = projected(node_totals())
    key = ("device", "GPU-n1-0")

    assert key in board.update_preemptions(PreemptionState(starts=(START,)))
    assert key not in board.update_preemptions(PreemptionState(starts=(START,)))
    board.update_nodes([], [node_totals()])
    assert board.devices[PLACE.shares[0].device].reservation is not None
    assert key in board.update_preemptions(PreemptionState())
    assert board.devices[PLACE.shares[0].device].reservation is None
