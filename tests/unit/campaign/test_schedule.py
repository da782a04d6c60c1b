"""A seed's schedule: the same each time, with every kind of fault in turn."""

from collections import Counter

import pytest

from tests.campaign.schedule import FAULTS, KEPT_PODS, NODES, ROUND_S, rounds_of
from tests.campaign.workload import VOCABULARIES


def test_a_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert rounds_of(7, 600) == rounds_of(7, 600)
    assert rounds_of(7, 600) != rounds_of(8, 600)


def test_a_longer_campaign_begins_as_a_shorter_one() -> None:
    shorter = rounds_of(7, 100)

    assert rounds_of(7, 600)[: len(shorter)] == shorter


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_has_its_turn_before_one_comes_back(seed: int) -> None:
    rounds = rounds_of(seed, 20 * len(FAULTS))

    assert {kind for each in rounds for kind in each.kinds} == set(FAULTS)


def test_only_the_kinds_that_were_chosen_happen() -> None:
    rounds = rounds_of(1, 600, ("kill", "cut"))

    assert {kind for each in rounds for kind in each.kinds} == {"kill", "cut"}


@pytest.mark.parametrize("seed", range(5))
def test_every_fault_is_within_its_bounds(seed: int) -> None:
    for fault in (fault for each in rounds_of(seed, 1200) for fault in each.faults):
        kind = FAULTS[fault.kind]
        assert fault.target in kind.targets
        assert kind.seconds[0] <= fault.lasts_s <= kind.seconds[1]
        assert 0.5 <= fault.at_s <= ROUND_S


def test_a_round_names_the_nodes_whose_agents_are_hostile() -> None:
    rounds = rounds_of(1, 600, ("agent", "kill"))

    for each in rounds:
        assert each.hostile_nodes == {f.target for f in each.faults if f.kind == "agent"}
        assert each.hostile_nodes <= set(NODES)
    assert any(each.hostile_nodes for each in rounds)


def test_pods_of_all_vocabularies_and_gangs_come_and_go() -> None:
    actions = [action for each in rounds_of(3, 1200) for action in each.pods]

    pods = [action.pod for action in actions if action.pod]
    assert {pod.vocabulary for pod in pods} == {*VOCABULARIES, "gang"}
    assert any(pod.forged_node for pod in pods)
    assert {action.verb for action in actions} == {"create", "delete", "remove", "resize"}
    created = Counter(action.name for action in actions if action.verb == "create")
    assert max(created.values()) == 2


def test_no_pod_is_deleted_before_it_is_created() -> None:
    created: set[str] = set()
    for each in rounds_of(4, 1200):
        for action in each.pods:
            created |= {action.name} if action.pod else set()
            assert action.name in created


def test_the_number_of_pods_stays_bounded() -> None:
    alive: set[str] = set()
    for each in rounds_of(5, 3600):
        for action in each.pods:
            alive = alive | {action.name} if action.pod else alive - {action.name}
        assert len(alive) <= KEPT_PODS + 15
