"""Plans for gangs, and gangs among those that would end: as a whole, or their minimum stays."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.planner.plan import (
    EvictionLimits,
    PlanInput,
    PreemptionPlan,
    plan,
    plan_for_gang,
    unit_of,
    unreached,
)
from services.planner.rules import Allowance
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals
from shared.model.names import PodUid
from shared.model.requests.request import Gang, PodRequest
from shared.placing.endable_leases import EndableLease, needs_others
from shared.placing.gang_room import GangRoomSearch
from shared.placing.room import ClusterTrials, without
from shared.placing.trial_cluster import TrialCluster
from shared.pods.pod_snapshot import DisruptionBudget
from tests.support.build import pod_queued
from tests.support.effort import tries
from tests.support.placer.ledger import share, verdict
from tests.unit.planner.test_plan import SIZE, candidate, lease, node_totals, requesting

GANG = Gang(name="b/g", min_member=2)
WHOLE = requesting(SIZE)


def in_gang(of: Lease, least: int, gang: str = "a/old") -> Lease:
    return structs.replace(of, gang=gang, gang_min=least)


def on_gpus(pod: str, node: str, *gpus: int) -> Lease:
    """A lease of whole GPUs."""
    shares = tuple(share(node, gpu, mib=SIZE) for gpu in gpus)
    return structs.replace(lease(pod, node, gpus[0], SIZE), shares=shares)


def inputs(
    *nodes: NodeTotals, spared: Sequence[str] = (), ending: Sequence[str] = (), **limits: Any
) -> PlanInput:
    """All leases may end, except the spared ones."""
    leases = [lease for totals in nodes for lease in totals.leases]
    return PlanInput(
        trials=ClusterTrials(nodes),
        candidates=[candidate(of) for of in leases if of.name not in spared],
        limits=EvictionLimits(**limits),
        ending={PodUid(pod) for pod in ending},
    )


def node(name: str, gpus: int, *leases: Lease, rack: str = "") -> NodeTotals:
    totals = node_totals(name, gpus, leases)
    labelled = replace(totals.node.facts, labels={"rack": rack} if rack else {})
    return replace(totals, node=replace(totals.node, facts=labelled))


def victims(found: PreemptionPlan | str) -> list[str]:
    assert isinstance(found, PreemptionPlan), found
    return [victim.lease.name for victim in found.victims]


def gang_plan(
    given: PlanInput, pods: int = 2, needed: int = 2, request: PodRequest = WHOLE, **gang: Any
) -> PreemptionPlan | str:
    return plan_for_gang([request] * pods, needed, structs.replace(GANG, **gang), given)


def test_a_gang_gets_room_for_all_its_pods_on_several_nodes() -> None:
    given = inputs(
        node("a", 2, on_gpus("a0", "a", 0), on_gpus("a1", "a", 1)),
        node("b", 1, on_gpus("b0", "b", 0)),
    )

    found = gang_plan(given, pods=3, needed=3)

    assert victims(found) == ["a0", "a1", "b0"]
    assert isinstance(found, PreemptionPlan)
    assert Counter(placement.node for placement in found.placed) == {"a": 2, "b": 1}
    assert len(found.devices) == 3


def test_what_is_idle_is_used_first_and_only_as_many_pods_as_start_together_get_room() -> None:
    given = inputs(node("a", 2, on_gpus("a0", "a", 0)), node("b", 1, on_gpus("b0", "b", 0)))

    found = gang_plan(given, pods=3)

    assert len(victims(found)) == 1
    assert isinstance(found, PreemptionPlan)
    assert [placement is None for placement in found.placements] == [False, False, True]


def test_there_is_no_plan_for_a_part_of_a_gang() -> None:
    given = inputs(node("a", 2, on_gpus("a0", "a", 0), on_gpus("a1", "a", 1)), spared=["a1"])

    assert victims(gang_plan(given, pods=1, needed=1)) == ["a0"]
    assert isinstance(gang_plan(given), str)


def test_room_is_made_for_the_largest_minimum_that_pods_of_a_gang_name() -> None:
    """A placer lets them start with no fewer."""
    gangs = [Gang(name="b/g", min_member=least) for least in (2, 3, 2)]
    pods = [
        verdict(pod_queued(f"p{number}", structs.replace(WHOLE, gang=gang)), capacity=1)
        for number, gang in enumerate(gangs)
    ]

    whole = unit_of("b/g", pods)
    part = unit_of("b/g", pods[:2])

    assert (whole.needed, whole.gang) == (3, gangs[1])
    assert not unreached(whole)
    assert unreached(part) == "2 pods of its gang wait, and it needs 3"


def test_a_gang_that_fits_ends_nothing() -> None:
    given = inputs(node("a", 2), node("b", 1, on_gpus("b0", "b", 0)))

    assert gang_plan(given) == "it will fit on the nodes as they are"


def test_the_lease_whose_end_makes_room_for_most_pods_ends() -> None:
    given = inputs(
        node("a", 2, on_gpus("a0", "a", 0), on_gpus("a1", "a", 1)),
        node("b", 2, on_gpus("large", "b", 0, 1)),
    )

    assert victims(gang_plan(given)) == ["large"]


def test_what_turns_out_not_to_be_needed_is_spared() -> None:
    # For each pod one lease ends: `a0` first, then the gang as a whole, which suffices alone.
    members = [in_gang(on_gpus(f"m{gpu}", "b", gpu), 4) for gpu in range(4)]
    given = inputs(node("a", 1, on_gpus("a0", "a", 0)), node("b", 4, *members))

    assert victims(gang_plan(given, 4, 4)) == ["m0", "m1", "m2", "m3"]


def test_several_leases_end_where_none_alone_makes_room() -> None:
    given = inputs(
        node("a", 2, *(lease(f"a{n}", "a", n // 2, SIZE // 2) for n in range(4))),
        node("b", 1, lease("b0", "b", 0, SIZE // 2), lease("b1", "b", 0, SIZE // 4)),
    )

    assert len(victims(gang_plan(given))) == 4
    two_gpus = gang_plan(given, pods=1, needed=1, request=requesting(SIZE, gpus=2))
    assert victims(two_gpus) == ["a0", "a1", "a2", "a3"]


def test_pods_of_two_kinds_get_room_together() -> None:
    given = inputs(
        node("a", 1, on_gpus("a0", "a", 0)),
        node("b", 2, on_gpus("b0", "b", 0), on_gpus("b1", "b", 1)),
    )
    requests = [requesting(SIZE, gpus=2), requesting(SIZE // 2)]

    found = plan_for_gang(requests, 2, GANG, given)

    assert victims(found) == ["a0", "b0", "b1"]


def test_pods_of_another_kind_get_the_room_that_a_whole_gang_leaves() -> None:
    members = [in_gang(on_gpus(name, name, 0), 2) for name in "ab"]
    given = inputs(*(node(name, 1, of) for name, of in zip("ab", members, strict=True)))

    outcome = plan_for_gang([WHOLE, requesting(SIZE // 2)], 2, GANG, given)

    assert victims(outcome) == ["a", "b"]


def test_limits_and_disruption_budgets_hold_for_all_victims_together() -> None:
    nodes = (node("a", 2, on_gpus("a0", "a", 0), on_gpus("a1", "a", 1)),)
    web = DisruptionBudget(name="a/web", pods=frozenset(map(PodUid, ("a0", "a1"))), allowed=1)
    few = Allowance(total=1, per_namespace=6)

    assert len(victims(gang_plan(inputs(*nodes)))) == 2
    assert isinstance(gang_plan(inputs(*nodes, disruption_budgets=[web])), str)
    assert isinstance(gang_plan(inputs(*nodes, allowance=few)), str)


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_gang_ends_as_a_whole_wherever_it_runs(wanted: int) -> None:
    members = [in_gang(on_gpus(name, name, 0), 3) for name in "abc"]
    given = inputs(*(node(name, 1, of) for name, of in zip("abc", members, strict=True)))
    for_pod = plan(WHOLE, given)

    found = for_pod if wanted == 1 else gang_plan(given)

    assert victims(found) == ["a", "b", "c"]


def test_other_leases_end_rather_than_a_whole_gang() -> None:
    members = [in_gang(on_gpus(name, name, 0), 3) for name in "abc"]
    halves = [lease(f"d{n}", "d", 0, SIZE // 2) for n in range(2)]
    given = inputs(
        *(node(name, 1, of) for name, of in zip("abc", members, strict=True)),
        node("d", 1, *halves),
    )

    assert victims(plan(WHOLE, given)) == ["d0", "d1"]


@pytest.mark.parametrize(
    ("running", "least", "ended"),
    [(3, 2, 1), (3, 1, 2), (4, 2, 2), (3, 3, 3), (4, 3, 4)],
)
def test_so_many_pods_of_a_gang_end_that_its_minimum_stays(
    running: int, least: int, ended: int
) -> None:
    gpus = range(running)
    members = [in_gang(on_gpus(f"m{gpu}", "a", gpu), least) for gpu in gpus]
    given = inputs(node("a", running, *members))
    wanted = 1 if ended == 1 else 2

    found = gang_plan(given, pods=wanted, needed=wanted)

    assert len(victims(found)) == ended


def test_a_gang_with_a_pod_that_may_not_be_evicted_stays() -> None:
    members = [in_gang(on_gpus(f"m{gpu}", "a", gpu), 2) for gpu in range(2)]

    assert isinstance(plan(WHOLE, inputs(node("a", 2, *members), spared=["m1"])), str)
    assert isinstance(gang_plan(inputs(node("a", 2, *members), spared=["m1"]), 1, 1), str)


@pytest.mark.parametrize(("running", "ended"), [(3, None), (4, ["m1"])])
def test_pods_that_another_preemption_ends_are_none_that_stay_and_do_not_complete_a_gang(
    running: int, ended: list[str] | None
) -> None:
    """The API server may refuse that preemption's evictions."""
    members = [in_gang(on_gpus(f"m{gpu}", "a", gpu), 2) for gpu in range(running)]
    given = inputs(node("a", running, *members), spared=["m0"], ending=["m0"])

    planned = plan(WHOLE, given)

    assert (None if isinstance(planned, str) else victims(planned)) == ended


def test_a_gang_that_requires_a_rack_gets_room_in_one() -> None:
    nodes = [
        node("a", 1, on_gpus("a0", "a", 0), rack="r1"),
        node("b", 1, rack="r2"),
        node("c", 1, on_gpus("c0", "c", 0), rack="r2"),
        node("d", 1),
    ]

    assert isinstance(gang_plan(inputs(*nodes)), str)  # b and d are idle
    required = gang_plan(inputs(*nodes), required_topology=("rack",))
    assert victims(required) == ["c0"]
    preferred = gang_plan(inputs(*nodes[:3]), preferred_topology=("rack",))
    assert victims(preferred) == ["c0"]
    three = gang_plan(inputs(*nodes), 3, 3, required_topology=("rack",))
    assert isinstance(three, str)


def test_the_search_for_a_large_gang_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.placing.gang_room.MAX_TRIALS", 10)
    nodes = [
        node(name, 4, *(on_gpus(f"{name}{gpu}", name, gpu) for gpu in range(4))) for name in "abcd"
    ]

    assert isinstance(gang_plan(inputs(*nodes), 16, 16), str)
    assert len(victims(gang_plan(inputs(*nodes), 4, 4))) == 4


@st.composite
def clusters(draw: st.DrawFn) -> PlanInput:
    totals = []
    candidates = []
    for name in ("a", "b"):
        leases = []
        for gpu in range(2):
            room = SIZE
            for number in range(draw(st.integers(0, 2))):
                mib = draw(st.sampled_from([4_000, 8_000, 16_000]))
                if mib > room:
                    continue
                room -= mib
                made = lease(f"{name}{gpu}{number}", name, gpu, mib)
                gang = draw(st.sampled_from(["", "", "a/x", "a/y"]))
                if gang:
                    made = in_gang(made, {"a/x": 2, "a/y": 3}[gang], gang)
                leases.append(made)
                if draw(st.integers(0, 4)):
                    candidates.append(candidate(made, priority=draw(st.integers(0, 1))))
        totals.append(node_totals(name, 2, leases))
    return PlanInput(trials=ClusterTrials(totals), candidates=candidates)


def leases_of(ends: Sequence[EndableLease]) -> list[Lease]:
    return [end.lease for end in ends]


def has_gang_that_stays(given: PlanInput) -> bool:
    """Return whether a pod of a gang may not end: then the search may miss what is possible."""
    candidates = {each.lease.pod for each in given.candidates}
    return any(
        needs_others(of) and of.pod not in candidates
        for totals in given.trials.nodes.values()
        for of in totals.leases
    )


def is_whole(ended: Sequence[Lease], given: PlanInput) -> bool:
    """Return whether each gang ends as a whole, or its minimum stays."""
    running = [of for totals in given.trials.nodes.values() for of in totals.leases]
    for gang in {of.gang for of in ended if needs_others(of)}:
        pods = [of for of in running if of.gang == gang]
        left = len(pods) - sum(of.gang == gang for of in ended)
        if 0 < left < pods[0].gang_min:
            return False
    return True


def fit_after(requests: Sequence[PodRequest], given: PlanInput, ended: Sequence[Lease]) -> bool:
    pods = {of.pod for of in ended}
    nodes = [without(totals, pods).node for totals in given.trials.nodes.values()]
    cluster = TrialCluster(nodes)
    placed = [cluster.place(PodUid(str(n)), request) for n, request in enumerate(requests)]
    return all(hasattr(placement, "shares") for placement in placed)


@settings(max_examples=tries(150), deadline=None)
@given(clusters(), st.lists(st.sampled_from([8_000, 16_000]), min_size=1, max_size=4))
def test_a_plan_makes_the_gang_fit_and_there_is_one_if_there_can_be(
    given_input: PlanInput, sizes: list[int]
) -> None:
    requests = [requesting(mib) for mib in sorted(sizes, reverse=True)]
    size = len(sizes)

    found = plan_for_gang(requests, size, GANG, given_input)

    endables = given_input.endables()
    possible = [
        (max((end.tier for end in ends), default=()), count)
        for count in range(len(endables) + 1)
        for ends in combinations(endables, count)
        if is_whole(leases_of(ends), given_input)
        and fit_after(requests, given_input, leases_of(ends))
    ]
    if isinstance(found, str):
        assert not possible or possible[0][1] == 0 or has_gang_that_stays(given_input)
        return
    ended = [end for end in endables if end.lease in found.leases]
    tier, count = min(possible)
    assert is_whole(found.leases, given_input)
    assert fit_after(requests, given_input, found.leases)
    assert len(found.placed) == size
    if not has_gang_that_stays(given_input):
        assert max(end.tier for end in ended) == tier
        assert len(ended) <= 2 * count
    assert plan_for_gang(requests, size, GANG, given_input) == found


def test_leases_end_for_a_large_gang_in_bounded_work() -> None:
    names = [f"n{number:02}" for number in range(16)]
    nodes = [
        node(name, 8, *(on_gpus(f"{name}-{gpu}", name, gpu) for gpu in range(8))) for name in names
    ]
    given_input = inputs(*nodes)
    endables = given_input.endables()
    gangs = given_input.gangs_among(endables)
    search = GangRoomSearch([WHOLE] * 64, 64, nodes, gangs, given_input.allows)

    room = search.room(endables)

    assert room is not None
    assert len(room.ends) == 64
    assert search._left > 20_000 - 400
