"""Planned starts: the trials of one plan do not change what another finds."""

from random import Random

import pytest

from shared.model.lease import Lease
from shared.model.ledger import NodeTotals
from shared.model.names import PodUid
from shared.placing.room import without
from shared.placing.starts import LeaseEnd, StartTrials, plan_start
from tests.support.api.board import lease, node_totals
from tests.support.build import gpu, request

NODES, GPUS = 4, 4


@pytest.mark.parametrize("seed", range(20))
def test_plans_on_the_same_trials_are_those_that_each_has_alone(seed: int) -> None:
    random, trials = Random(seed), StartTrials()  # noqa: S311 - no secret
    nodes = [_full_node(number) for number in range(NODES)]
    ends = {each.pod: random.uniform(10, 99) for node in nodes for each in node.leases}

    def end_of(of: Lease) -> LeaseEnd | None:
        return LeaseEnd(ends[of.pod], enforced=True) if of.pod in ends else None

    for _ in range(6):
        needed = random.randint(1, NODES)
        wanted = [request(gpu(gpus=random.choice((1, 2, GPUS))))] * needed
        before = random.choice((50.0, 100.0))
        alone = plan_start(wanted, needed, nodes, end_of, now=1, before=before)
        again = plan_start(wanted, needed, nodes, end_of, now=1, before=before, trials=trials)

        assert (again and again.at) == (alone and alone.at)
        if again is not None:
            assert sum(each is not None for each in again.placements) == needed
            assert again.at <= before
        changed = random.randrange(NODES)
        nodes[changed] = without(nodes[changed], {random.choice([*ends])})
        del ends[random.choice([*ends])]


def _full_node(number: int) -> NodeTotals:
    name = f"n{number}"
    held = (lease(PodUid(f"{name}-{gpu}"), gpu, node=name) for gpu in range(GPUS))
    return node_totals(*held, name=name, devices=GPUS)
