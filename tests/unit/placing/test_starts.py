"""Planned starts: also on MIG instances; one plan's trials do not change what another finds."""

import time
from random import Random

import pytest
from msgspec import structs

from shared.model.devices.device import DeviceMode
from shared.model.leases.lease import Lease, MigPlacement
from shared.model.leases.ledger import NodeTotals, WaitingPod, counted_use
from shared.model.names import PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang
from shared.placing.room import without
from shared.placing.starts import LeaseEnd, StartTrials, plan_start, waiting_units
from tests.support import build
from tests.support.api.board import lease, node_totals
from tests.support.build import device, gpu, ledger_node, mig_layout, request, share

NODES = 4
GPUS = 4
LAYOUTS = (
    mig_layout("halves", ("3g.20gb", 20480, 2)),
    mig_layout("whole", ("7g.40gb", 40960, 1)),
)


@pytest.mark.parametrize(
    ("mib", "at", "instance"),
    [
        (15_000, 10, MigPlacement(layout="halves", position=1, profile="3g.20gb")),
        (40_000, 20, MigPlacement(layout="whole", position=0, profile="7g.40gb")),
    ],
)
def test_a_start_is_planned_on_a_mig_instance_or_once_the_layout_can_change(
    mib: int, at: float, instance: MigPlacement
) -> None:
    card = device("GPU-m", 0, memory_mib=40960, layouts=LAYOUTS, mode=DeviceMode.MIG)
    held = [MigPlacement(layout="halves", position=n, profile="3g.20gb") for n in range(2)]
    leases = [
        build.lease(f"p{n}", "n1", share("GPU-m", 0, memory_mib=20480, slot=0, fence=1, mig=each))
        for n, each in enumerate(held)
    ]
    uses, _ = counted_use(leases)
    node = NodeTotals(node=ledger_node("n1", (card, uses[card.uuid])), leases=tuple(leases))
    ends = {"p0": LeaseEnd(20, enforced=True), "p1": LeaseEnd(10, enforced=True)}
    wanted = request(gpu(memory=mib, mig_allowed=True))

    plan = plan_start([wanted], 1, [node], lambda lease: ends[lease.pod], now=1)

    assert plan is not None
    [placement] = plan.placements
    assert placement is not None
    assert (plan.at, placement.shares[0].mig) == (at, instance)


@pytest.mark.parametrize("seed", range(20))
def test_plans_on_the_same_trials_are_those_that_each_has_alone(seed: int) -> None:
    random = Random(seed)  # noqa: S311 - no secret
    trials = StartTrials()
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


@pytest.mark.parametrize("order", [(2, 3, 3), (3, 2, 3)], ids=str)
def test_a_gang_whose_pods_name_different_minimums_gets_no_start_with_fewer_than_the_largest(
    order: tuple[int, ...],
) -> None:
    waiting = [
        WaitingPod(
            queued=build.pod_queued(
                f"p{number}",
                structs.replace(request(gpu()), gang=Gang(name="default/g", min_member=least)),
            ),
            refusal=Refusal(reason="full"),
            capacity=0,
            waiting_since=1.0,
        )
        for number, least in enumerate(order)
    ]

    [unit] = waiting_units(waiting, [], now=1.0, after_s=0)

    assert unit.needed == 3
    assert waiting_units(waiting[:2], [], now=1.0, after_s=0) == []


def test_a_plan_takes_no_time_for_the_pods_that_a_gang_does_not_need() -> None:
    many = 30_000
    began = time.process_time()

    plan = plan_start([request(gpu(memory=100))] * many, 1, [_full_node(0)], lambda _: None, now=1)

    assert plan is not None
    assert [each is not None for each in plan.placements] == [True] + [False] * (many - 1)
    assert time.process_time() - began < 2
