"""What a hint about a quota or a budget says is done by a program: the pod runs, or must wait."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonpatch
import pytest
from msgspec import to_builtins

from services.webhook.pod_admission import SchedulerChoice
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaLimits
from shared.model.leases.ledger import budget_hint
from shared.placing.refusal.quota_refusals import no_budget, over_quota, quota_hint
from shared.pods.manifest_patches import json_patch
from tests.support.placer.quotas import Team
from tests.support.webhook.hints import (
    KOORDINATOR,
    NAMESPACE,
    NVIDIA,
    RIGHT,
    TENCENT,
    VGPU,
    WAITS,
    Followed,
    Limits,
    Pod,
    added_names,
    charge,
    domains,
    follow,
    follow_or_wait,
    occupied,
)
from tests.support.webhook.reviews import budget, container, pod

MEASURES = ("cores_milli", "milli_gpu", "memory_mib", "cards")
WHOLE = {"volcano.sh/gpu-number": "1"}
CONTAINERS_ONLY = ("volcano.sh/vgpu-number", "volcano.sh/gpu-number")
"""Init containers may not request these."""


def one(limits: Limits, **fields: Any) -> Pod:
    return pod(container("main", dict(limits)), **fields)


def two(limits: Limits) -> Pod:
    return pod(container("main", dict(limits)), container("side", dict(limits)))


def after_init(limits: Limits) -> Pod:
    first = container("first", dict(limits))
    return pod(container("main", dict(limits)), initContainers=[first])


def beside_sidecar(limits: Limits) -> Pod:
    first = container("first", dict(limits), restartPolicy="Always")
    return pod(container("main", dict(limits)), initContainers=[first])


def counted(written: Pod) -> dict[str, int]:
    """Return what a pod counts where no quota refuses it."""
    usage = charge(follow(written).request)
    return {
        "cores_milli": usage.cores_milli,
        "milli_gpu": usage.milli_gpu,
        "memory_mib": usage.memory_mib,
        "cards": len(usage.devices),
    }


def allowed(**limits: int) -> Team:
    return Team(Quota(namespace=NAMESPACE, limits=QuotaLimits(**limits)))


def cases() -> Iterator[Any]:
    for limits in (*RIGHT, {"nvidia.com/gpu": "4"}, NVIDIA | {"nvidia.com/gpu": "2"}):
        for shape in (one, two, after_init, beside_sidecar):
            if shape in {after_init, beside_sidecar} and not limits.keys().isdisjoint(
                CONTAINERS_ONLY
            ):
                continue
            written = follow(shape(limits)).pod
            names = "+".join(name.rpartition("/")[2] for name in limits)
            for measure, amount in counted(written).items():
                if amount > 1:
                    yield pytest.param(
                        limits, written, measure, amount, id=f"{names} {shape.__name__} {measure}"
                    )


def is_the_least(limits: Limits, measure: str) -> bool:
    """Return whether the words of a pod have nothing smaller than the least by this measure.

    Numbers of GPUs are whole ones; containers of a pod of Koordinator never share a card.
    """
    of_koordinator = all(name.startswith("koordinator.sh/") for name in limits)
    return limits == WHOLE or (of_koordinator and measure == "cards")


@pytest.mark.parametrize(("limits", "wrong", "measure", "amount"), [*cases()])
def test_a_pod_that_counts_twice_what_its_quota_allows_is_led_to_one_that_runs(
    limits: Limits, wrong: Pod, measure: str, amount: int
) -> None:
    followed = follow_or_wait(wrong, team=allowed(**{measure: amount // 2}))

    if is_the_least(limits, measure):
        assert followed.waits == "the least"
        return
    assert followed.request.dialect == follow(wrong).request.dialect
    assert domains(dict.fromkeys(added_names(followed.hints))) <= domains(limits)
    assert measure == "cards" or "does not help: request at most" in followed.hints[0].text


LARGE = (
    NVIDIA | {"nvidia.com/gpumem": "9000"},
    VGPU | {"volcano.sh/vgpu-memory": "9000"},
    KOORDINATOR | {"koordinator.sh/gpu-memory": "9000Mi"},
    TENCENT | {"tencent.com/vcuda-memory": "36"},
    {"volcano.sh/gpu-memory": "9000"},
    {"nvidia.com/gpu": "2"},
)
"""One of every system, of which a quarter is enough for a program."""


@pytest.mark.parametrize("limits", LARGE)
@pytest.mark.parametrize("measure", MEASURES[:3])
def test_a_pod_requests_what_others_leave_or_waits_until_they_have_ended(
    limits: Limits, measure: str
) -> None:
    wrong = one(limits)
    amount = counted(wrong)[measure]
    team = allowed(**{measure: amount})

    now = follow(wrong, team=team.holding(**{measure: amount // 2}))
    later = follow_or_wait(wrong, team=team.holding(**{measure: amount}))

    assert "or wait until other pods of namespace team-a have ended" in now.hints[0].text
    assert charge(now.request).memory_mib < charge(follow(wrong).request).memory_mib or (
        measure == "cores_milli"
    )
    assert later.waits == "held by others"
    assert later.pod == wrong


@pytest.mark.parametrize("limits", LARGE)
def test_a_pod_that_is_beyond_a_quota_that_others_hold_requests_less_and_waits(
    limits: Limits,
) -> None:
    wrong = one(limits)
    team = allowed(memory_mib=counted(wrong)["memory_mib"] // 2)

    followed = follow_or_wait(
        wrong, team=team.holding(memory_mib=team.quota.limits.memory_mib or 0)
    )

    assert followed.hints[0].text.split(". ")[1].startswith("Waiting alone does not help: request")
    assert followed.waits == "held by others"
    assert follow(followed.pod, team=team).hints == []


GANG = {
    "gang.scheduling.koordinator.sh/name": "g",
    "gang.scheduling.koordinator.sh/min-available": "3",
}


@pytest.mark.parametrize("limits", LARGE)
@pytest.mark.parametrize("measure", MEASURES[:3])
def test_every_pod_of_a_gang_gets_its_part_of_what_the_quota_allows(
    limits: Limits, measure: str
) -> None:
    amount = counted(one(limits))[measure]
    gang = one(limits, notes=GANG)

    followed = follow(gang, team=allowed(**{measure: 2 * amount}))

    assert "in all pods of the gang: in container main set" in followed.hints[0].text
    assert len(followed.hints) < 3


T4_ONLY = Quota(namespace=NAMESPACE, models=(("T4", QuotaLimits()),), only_models=True)
HOST = "kubernetes.io/hostname"
NODE_A = Quota(namespace=NAMESPACE, pools=("a",), pool_label=HOST)
FEW_A100 = Quota(
    namespace=NAMESPACE,
    models=(("T4", QuotaLimits(memory_mib=0)), ("A100", QuotaLimits(memory_mib=20_000))),
)
ELSEWHERE = {
    "another model": (one(NVIDIA, notes={"nvidia.com/use-gputype": "A100"}), T4_ONLY),
    "more than that model has": (one(NVIDIA | {"nvidia.com/gpumem": "30000"}), T4_ONLY),
    "a denied model": (one(NVIDIA, notes={"nvidia.com/nouse-gputype": "T4"}), T4_ONLY),
    "another node": (one(VGPU, nodeSelector={HOST: "c"}), NODE_A),
    "more than that node has": (one({"volcano.sh/gpu-memory": "30000"}), NODE_A),
    "more of a model": (
        one({"nvidia.com/gpu": "1"}, nodeSelector={HOST: "c"}),
        FEW_A100,
    ),
}


@pytest.mark.parametrize(("wrong", "quota"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_a_pod_is_led_to_where_its_quota_lets_it_run(wrong: Pod, quota: Quota) -> None:
    followed = follow(wrong, team=Team(quota))

    assert followed.hints
    assert "GPUQuota" in followed.hints[0].text
    assert followed.request


@pytest.mark.parametrize("node", ["a", "c"])
@pytest.mark.parametrize("nothing", [QuotaLimits(memory_mib=0), QuotaLimits(cards=0)], ids=str)
def test_a_pod_is_led_to_no_node_where_its_quota_allows_no_model(
    nothing: QuotaLimits, node: str
) -> None:
    quota = Quota(namespace=NAMESPACE, models=(("T4", nothing), ("A100", nothing)))

    followed = follow_or_wait(one(NVIDIA, nodeSelector={HOST: node}), team=Team(quota))

    assert followed.waits == "forbidden"


@pytest.mark.parametrize(("node", "other"), [("a", "b"), ("c", "a")])
def test_a_pod_waits_for_what_others_hold_of_its_model_or_goes_elsewhere(
    node: str, other: str
) -> None:
    limits = QuotaLimits(memory_mib=3_000)
    quota = Quota(namespace=NAMESPACE, models=(("T4", limits), ("A100", limits)))
    team = Team(quota).holding(memory_mib=3_000)

    followed = follow_or_wait(one(NVIDIA, nodeSelector={HOST: node}), team=team)

    assert followed.waits == "held by others"
    assert followed.hints[0].text.endswith(
        f"or change the node selector {HOST} to {other}, if the quota leaves enough of the GPUs of "
        f"node {other}."
    )


def test_what_is_within_a_pool_is_beyond_an_amount_there() -> None:
    quota = replace(NODE_A, limits=QuotaLimits(memory_mib=1_000))

    followed = follow(one(NVIDIA), team=Team(quota))

    [hint] = followed.hints
    assert "set nvidia.com/gpumem: 1000" in hint.text


@pytest.mark.parametrize("limits", LARGE[:5])
def test_a_pod_requests_what_is_free_where_its_quota_lets_it_run(limits: Limits) -> None:
    followed = follow(one(limits), team=Team(NODE_A), index=occupied("a", free_mib=4_000))

    assert "as node a has room for it now; or wait until pods have ended" in followed.hints[0].text


def test_containers_share_a_card_where_the_quota_allows_no_more() -> None:
    followed = follow(two(NVIDIA), team=allowed(cards=1))

    assert not followed.hints


DENIES = budget(new_pods="deny")
HALF = NVIDIA | {"nvidia.com/gpumem": "8000"}
WAITING: dict[str, Callable[[Pod], Followed]] = {
    "held by others": lambda pod: follow_or_wait(
        pod, team=allowed(cards=1).holding(cards=1, memory_mib=9)
    ),
    "full": lambda pod: follow_or_wait(pod, team=Team(NODE_A), index=occupied("a")),
    "forbidden": lambda pod: follow_or_wait(pod, team=allowed(milli_gpu=0)),
    "the least": lambda pod: follow_or_wait(pod, team=allowed(memory_mib=511)),
    "no budget": lambda pod: follow_or_wait(pod, budget=DENIES),
}
"""Circumstances in which no manifest would run, by the kind of the hint."""


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("limits", [HALF, VGPU, KOORDINATOR, TENCENT, WHOLE])
def test_a_hint_without_a_change_is_given_only_where_no_request_would_run(
    kind: str, limits: Limits
) -> None:
    try_pod = WAITING[kind]
    least = {
        name: {"nvidia.com/gpumem": "512", "volcano.sh/vgpu-memory": "512"}.get(name, "1")
        for name in limits
    }
    if "koordinator.sh/gpu-memory" in limits:
        least["koordinator.sh/gpu-memory"] = "512Mi"
    if "tencent.com/vcuda-memory" in limits:
        least["tencent.com/vcuda-memory"] = "2"

    assert try_pod(one(limits)).waits == kind
    assert try_pod(one(least)).waits in WAITS
    assert follow(one(least)).request


def test_a_denial_and_a_pod_that_waits_name_the_same_way_out_of_an_exhausted_budget() -> None:
    [denied] = follow_or_wait(one(NVIDIA), budget=DENIES).hints

    assert denied.text.endswith(budget_hint(NAMESPACE))
    assert no_budget(NAMESPACE).hint == budget_hint(NAMESPACE)


def test_a_pod_without_a_maximum_run_time_gets_the_longest_that_its_quota_allows() -> None:
    wrong = one(NVIDIA)
    excess = QuotaExcess(measure="runTime", limit=7200)

    hint = quota_hint(NAMESPACE, [excess], None)

    patched = jsonpatch.apply_patch(wrong, to_builtins(json_patch(wrong, hint.changes)))
    assert over_quota(NAMESPACE, [excess], None).hint == hint.text
    assert follow(patched).request.term.max_run_s == 7200


KAI = SchedulerChoice(served=frozenset({"leasehold", "kai-scheduler"}))
OF_CONTAINER = "nvidia.com/container.main."
IN_ANNOTATIONS: tuple[dict[str, str], ...] = (
    {"gpu-fraction": "0.5"},
    {"gpu-memory": "8000"},
    {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"},
    {f"{OF_CONTAINER}gpu-memory.request": "8Gi", f"{OF_CONTAINER}gpu-compute.request": "0.5"},
)


@pytest.mark.parametrize("notes", IN_ANNOTATIONS, ids=str)
@pytest.mark.parametrize("measure", MEASURES)
def test_a_pod_that_requests_by_annotations_gets_others(
    notes: dict[str, str], measure: str
) -> None:
    wrong = pod(container("main"), notes=notes, schedulerName="kai-scheduler")
    free = charge(follow(wrong, schedulers=KAI).request)
    amount = len(free.devices) if measure == "cards" else getattr(free, measure)
    if amount == 1:
        return

    followed = follow(wrong, team=allowed(**{measure: amount // 2}), schedulers=KAI)

    assert "request at most" in followed.hints[0].text
    assert followed.request.dialect == "kai"
