"""The order of waiting pods among namespaces, and its explanation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.pod_summary import PodSummary
from shared.model.budgets.fair_share import (
    Entitlement,
    FairShare,
    GpuAmount,
    fair_order,
    fair_share_of,
    precedence_reason,
)
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import WaitingPod
from shared.model.names import Namespace, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import SharingPolicy
from tests.support.build import device, gpu, lease, pod_queued, request, share
from tests.support.snapshots import cluster_of, explained

A, B = Namespace("team-a"), Namespace("team-b")
TOTAL = GpuAmount(cores_percent=1_000, memory_mib=100_000)


def waits(name: str, namespace: Namespace, at: float = 0.0, *, priority: int = 0) -> PodQueued:
    requested = request(gpu(memory=10_000), priority=priority)
    return pod_queued(name, requested, namespace=namespace, created_at=at)


def names(pods: list[PodQueued]) -> list[str]:
    return [pod.name for pod in pods]


def test_namespaces_of_equal_use_alternate_and_the_oldest_pod_is_first() -> None:
    pods = [waits(f"a{n}", A, n) for n in range(3)] + [waits(f"b{n}", B, 10 + n) for n in range(3)]

    assert names(fair_order(pods, FairShare(total=TOTAL))) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_namespace_of_weight_two_gets_twice_as_many_offers() -> None:
    turns = FairShare(total=TOTAL, entitlements={A: Entitlement(weight=2)})
    pods = [waits(f"a{n}", A, n) for n in range(4)] + [waits(f"b{n}", B, n) for n in range(4)]

    order = names(fair_order(pods, turns))

    assert sorted(order[:3]) == ["a0", "a1", "b0"]
    assert sorted(order[3:6]) == ["a2", "a3", "b1"]


def test_the_larger_fraction_of_cores_and_memory_decides() -> None:
    turns = FairShare(
        total=TOTAL,
        used={A: GpuAmount(memory_mib=30_000), B: GpuAmount(cores_percent=400, memory_mib=10_000)},
    )

    assert names(fair_order([waits("b", B), waits("a", A, 5)], turns)) == ["a", "b"]
    assert turns.dominant_share(B) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("first", "rights", "taken", "why"),
    [
        (waits("x", A), {B: Entitlement(has_budget=False)}, {}, "whose namespace has budget left"),
        (waits("x", A, priority=7), {}, {}, "of priority 7"),
        (waits("x", A), {}, {B: GpuAmount(memory_mib=50_000)}, "count as 0.0%, less than 50.0%"),
        (
            waits("x", A),
            {},
            {A: GpuAmount(memory_mib=50_000)},
            "when GPUs that are being offered are counted",
        ),
        (waits("x", B, -5), {}, {}, "which is older"),
    ],
)
def test_the_reason_why_another_pod_precedes_it_is_named(
    first: PodQueued,
    rights: dict[Namespace, Entitlement],
    taken: dict[Namespace, GpuAmount],
    why: str,
) -> None:
    turns = FairShare(total=TOTAL, entitlements=rights, used=taken)

    assert why in precedence_reason(first, waits("y", B), turns)


def test_use_is_summed_and_unhealthy_devices_do_not_count() -> None:
    whole = share("GPU-0", memory_mib=32_768, sharing=SharingPolicy.EXCLUSIVE)
    leases = [
        lease("p", "n1", whole, namespace="team-a"),
        lease("q", "n1", share("GPU-1", memory_mib=1_000, cores_percent=20), namespace="team-a"),
    ]
    devices = [device("GPU-0"), device("GPU-1"), device("GPU-2", healthy=False)]

    turns = fair_share_of(devices, leases, {})

    assert turns.total == GpuAmount(cores_percent=200, memory_mib=2 * 32_768)
    assert turns.used == {A: GpuAmount(cores_percent=120, memory_mib=33_768)}


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 2)), max_size=20),
    st.integers(1, 4),
)
def test_every_pod_has_one_position_and_within_a_namespace_priority_and_age_decide(
    made: list[tuple[Namespace, int]], weight: int
) -> None:
    pods = [waits(f"{n}", space, n, priority=priority) for n, (space, priority) in enumerate(made)]

    order = fair_order(pods, FairShare(total=TOTAL, entitlements={A: Entitlement(weight=weight)}))

    assert sorted(names(order)) == sorted(names(pods))
    for namespace in (A, B):
        own = [pod for pod in order if pod.namespace == namespace]
        assert own == sorted(own, key=lambda pod: (-pod.request.priority, pod.created_at))


def test_explain_shows_the_position_in_the_queue_and_the_pod_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = tuple(
        WaitingPod(queued=queued, refusal=Refusal(reason="full"), capacity=1)
        for queued in (waits("rich", A), waits("poor", B, 5))
    )
    turns = FairShare(
        total=TOTAL, used={A: GpuAmount(memory_mib=40_000)}, entitlements={A: Entitlement(weight=2)}
    )
    cluster = cluster_of(waiting=waiting, now=100.0)
    monkeypatch.setattr(cluster.projection, "fair_share", lambda: turns)
    pod = PodSummary(pod=PodUid("rich"), namespace=A, name="rich", scheduler="leasehold")

    answer = explained(pod, cluster)

    assert (
        "queue       position 2 of 2; after team-b/poor, whose namespace's GPUs count as "
        "0.0%, less than 20.0%"
    ) in answer.lines
    assert (
        "namespace   team-a holds 40.0% of the GPUs, which counts as 20.0% by its "
        "weight of 2; its GPU budget is not used up"
    ) in answer.lines
    assert answer.waiting is not None
    assert answer.waiting.queue.position == 2
