"""The index against the naive scan, over random clusters, requests and changes."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.placer.index import Index
from services.placer.mirror import Mirror
from services.placer.naive import fit_on_node, place_naive
from services.placer.placement import place
from shared.model.device import DeviceMode, DeviceUse
from shared.model.lease import bookings
from shared.model.ledger import LedgerNode
from shared.model.names import NodeName, PodUid
from shared.model.node import Taint
from shared.model.placement import Placement, Refusal
from shared.model.request import (
    Company,
    DeviceOrder,
    DeviceSelection,
    NodeDemands,
    NodeOrder,
    NodeTerm,
    PodRequest,
    Toleration,
)
from tests.support.build import device, dice, gpu, ledger_node, request, use

TAINT = Taint(key="gpu", effect="NoSchedule")
SOFT = Taint(key="slow", effect="PreferNoSchedule")
memories = st.sampled_from([0, 10, 25, 40, 60, 100])


@st.composite
def _nodes(draw: Any, name: str) -> LedgerNode:
    held = []
    unit = draw(st.sampled_from([1, 1, 7]))
    for index in range(draw(st.integers(0, 3))):
        card = device(
            f"GPU-{name}-{index}",
            index,
            memory_mib=draw(st.sampled_from([14, 56, 98])) // unit * unit,
            unit_mib=unit,
            slots=draw(st.integers(1, 3)),
            healthy=draw(st.integers(0, 5)) > 0,
            model=draw(st.sampled_from(["Tesla T4", "NVIDIA A100"])),
            mode=draw(st.sampled_from([DeviceMode.HAMI_CORE] * 4 + [DeviceMode.MIG])),
        )
        taken = draw(st.one_of(st.none(), st.tuples(memories, st.sampled_from([0, 30, 100]))))
        tags = draw(st.sampled_from([(), ("g",)]))
        if taken is None:
            held.append((card, DeviceUse()))
        else:
            held.append((card, use(min(taken[0], card.memory_mib), taken[1], 1, 1, *tags)))
    return ledger_node(
        name,
        *held,
        labels=draw(st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}])),
        taints=draw(st.sampled_from([(), (), (TAINT,), (SOFT,)])),
        unschedulable=draw(st.integers(0, 5)) == 0,
        allocatable={"cpu": draw(st.sampled_from([100, 300])), "pods": 5},
        used={"cpu": draw(st.sampled_from([0, 100]))},
        closed_devices=draw(st.sampled_from([(), (), (0,)])),
        served=draw(st.sampled_from([("t",), ("t",), ()])),
    )


@st.composite
def clusters(draw: Any) -> list[LedgerNode]:
    return [draw(_nodes(f"n{number}")) for number in range(draw(st.integers(0, 5)))]


@st.composite
def requests(draw: Any) -> PodRequest:
    containers = tuple(
        gpu(
            f"c{number}",
            draw(st.sampled_from([1, 1, 1, 2, 3])),
            draw(st.one_of(st.none(), st.sampled_from([1, 2, 7, 14, 30, 56, 98]))),
            memory_percent=draw(st.sampled_from([None, None, 10, 33, 100])),
            cores_percent=draw(st.sampled_from([0, 0, 30, 70, 100, 101])),
            whole=draw(st.integers(0, 9)) == 0,
            slotted=draw(st.booleans()),
            memory_bytes=draw(st.sampled_from([None, None, 1, (7 << 20) + 1, 30 << 20])),
            percent_of_mib=draw(st.booleans()),
            company=draw(st.sampled_from(Company)),
            slots=draw(st.sampled_from([0, 0, 1, 100])),
            keeps_terms=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 3)))
    )
    inits = draw(st.integers(0, len(containers)))
    containers = tuple(
        replace(container, init=number < inits) for number, container in enumerate(containers)
    )
    same_device = draw(st.booleans()) and all(c.gpus == 1 for c in containers)
    return request(
        *containers,
        same_device=same_device,
        distinct=not same_device and draw(st.booleans()),
        weights=draw(st.sampled_from([(0, 0, 1), (1, 1, 1), (0, 2, 1)])),
        triggers=draw(st.sampled_from([(), ("t",)])),
        selection=draw(
            st.sampled_from(
                [
                    DeviceSelection(),
                    DeviceSelection(),
                    DeviceSelection(types=("a100",)),
                    DeviceSelection(not_uuids=("GPU-n0-0",), mode="hami-core"),
                ]
            )
        ),
        tags=draw(st.sampled_from([(), (), ("g",), ("g", "h")])),
        device_order=draw(st.sampled_from(DeviceOrder)),
        node_order=draw(st.sampled_from(NodeOrder)),
        resources={"cpu": draw(st.sampled_from([0, 100, 200])), "pods": 1},
        demands=NodeDemands(
            selector=draw(st.sampled_from([(), (), (("zone", "a"),)])),
            preferred=draw(
                st.sampled_from([(), ((5, (NodeTerm(key="zone", operator="Exists"),)),)])
            ),
            tolerations=draw(st.sampled_from([(), (Toleration(operator="Exists"),)])),
        ),
    )


def _check(wanted: PodRequest, mirror: Mirror, index: Index, nodes: list[LedgerNode]) -> None:
    """Ask the index, and judge its answer by the naive scan over the same nodes."""
    by_name = {node.facts.name: node for node in nodes}
    answer = place(wanted, index, dice(1))
    if isinstance(answer, Refusal):
        assert place_naive(wanted, nodes) is None
        assert sum(count for _, count in answer.counts) == len(nodes)
        return
    assert 1 <= len(answer) <= 3
    assert len({placement.node for placement in answer}) == len(answer)
    for placement in answer:
        assert placement.shares == fit_on_node(wanted, by_name[placement.node])


@settings(max_examples=100, deadline=None)
@given(clusters(), st.lists(requests(), min_size=1, max_size=4))
def test_a_placement_fits_and_a_refusal_is_shared_by_the_naive_scan(
    nodes: list[LedgerNode], wanted: list[PodRequest]
) -> None:
    mirror = Mirror()
    mirror.reset(nodes)
    index = Index(mirror)

    for one in wanted:
        _check(one, mirror, index, nodes)


def _with_taken(node: LedgerNode, placement: Placement, wanted: PodRequest) -> LedgerNode:
    """The ledger's totals once the placement has become a lease; fences rise."""
    booked = {booking.device: booking for booking in bookings(placement.shares)}
    held = []
    for card, before in node.devices:
        booking = booked.get(card.uuid)
        if booking is None:
            held.append((card, before))
            continue
        tags = set(wanted.tags)
        held.append(
            (
                card,
                DeviceUse(
                    memory_mib=before.memory_mib + booking.memory_mib,
                    cores_percent=before.cores_percent + booking.cores_percent,
                    shares=before.shares + booking.shares,
                    fence=before.fence + 1,
                    tags=before.tags | tags,
                    alone=before.alone or booking.company is Company.ALONE,
                ),
            )
        )
    used = dict(node.used)
    for name, amount in wanted.resources.items():
        used[name] = used.get(name, 0) + amount
    return replace(node, devices=tuple(held), used=used, version=node.version + 1)


@settings(max_examples=60, deadline=None)
@given(
    clusters(),
    st.lists(
        st.one_of(requests(), st.tuples(st.integers(0, 5), st.data())), min_size=2, max_size=8
    ),
)
def test_after_any_changes_the_index_answers_as_one_built_anew(
    nodes: list[LedgerNode], steps: list[Any]
) -> None:
    mirror = Mirror()
    mirror.reset(nodes)
    index = Index(mirror)
    truth = {node.facts.name: node for node in nodes}

    for number, step in enumerate(steps):
        if isinstance(step, PodRequest):
            _check(step, mirror, index, list(truth.values()))
            answer = place(step, index, dice(number))
            if not isinstance(answer, Refusal):
                mirror.hold(PodUid(str(number)), answer[0], step.resources, step.tags)
                node = truth[answer[0].node]
                truth[node.facts.name] = _with_taken(node, answer[0], step)
            continue
        which, data = step
        name = NodeName(f"n{which}")
        if data.draw(st.integers(0, 3)) == 0:
            mirror.remove_node(name)
            truth.pop(name, None)
        else:
            node = replace(data.draw(_nodes(name)), version=1000 + number)
            node = replace(
                node,
                devices=tuple((card, replace(u, fence=1000 + number)) for card, u in node.devices),
            )
            mirror.remove_node(name)
            mirror.put_node(node)
            truth[name] = node


def test_a_hold_and_the_total_that_contains_it_are_counted_once() -> None:
    mirror = Mirror()
    mirror.reset([ledger_node("n1", device())])
    index = Index(mirror)
    wanted = request(gpu(memory=1000))
    answer = place(wanted, index, dice(1))
    assert not isinstance(answer, Refusal)
    mirror.hold(PodUid("uid"), answer[0], wanted.resources)
    card = mirror.nodes[NodeName("n1")].devices[0]
    assert (card.memory, card.shares) == (1000, 1)

    mirror.learn_use(card.uuid, use(1000, fence=1))
    mirror.learn_used(NodeName("n1"), wanted.resources, 2)
    assert card.memory == 2000, "nobody has said yet that the totals contain the hold"
