"""Stages of admission: each alone, and where the order of the table decides."""

from typing import Any

import pytest

from services.webhook.admission import STAGES, AdmissionDecision, Pods, Stage, decide
from services.webhook.pod_admission import (
    FORBIDDEN,
    AdmissionPolicy,
    Changes,
    PodAdmission,
    SchedulerChoice,
)
from services.webhook.stages.completion import apply_budget, set_priority_class
from services.webhook.stages.copied_state import remove_copied_state
from services.webhook.stages.devices import hide_devices
from services.webhook.stages.gpu_request import replace_resource_names
from services.webhook.stages.schedulers import choose_scheduler
from shared.model.denial import Denial
from tests.support.webhook.reviews import Obj, budget, container, decided, gpu, pod, reviewed

OTHERS = {"nvidia.com/vgpu": "2"}
NAMES = {"nvidia.com/vgpu": "nvidia.com/gpu"}


def admission(obj: Obj, **facts: Any) -> PodAdmission:
    return PodAdmission(pod=reviewed(obj), **{"policy": AdmissionPolicy(), **facts})


def paths(changes: Any) -> list[str]:
    assert isinstance(changes, Changes)
    return [patch.path for patch in changes.patches]


def test_an_exhausted_budget_denies_gates_or_admits() -> None:
    denied = apply_budget(admission(pod(gpu()), budget=budget(new_pods="deny")))
    gated = apply_budget(admission(pod(gpu()), budget=budget(new_pods="queue")))

    assert isinstance(denied, Denial)
    assert "team-a is exhausted and denies new GPU pods" in denied.text
    assert paths(gated) == ["/spec/schedulingGates"]
    assert apply_budget(admission(pod(gpu()), budget=budget(new_pods="admit"))) is None
    assert apply_budget(admission(pod(gpu()))) is None


def test_a_pod_without_anything_to_change_is_left_as_it_is() -> None:
    plain = admission(pod(container(), schedulerName="leasehold"))

    for stage in (remove_copied_state, replace_resource_names, hide_devices, choose_scheduler):
        assert stage(plain) is None
    assert set_priority_class(plain) is None


def test_a_stage_shows_the_changed_pod_to_later_stages() -> None:
    copy = admission(pod(gpu(), notes={"leasehold.dev/lease": "{}", "mine": "1"}))

    changes = remove_copied_state(copy)

    assert isinstance(changes, Changes)
    assert changes.pod is not None
    assert dict(changes.pod.annotations) == {"mine": "1"}
    assert paths(changes) == ["/metadata/annotations/leasehold.dev~1lease"]


def test_stages_for_leased_pods_see_the_names_that_an_earlier_stage_has_replaced() -> None:
    renamed = pod(container("main", OTHERS))

    decision = decided(renamed, resource_names=NAMES, runtime_class="nvidia")

    assert decision.requests_gpu
    assert "/spec/runtimeClassName" in [patch.path for patch in decision.patches]
    assert not decided(renamed, runtime_class="nvidia").requests_gpu


MALFORMED = {"tencent.com/vcuda-core": "50"}
DISK = [{"name": "data", "iscsi": {"iqn": "x"}}]


@pytest.mark.parametrize(
    ("obj", "text", "code"),
    [
        (pod(container("main", MALFORMED), hostPID=True), "hostPID", 403),
        (
            pod(container("main", MALFORMED), volumes=DISK),
            "tencent.com/vcuda-core",
            400,
        ),
        (pod(gpu(), volumes=DISK), "only kube-scheduler supports it", 403),
        (pod(gpu()), "denies new GPU pods", 403),
    ],
    ids=["policy", "request", "fields", "budget"],
)
def test_of_several_reasons_the_pod_is_denied_for_the_one_of_the_first_stage(
    obj: Obj, text: str, code: int
) -> None:
    decision = decided(obj, budget=budget(new_pods="deny"))

    assert text in decision.message
    assert decision.code == code


def test_a_stage_applies_to_the_pods_of_its_row_only() -> None:
    def deny(_: PodAdmission) -> Denial:
        return Denial(FORBIDDEN, "denied")

    def is_denied(obj: Obj, pods: Pods, *, exempted: bool = True, exempt: bool = False) -> bool:
        choice = SchedulerChoice(served=frozenset({"leasehold"}))
        subject = admission(obj, policy=AdmissionPolicy(schedulers=choice), exempt=exempt)
        row = Stage(deny, "alone", pods, exempted)
        return not decide(subject, (row,)).allowed

    ours = pod(container(), schedulerName="leasehold")
    foreign = pod(gpu(), schedulerName="other")
    assert [is_denied(obj, Pods.LEASED) for obj in (pod(gpu()), ours, foreign)] == [1, 0, 0]
    assert [is_denied(obj, Pods.NOT_LEASED) for obj in (pod(gpu()), ours, foreign)] == [0, 1, 1]
    assert [is_denied(obj, Pods.PLACED) for obj in (pod(gpu()), ours, foreign)] == [1, 1, 0]
    assert [is_denied(obj, Pods.PLACED_NOT_LEASED) for obj in (pod(gpu()), ours)] == [0, 1]
    assert not is_denied(pod(gpu()), Pods.ALL, exempted=False, exempt=True)


def test_every_row_says_why_it_is_where_it_is() -> None:
    assert [row for row in STAGES if not row.order] == []
    assert decide(admission(pod(container())), STAGES) == AdmissionDecision(allowed=True)
