"""What is shown of pods whose node kube-scheduler chooses: its reason, ours, and what to try."""

from dataclasses import replace

import pytest
from msgspec import structs

from services.api.projection.handed_over import UNTRIED_ELSEWHERE, UNTRIED_HINT, shown_refusal
from shared.model.leases.ledger import WaitingPod, waits_for_kube_scheduler
from shared.model.requests.placement import Refusal
from tests.support.api.board import projected, seen, waiting

FIELD = "spec.volumes[0].persistentVolumeClaim"
QUEUED = replace(waiting("train").queued, by_kube_scheduler=True, handed_over=FIELD)
NO_ROOM = Refusal(
    reason="0/2 nodes are available: 2 Insufficient GPU memory",
    hint="wait until pods have ended",
    counts=(("InsufficientGpuMemory", 2),),
)


def noted(reason: str) -> WaitingPod:
    return waits_for_kube_scheduler(QUEUED, reason, 5.0)


def test_a_pod_of_a_placer_is_shown_as_it_was_refused() -> None:
    assert shown_refusal(waiting("p")) == waiting("p").refusal


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("", UNTRIED_HINT),
        (
            '0/2 nodes are available: persistentvolumeclaim "data" not found. preemption: 0/2',
            "create the PersistentVolumeClaim data in namespace a",
        ),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            "`kubectl describe pvc -n a` shows why",
        ),
        (
            "0/2 nodes are available: 2 node(s) had volume node affinity conflict.",
            "is on a volume of other nodes",
        ),
        ("2 node(s) didn't match pod anti-affinity rules.", "preferredDuringScheduling"),
        ("2 node(s) didn't match pod topology spread constraints.", "ScheduleAnyway"),
        (
            "0/2 nodes are available: 2 cannot allocate all claims.",
            "if its only ResourceClaim is for devices of gpu.leasehold.dev",
        ),
        ("2 node(s) didn't have free ports for the requested pod ports.", "leave hostPort out"),
        ("filter: the extender did not reply: no reply in time", "`leasehold doctor` shows"),
        (
            "2 the pod belongs to a gang, which starts together, and kube-scheduler binds pods "
            f"one by one: a gang cannot have {FIELD}.",
            "without the fields for which kube-scheduler places them",
        ),
        (
            'resourceclaim.resource.k8s.io "gpu" not found',
            "create the resourceclaim gpu in namespace a, or name another one in a new pod",
        ),
        ("2 something new.", "`kubectl describe pod train -n a` shows its Events"),
    ],
)
def test_each_reason_of_kube_scheduler_is_shown_with_what_to_try(reason: str, hint: str) -> None:
    shown = shown_refusal(noted(reason))

    said = reason or "kube-scheduler has not tried it yet"
    assert shown.reason == f"kube-scheduler places it, for {FIELD}: {said}"
    assert hint in shown.hint
    assert not shown.permanent


@pytest.mark.parametrize(
    ("reason", "hint"),
    [("", UNTRIED_ELSEWHERE), ("3 cannot allocate all claims.", "wait until pods have ended.")],
)
def test_a_pod_of_another_scheduler_is_shown_with_its_name(reason: str, hint: str) -> None:
    queued = replace(QUEUED, scheduler="default-scheduler", handed_over="spec.resourceClaims")

    shown = shown_refusal(waits_for_kube_scheduler(queued, reason, 5.0))

    said = reason or "default-scheduler has not tried it yet"
    assert shown.reason == f"default-scheduler places it, for spec.resourceClaims: {said}"
    assert shown.hint.startswith(hint)


def test_without_a_field_of_its_own_its_scheduler_name_is_the_cause() -> None:
    pod = replace(noted("no"), queued=replace(QUEUED, handed_over=""))

    assert shown_refusal(pod).reason == "kube-scheduler places it, by its schedulerName: no"


def test_the_reason_of_the_extender_and_its_hint_are_beside_that_of_kube_scheduler() -> None:
    now = "0/3 nodes are available: 2 Insufficient GPU memory, 1 node(s) had untolerated taint(s)."
    pod = replace(noted(now), refusal=NO_ROOM)
    projection = projected()
    projection.update_waiting([pod, noted_of("other")])
    cluster = seen(projection)

    views = {view.name: view for view in cluster.waiting_pods()}

    train = views["train"]
    other = views["other"]
    assert train.reason == f"kube-scheduler places it, for {FIELD}: {now}"
    assert (train.scheduler_reason, train.filter_reason) == (now, NO_ROOM.reason)
    assert (train.hint, train.code) == (NO_ROOM.hint, "InsufficientGpuMemory")
    assert (other.filter_reason, other.code) == ("", "KubeScheduler")
    assert train.handed_over == other.handed_over == FIELD
    assert sorted([train.position, other.position]) == [1, 2]
    assert cluster.queue().by_code == {"InsufficientGpuMemory": 1, "KubeScheduler": 1}


def noted_of(name: str) -> WaitingPod:
    queued = replace(waiting(name).queued, by_kube_scheduler=True, handed_over=FIELD)
    return waits_for_kube_scheduler(queued, "no claim", 5.0)


def test_a_refusal_that_no_freed_device_can_mend_stays_so() -> None:
    pod = replace(noted("no"), refusal=structs.replace(NO_ROOM, permanent=True))

    assert shown_refusal(pod).permanent
