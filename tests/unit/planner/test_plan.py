"""Preemption plans against brute force: the pod fits, and no cheaper set of victims exists."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.planner.plan import EvictionLimits, PlanInput, PreemptionPlan, plan
from services.planner.rules import Allowance, EvictionTier, VictimCandidate
from shared.model.devices.device import DeviceUse, numa_cpus_name
from shared.model.leases.lease import Lease, LeaseState
from shared.model.leases.ledger import LedgerNode, NodeTotals, counted_use
from shared.model.leases.preemption import PreemptionCause
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import GpuRequest, PodRequest, SharingPolicy
from shared.placing.endable_leases import Cost, EndableLease, cost_of
from shared.placing.room import MAX_TRIALS, ClusterTrials, RoomSearch, without
from shared.pods.pod_snapshot import DisruptionBudget, PodSnapshot
from tests.support.effort import tries
from tests.support.placer.ledger import device, facts, share
from tests.support.placer.naive import fit_on_node

SIZE = 16_000


def lease(pod: str, node: str, gpu: int, mib: int, *, cores: int = 0, age: float = 100) -> Lease:
    return Lease(
        pod=PodUid(pod),
        namespace=Namespace("a"),
        name=pod,
        node=NodeName(node),
        shares=(share(node, gpu, mib=mib, cores=cores),),
        resources={"cpu": 100, "pods": 1},
        state=LeaseState.ACTIVE,
        created_at=1000 - age,
    )


def node_totals(node: str, gpus: int, leases: Sequence[Lease]) -> NodeTotals:
    devices, used = counted_use(leases)
    known = LedgerNode(
        facts=facts(node),
        used=used.get(NodeName(node), {}),
        devices=tuple(
            (device(node, gpu), devices.get(device(node, gpu).uuid, DeviceUse()))
            for gpu in range(gpus)
        ),
        served=("volcano.sh/vgpu-number",),
    )
    return NodeTotals(node=known, leases=tuple(leases))


def candidate(
    of: Lease,
    *,
    cause: PreemptionCause = PreemptionCause.RECLAIMABLE,
    used_gpu_s: float = 1.0,
    **tier: int,
) -> VictimCandidate:
    pod = PodSnapshot(of.pod, of.node, namespace=of.namespace, name=of.name, owner="r")
    known = {
        "unowned": False,
        "cause": list(PreemptionCause).index(cause),
        "overdraft": 0,
        "priority": 0,
    }
    return VictimCandidate(
        lease=of,
        pods=(pod,),
        cause=cause,
        tier=EvictionTier(**{**known, **tier}),  # type: ignore[arg-type]
        used_gpu_s=used_gpu_s,
    )


def inputs_of(
    leases: Sequence[Lease],
    candidates: Sequence[VictimCandidate],
    *,
    gpus: int = 2,
    leaving: Sequence[PodUid] = (),
    **limits: Any,
) -> PlanInput:
    """Node `a` with these leases on its GPUs."""
    trials = ClusterTrials([node_totals("a", gpus, leases)], leaving)
    return PlanInput(trials=trials, candidates=candidates, limits=EvictionLimits(**limits))


def requesting(mib: int, gpus: int = 1, *, whole: bool = False) -> PodRequest:
    container = GpuRequest(
        container="main",
        gpus=gpus,
        memory_units=None if whole else mib,
        whole=whole,
        sharing=SharingPolicy.EXCLUSIVE if whole else SharingPolicy.SHARED,
    )
    return PodRequest(containers=(container,), resources={"cpu": 100, "pods": 1})


def assert_victims(found: PreemptionPlan | str) -> list[str]:
    assert isinstance(found, PreemptionPlan), found
    return [each.lease.name for each in found.victims]


def test_gpusharing_29_capacity_is_counted_per_device_not_per_node() -> None:
    leases = [lease("p0", "a", 0, 12_000), lease("p1", "a", 1, 12_000)]
    inputs = inputs_of(leases, [candidate(leases[0])])

    assert assert_victims(plan(requesting(16_000), inputs)) == ["p0"]
    others = [lease("k0", "a", 0, 8_000), lease("k1", "a", 1, 8_000)]
    small = [lease("s0", "a", 0, 8_000), lease("s1", "a", 1, 8_000)]
    inputs = inputs_of([*others, *small], [candidate(each) for each in small])
    # 16,000 MiB would be free on the node, and 8,000 on each of its devices.
    assert isinstance(plan(requesting(16_000), inputs), str)


def test_cpus_of_the_gpus_numa_node_are_freed_and_claimed() -> None:
    name = numa_cpus_name(0)
    leases = [
        structs.replace(lease(f"p{n}", "a", 0, 100), resources={name: cpus})
        for n, cpus in enumerate((1, 3))
    ]
    totals = node_totals("a", 1, leases)
    [(card, use)] = totals.node.devices
    numa = replace(totals.node, devices=((replace(card, numa=0, numa_cpus=4), use),))
    inputs = PlanInput(
        trials=ClusterTrials([replace(totals, node=numa)]),
        candidates=[candidate(each) for each in leases],
    )
    container = structs.replace(requesting(100).containers[0], exclusive_cpus=3)

    found = plan(structs.replace(requesting(100), containers=(container,)), inputs)

    assert assert_victims(found) == ["p1"]
    assert isinstance(found, PreemptionPlan)
    assert found.placed[0].numa_cpus == {name: 3}


def test_no_victim_is_chosen_if_the_pod_fits_or_will_fit() -> None:
    leases = [lease("p0", "a", 0, 12_000), lease("p1", "a", 1, 12_000)]
    candidates = [candidate(leases[0])]

    assert isinstance(plan(requesting(4_000), inputs_of(leases, candidates)), str)
    leaving = inputs_of(leases, candidates, leaving=[PodUid("p1")])
    assert isinstance(plan(requesting(16_000), leaving), str)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cause": PreemptionCause.EXPIRED}, {"cause": PreemptionCause.RECLAIMABLE}),
        ({"overdraft": -500}, {"overdraft": -100}),
        ({"priority": -5}, {"priority": 0}),
        ({"used_gpu_s": 1.0}, {"used_gpu_s": 9.0}),
        ({}, {"unowned": 1}),
        (
            {"cause": PreemptionCause.EXPIRED, "used_gpu_s": 9.0},
            {"cause": PreemptionCause.RECLAIMABLE, "used_gpu_s": 1.0},
        ),
    ],
)
def test_the_cheaper_victim_is_chosen(first: dict[str, Any], second: dict[str, Any]) -> None:
    leases = [lease("p0", "a", 0, 16_000), lease("p1", "a", 1, 16_000)]

    for cheap, dear in ((0, 1), (1, 0)):
        candidates = [candidate(leases[cheap], **first), candidate(leases[dear], **second)]
        found = plan(requesting(8_000), inputs_of(leases, candidates))
        assert assert_victims(found) == [f"p{cheap}"]


def test_a_pod_disruption_budget_is_never_exceeded() -> None:
    leases = [lease("s1", "a", 0, 8_000), lease("s2", "a", 0, 8_000), lease("big", "a", 1, 16_000)]
    candidates = [candidate(each, used_gpu_s=float(n)) for n, each in enumerate(leases)]
    candidates[2] = candidate(leases[2], priority=9)
    web = DisruptionBudget(name="a/web", pods=frozenset({PodUid("s1"), PodUid("s2")}), allowed=1)
    inputs = inputs_of(leases, candidates, disruption_budgets=[web])

    assert assert_victims(plan(requesting(16_000), inputs)) == ["big"]
    assert assert_victims(plan(requesting(8_000), inputs)) == ["s1"]


def test_limits_on_victims_are_never_exceeded() -> None:
    leases = [lease("s1", "a", 0, 8_000), lease("s2", "a", 0, 8_000)]
    candidates = [candidate(each) for each in leases]
    inputs = inputs_of(leases, candidates, gpus=1, allowance=Allowance(total=5, per_namespace=1))

    assert isinstance(plan(requesting(16_000), inputs), str)


@given(
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.integers(0, 6),
    st.integers(0, 4),
    st.lists(st.tuples(st.sets(st.sampled_from("abcdef")), st.integers(0, 3)), max_size=3),
    st.integers(0, 6),
)
def test_limits_after_evictions_allow_what_they_would_have_allowed_together(
    names: list[str], total: int, per_namespace: int, budgets: list[Any], first: int
) -> None:
    leases = [
        structs.replace(lease(each, "a", 0, 1), namespace=Namespace(str(each < "d")))
        for each in names
    ]
    limits = EvictionLimits(
        allowance=Allowance(total=total, per_namespace=per_namespace),
        disruption_budgets=[
            DisruptionBudget(name=f"a/{n}", pods=frozenset(map(PodUid, pods)), allowed=allowed)
            for n, (pods, allowed) in enumerate(budgets)
        ],
    )
    if limits.allow(leases[:first]):
        assert limits.after(leases[:first]).allow(leases[first:]) == limits.allow(leases)


def test_plans_with_many_candidates_take_bounded_work() -> None:
    leases = [lease(f"p{gpu}-{n}", "a", gpu, 1_600) for gpu in range(8) for n in range(4)]
    for gpu in range(8):
        leases += [lease(f"q{gpu}", "a", gpu, 9_600)]
    candidates = [candidate(each, used_gpu_s=float(n)) for n, each in enumerate(leases)]
    inputs = inputs_of(leases, candidates, gpus=8)
    wanted = requesting(16_000, gpus=4)
    search = RoomSearch(wanted, inputs.trials)

    room = next(search.rooms(map(endable, candidates)))

    assert len(room.leases) == 20
    assert search._left > MAX_TRIALS - 4_000
    assert assert_victims(plan(wanted, inputs)) == sorted(each.pod for each in room.leases)


def test_of_many_nodes_few_are_tried_until_there_is_room() -> None:
    leases = [lease(f"p{number}", f"n{number:02}", 0, SIZE) for number in range(40)]
    trials = ClusterTrials([node_totals(lease.node, 1, [lease]) for lease in leases])
    search = RoomSearch(requesting(SIZE), trials)

    room = next(search.rooms(endable(candidate(lease)) for lease in leases))

    assert [lease.pod for lease in room.leases] == ["p0"]
    assert search._left >= MAX_TRIALS - 2, "its node with all leases ended, and with this one ended"


def test_trials_are_updated_to_what_new_ones_would_be() -> None:
    full = {name: node_totals(name, 1, [lease(f"p-{name}", name, 0, SIZE)]) for name in "abc"}
    trials = ClusterTrials(full.values())
    request = requesting(SIZE)
    before = trials.node_as_it_is(request)
    trials.placement(request, NodeName("a"), [endable(candidate(full["a"].leases[0]))])

    trials.update([full["a"], full["b"], node_totals("d", 1, [])])
    with_another = trials.node_as_it_is(request)
    trials.update([full["a"], full["b"]], [PodUid("p-b")])
    with_one_that_leaves = trials.node_as_it_is(request)
    trials.update([full["a"], full["b"]])

    assert (before, with_another, with_one_that_leaves) == (None, "d", "b")
    assert trials.node_as_it_is(request) is None
    assert list(trials.nodes.values()) == [full["a"], full["b"]]


def brute(request: PodRequest, inputs: PlanInput) -> Cost | None:
    """Try all sets on every node, and all devices for each."""
    costs = []
    for name, totals in inputs.trials.nodes.items():
        here = [each for each in inputs.candidates if each.lease.node == name]
        for size in range(1, len(here) + 1):
            for victims in combinations(here, size):
                after = without(totals, {each.lease.pod for each in victims})
                if inputs.limits.allow([each.lease for each in victims]) and fit_on_node(
                    request, after.node
                ):
                    costs.append(cost(victims))
    return min(costs, default=None)


def cost(victims: Sequence[VictimCandidate]) -> Cost:
    return cost_of([endable(each) for each in victims])


def endable(each: VictimCandidate) -> EndableLease:
    return EndableLease(lease=each.lease, used_gpu_s=each.used_gpu_s, tier=each.tier)


@st.composite
def plan_inputs(draw: st.DrawFn) -> PlanInput:
    nodes = []
    candidates = []
    for node in ("a", "b"):
        leases = []
        room = {0: SIZE, 1: SIZE}
        for number in range(draw(st.integers(0, 5))):
            gpu = draw(st.integers(0, 1))
            mib = draw(st.sampled_from([4_000, 6_000, 8_000, 16_000]))
            if mib > room[gpu]:
                continue
            room[gpu] -= mib
            made = lease(f"{node}{number}", node, gpu, mib, age=draw(st.integers(1, 3)))
            leases.append(made)
            if draw(st.integers(0, 3)):
                candidates.append(
                    candidate(
                        made,
                        cause=draw(
                            st.sampled_from([PreemptionCause.EXPIRED, PreemptionCause.RECLAIMABLE])
                        ),
                        used_gpu_s=float(draw(st.integers(0, 3))),
                        overdraft=-draw(st.integers(0, 2)),
                        priority=draw(st.integers(0, 1)),
                    )
                )
        nodes.append(node_totals(node, 2, leases))
    pods = [each.lease.pod for each in candidates]
    protected = draw(st.sets(st.sampled_from(pods))) if pods else set()
    budgets = [
        DisruptionBudget(name="a/x", pods=frozenset(protected), allowed=draw(st.integers(0, 2)))
    ]
    limits = EvictionLimits(disruption_budgets=budgets)
    return PlanInput(trials=ClusterTrials(nodes), candidates=candidates, limits=limits)


@settings(max_examples=tries(200), deadline=None)
@given(plan_inputs(), st.sampled_from([4_000, 8_000, 12_000, 16_000]), st.integers(1, 2))
def test_a_plan_makes_the_pod_fit_and_none_is_cheaper(
    inputs: PlanInput, mib: int, gpus: int
) -> None:
    request = requesting(mib, gpus)
    nodes = inputs.trials.nodes
    fits_anyway = any(fit_on_node(request, each.node) for each in nodes.values())

    found = plan(request, inputs)

    best = brute(request, inputs)
    if fits_anyway or best is None:
        assert isinstance(found, str)
        return
    assert isinstance(found, PreemptionPlan)
    victims = [victim.lease for victim in found.victims]
    assert inputs.limits.allow(victims)
    after = without(nodes[found.placed[0].node], {lease.pod for lease in victims})
    assert fit_on_node(request, after.node) == found.placed[0].shares
    assert cost(found.victims) == best
    assert plan(request, inputs) == found
