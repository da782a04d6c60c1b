"""What the owner of a pod reads that would not fit even if no other pod ran."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.names import Namespace
from shared.model.placement import Refusal
from shared.model.quota import QuotaExcess
from shared.model.request import GpuRequest, SharingPolicy
from shared.placing.refusal.quota_refusals import over_quota
from tests.support.build import device, gpu, ledger_node, request, use
from tests.support.placer.placing import Cluster, refused


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        (
            (gpu("a", memory=9000), gpu("b", memory=9000)),
            "the pod's containers together need 18000 of the 15360 MiB of device 0 of node n1: "
            "request less memory",
        ),
        (
            (gpu("a", memory=1, cores_percent=60), gpu("b", memory=1, cores_percent=60)),
            "the pod's containers together need 120 % of the cores of device 0 of node n1: "
            "request less",
        ),
        (
            tuple(gpu(name, memory=1) for name in "abc"),
            "the pod's containers need 3 share slots, and device 0 of node n1 has 2: raise "
            "--device-split-count of its node agent, or request GPUs in fewer containers",
        ),
        (
            (gpu("a", memory=1, sharing=SharingPolicy.EXCLUSIVE), gpu("b", memory=1)),
            "the pod's containers need GPUs that they share with no other container, and node n1 "
            "has 1 GPU that the pod may use: request fewer GPUs or less of them",
        ),
        (
            (gpu(memory=16_000),),
            "request at most 15360 MiB, all the memory of device 0 of node n1",
        ),
    ],
)
def test_a_pod_that_would_not_fit_an_empty_node_is_not_advised_to_wait(
    wanted: tuple[GpuRequest, ...], hint: str
) -> None:
    card = device(memory_mib=15_360, slots=2)
    for state in (card, (card, use(4_000, 50, 1))):
        refusal = refused(request(*wanted), ledger_node("n1", state))

        assert refusal.hint == f"waiting does not help: {hint}"
        assert refusal.permanent


def test_containers_that_fit_side_by_side_on_an_idle_gpu_wait_for_it() -> None:
    card = device(memory_mib=15_360)
    pod = request(gpu("a", memory=7_000), gpu("b", memory=7_000))

    refusal = refused(pod, ledger_node("n1", (card, use(4_000))))

    assert not refusal.permanent
    assert refusal.hint.startswith("wait until a pod on these nodes ends")
    assert refusal.nearest_nodes[0].devices[0].reason == (
        "7000 MiB are requested beside 7000 for earlier containers, 11360 of 15360 MiB are free"
    )


@pytest.mark.parametrize(
    ("excess", "hint"),
    [
        (
            QuotaExcess(measure="memoryMiB", limit=6_000, used=0, requested=6_001),
            "at most 6000 MiB",
        ),
        (QuotaExcess(measure="milliGPU", limit=500, used=900, requested=600), "at most 0.5 GPUs"),
        (QuotaExcess(measure="pool", label="pool", values=("a",)), "change which nodes or GPUs"),
    ],
)
def test_a_quota_that_an_empty_namespace_would_exceed_is_not_waited_for(
    excess: QuotaExcess, hint: str
) -> None:
    never = over_quota(Namespace("team"), [excess], None)
    later = QuotaExcess(measure="cards", limit=2, used=2, requested=1)

    assert never.hint.startswith("waiting does not help: ")
    assert hint in never.hint
    assert over_quota(Namespace("team"), [later], None).hint == (
        "wait until a pod of namespace team ends, or raise its GPUQuota (kubectl get gpuquota team)"
    )


def test_too_little_cpu_of_an_empty_node_is_stated_as_what_it_has_in_all() -> None:
    node = ledger_node("n1", device(), allocatable={"cpu": 4_000, "pods": 10}, used={"cpu": 1_000})

    impossible = refused(request(gpu(memory=1), resources={"cpu": 5_000}), node)
    possible = refused(request(gpu(memory=1), resources={"cpu": 4_000}), node)

    assert impossible.hint == (
        "waiting does not help: node n1 has 4 of cpu in all, and 5 are requested"
    )
    assert possible.hint == "request less, or wait: 4 of cpu requested, 3 free on the nearest node"


def test_nodes_that_could_fit_are_nearer_than_those_that_never_can() -> None:
    small = device("GPU-small", memory_mib=15_360)
    large = device("GPU-large", memory_mib=40_960)

    refusal = refused(
        request(gpu(memory=30_000)),
        ledger_node("small", small),
        ledger_node("large", (large, use(39_000))),
    )

    assert [verdict.node for verdict in refusal.nearest_nodes] == ["large", "small"]
    assert not refusal.permanent
    assert "node large" in refusal.hint


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([4_000, 9_000, 20_000]), min_size=1, max_size=3),
    st.lists(st.sampled_from([8_000, 16_000, 30_000]), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_a_hint_to_wait_is_given_only_where_an_empty_cluster_fits_the_pod(
    sizes: list[int], cards: list[int], used: list[int]
) -> None:
    wanted = request(*(gpu(f"c{n}", memory=mib) for n, mib in enumerate(sizes)))
    devices = [device(f"GPU-{n}", memory_mib=mib) for n, mib in enumerate(cards)]

    outcome = Cluster(
        *(
            ledger_node(f"n{n}", (card, use(used[n] * card.memory_mib // 3)))
            for n, card in enumerate(devices)
        )
    ).place(wanted)

    empty = Cluster(*(ledger_node(f"n{n}", each) for n, each in enumerate(devices))).place(wanted)
    if isinstance(outcome, Refusal):
        assert outcome.permanent == isinstance(empty, Refusal)
        assert outcome.hint.startswith("waiting does not help") == outcome.permanent
        assert outcome.permanent or "wait" in outcome.hint or "request at most" in outcome.hint
