"""The index against the naive scan, over random clusters, requests and changes."""

from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared.model.devices.device import Device, DeviceMode, DeviceUse, Isolation, numa_cpus_name
from shared.model.devices.node import Taint
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import Share, bookings
from shared.model.leases.ledger import LedgerNode, with_changes
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import (
    DeviceOrder,
    DeviceSelection,
    NodeOrder,
    NodeRequirements,
    NodeTerm,
    PodRequest,
    SharingPolicy,
    Toleration,
    TopologyScope,
    VolumeRequirement,
    VolumeRule,
)
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from tests.support.build import device, dice, gpu, ledger_node, mig_layout, request, use
from tests.support.choices import among
from tests.support.effort import tries
from tests.support.placer.naive import fit_on_node, fits_somewhere
from tests.support.placer.placing import index_of

TAINT = Taint(key="gpu", effect="NoSchedule")
SOFT = Taint(key="slow", effect="PreferNoSchedule")
IN_ZONE_A = VolumeRequirement(
    rule=VolumeRule.ZONE, terms=((NodeTerm(key="zone", operator="In", values=("a",)),),)
)
NOWHERE = VolumeRequirement(rule=VolumeRule.NO_VOLUME)
memories = st.sampled_from([0, 10, 25, 40, 60, 100])
TAKEN = st.one_of(st.none(), st.tuples(memories, st.sampled_from([0, 30, 100])))
MEMORY_MIB = st.one_of(st.none(), st.sampled_from([1, 2, 7, 14, 30, 56, 98]))
BANDWIDTHS = st.lists(st.sampled_from([10, 40, 50, 150]), min_size=6, max_size=6)
LABELS = st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}])
CPUS = st.sampled_from([{}, {}, {0: 0, 1: 2}, {0: 5, 1: 3}, {0: 5}])
MODES = st.sampled_from([[*DeviceMode], *([mode] for mode in DeviceMode)])
replicas = st.builds(
    Replicas,
    number=st.integers(2, 4),
    strategy=st.just("time-slicing"),
    resource=st.sampled_from(["gpu", "gpu", "gpu.shared"]),
    one_per_container=st.booleans(),
)
LAYOUTS = (
    (),
    (
        mig_layout("small", (7, 3)),
        mig_layout("mixed", (21, 1), (7, 2)),
        mig_layout("whole", (45, 1)),
    ),
    (mig_layout("odd", (2, 1), (14, 2)), mig_layout("large", (30, 3))),
)


@st.composite
def _uses(draw: Any, card: Device) -> DeviceUse:
    """Nothing, a share of HAMi-core's, or instances of a layout."""
    tags = draw(among((), ("g",)))
    likely = 2 if card.mode is DeviceMode.MIG else 9
    if card.layouts and draw(st.integers(1, likely)) == 1:
        pinned = draw(st.sampled_from(card.layouts))
        taken = draw(st.sets(st.integers(0, len(pinned.positions) - 1), min_size=1))
        sizes = [profile.memory_mib for profile in pinned.positions]
        return DeviceUse(
            memory_mib=sum(sizes[position] for position in taken),
            shares=len(taken),
            fence=1,
            anti_affinity_groups=frozenset(tags),
            slots_taken="".join("01"[n in taken] for n in range(max(taken) + 1)),
            layout=pinned.name,
        )
    if card.replicas is not None and draw(st.integers(0, 3)):
        shares = draw(st.integers(0, card.replicas.number))
        memory_mib = shares * card.replicas.memory_mib(card.memory_mib)
        taken_cores = shares * card.replicas.cores_percent
        known = use(memory_mib, taken_cores, shares, 1, *tags)
        return structs.replace(known, mode=card.replicas.mode if shares else "")
    taken = draw(TAKEN)
    if taken is None:
        return DeviceUse()
    return use(min(taken[0], card.memory_mib), taken[1], 1, 1, *tags)


def _linked(cards: list[Device], scores: list[int]) -> list[Device]:
    """Link every pair of devices; of some, the one direction is not known."""
    links: dict[DeviceUuid, dict[DeviceUuid, int]] = {card.uuid: {} for card in cards}
    for one, other in combinations(cards, 2):
        score = scores.pop()
        links[one.uuid][other.uuid] = score
        if score != 50:
            links[other.uuid][one.uuid] = score
    return [replace(card, links=links[card.uuid]) for card in cards]


def _mode(mode: DeviceMode, divided: Replicas) -> dict[str, Any]:
    return {"mode": mode, "replicas": divided if mode is DeviceMode.REPLICAS else None}


@st.composite
def _nodes(draw: Any, name: str) -> LedgerNode:
    unit = draw(among(1, 1, 7))
    one_numa = draw(st.integers(0, 3)) == 0
    cpus = draw(CPUS)
    modes = draw(MODES)
    numas = [draw(among(None, 0, 0, 1)) for _ in range(draw(st.integers(0, 4)))]
    cards = [
        device(
            f"GPU-{name}-{index}",
            index,
            memory_mib=draw(among(14, 56, 98)) // unit * unit,
            unit_mib=unit,
            slots=draw(st.integers(1, 3)),
            healthy=draw(st.integers(0, 5)) > 0,
            model=draw(among("Tesla T4", "NVIDIA A100")),
            **_mode(draw(among(*modes)), draw(replicas)),
            layouts=draw(among(*LAYOUTS)),
            numa=numa,
            one_numa=one_numa,
            numa_cpus=cpus.get(numa),
            pcie=draw(among("", "pci0000:3a", "pci0000:85")),
            isolation=draw(among(Isolation.SHARED, Isolation.SHARED, *Isolation)),
        )
        for index, numa in enumerate(numas)
    ]
    if draw(st.booleans()):
        cards = _linked(cards, draw(BANDWIDTHS))
    node_devices = [(card, draw(_uses(card))) for card in cards]
    return ledger_node(
        name,
        *node_devices,
        labels=draw(LABELS),
        taints=draw(among((), (), (TAINT,), (SOFT,))),
        unschedulable=draw(st.integers(0, 5)) == 0,
        allocatable={"cpu": draw(among(100, 300)), "pods": 5},
        used={"cpu": draw(among(0, 100)), numa_cpus_name(0): draw(st.integers(0, 2))},
        excluded_devices=draw(among((), (), (0,))),
        served=draw(among(("t",), ("t",), ())),
    )


@st.composite
def clusters(draw: Any) -> list[LedgerNode]:
    return [draw(_nodes(f"n{number}")) for number in range(draw(st.integers(0, 5)))]


@st.composite
def requests(draw: Any) -> PodRequest:
    containers = tuple(
        gpu(
            f"c{number}",
            draw(among(1, 1, 1, 2, 3)),
            draw(MEMORY_MIB),
            memory_percent=draw(among(None, None, 10, 33, 100)),
            cores_percent=draw(among(0, 0, 30, 70, 100, 101)),
            whole=draw(st.integers(0, 9)) == 0,
            slotted=draw(st.booleans()),
            memory_bytes=draw(among(None, None, 1, (7 << 20) + 1, 30 << 20)),
            percent_of_mib=draw(st.booleans()),
            sharing=draw(among(*SharingPolicy)),
            slots=draw(among(0, 0, 1, 100)),
            records_requested_units=draw(st.booleans()),
            mig_allowed=draw(st.integers(0, 3)) > 0,
            strict=draw(st.integers(0, 3)) == 0,
            limited=draw(st.integers(0, 3)) > 0,
            exclusive_cpus=draw(among(0, 0, 2, 3)),
        )
        for number in range(draw(st.integers(0, 3)))
    )
    containers = tuple(
        structs.replace(container, init=draw(st.integers(0, 2)) == 0) for container in containers
    )
    if draw(st.integers(0, 4)) == 0:
        billionths = draw(among(4_000_000, 11_999_999, 333_333_333))
        containers = tuple(
            structs.replace(
                container,
                memory_billionths=billionths,
                memory_percent=max(1, billionths // 10_000_000),
            )
            for container in containers
        )
    if draw(st.integers(0, 2)) == 0:
        name = draw(among("gpu", "gpu", "gpu.shared"))
        containers = tuple(
            structs.replace(container, whole=True, sharing=SharingPolicy.EXCLUSIVE, number_of=name)
            for container in containers
        )
    same_device = draw(st.booleans()) and all(c.gpus == 1 for c in containers)
    return request(
        *containers,
        same_device=same_device,
        distinct_devices=not same_device and draw(st.booleans()),
        allocation_weights=draw(among((0, 0, 1), (1, 1, 1), (0, 2, 1))),
        topology_scope=draw(among(*2 * [TopologyScope.NODE], *TopologyScope)),
        prefer_links=draw(st.booleans()),
        prefer_mig=draw(st.booleans()),
        triggers=draw(among((), ("t",))),
        selection=draw(
            st.sampled_from(
                [
                    DeviceSelection(),
                    DeviceSelection(),
                    DeviceSelection(types=("a100",)),
                    DeviceSelection(not_uuids=("GPU-n0-0",), mode="hami-core"),
                    DeviceSelection(mode="mig"),
                ]
            )
        ),
        anti_affinity_groups=draw(among((), (), ("g",), ("g", "h"))),
        device_order=draw(among(*DeviceOrder)),
        node_order=draw(among(*NodeOrder)),
        resources={"cpu": draw(among(0, 100, 200)), "pods": 1},
        node_requirements=NodeRequirements(
            selector=draw(among((), (), (("zone", "a"),))),
            preferred=draw(
                st.sampled_from([(), ((5, (NodeTerm(key="zone", operator="Exists"),)),)])
            ),
            tolerations=draw(among((), (Toleration(operator="Exists"),))),
            volumes=draw(among((), (), (IN_ZONE_A,), (IN_ZONE_A, NOWHERE))),
        ),
    )


def _check(wanted: PodRequest, index: NodeIndex, nodes: list[LedgerNode]) -> None:
    """Ask the index, and judge its answer by the naive scan over the same nodes."""
    by_name = {node.facts.name: node for node in nodes}
    answer = place_explained(wanted, index, dice(1))
    if isinstance(answer, Refusal):
        assert not fits_somewhere(wanted, nodes)
        assert sum(count for _, count in answer.counts) == len(nodes)
        return
    assert 1 <= len(answer) <= 3
    assert len({placement.node for placement in answer}) == len(answer)
    for placement in answer:
        assert placement.shares == fit_on_node(wanted, by_name[placement.node])


@settings(max_examples=tries(100), deadline=None)
@given(clusters(), st.lists(requests(), min_size=1, max_size=4))
def test_placements_fit_and_refusals_agree_with_the_naive_scan(
    nodes: list[LedgerNode], wanted: list[PodRequest]
) -> None:
    index = index_of(*nodes)

    for one in wanted:
        _check(one, index, nodes)


def _with_taken(node: LedgerNode, placement: Placement, wanted: PodRequest) -> LedgerNode:
    """The ledger's totals once the placement has become a lease; fences rise."""
    uses = dict[DeviceUuid, DeviceUse]()
    before = {card.uuid: used for card, used in node.devices}
    for booking in bookings(placement.shares):
        known = before[booking.device]
        uses[booking.device] = DeviceUse(
            memory_mib=known.memory_mib + booking.memory_mib,
            cores_percent=known.cores_percent + booking.cores_percent,
            shares=known.shares + booking.shares,
            fence=known.fence + 1,
            anti_affinity_groups=known.anti_affinity_groups | set(wanted.anti_affinity_groups),
            exclusive=known.exclusive or booking.sharing is SharingPolicy.EXCLUSIVE,
            slots_taken=_with_positions(known.slots_taken, booking.device, placement.shares),
            layout=booking.layout or known.layout,
        )
    resources = wanted.resources | placement.numa_cpus
    return replace(with_changes(node, resources, uses), version=node.version + 1)


def _with_positions(taken: str, where: DeviceUuid, shares: tuple[Share, ...]) -> str:
    positions = {n for n, mark in enumerate(taken) if mark == "1"}
    positions |= {s.mig.position for s in shares if s.device == where and s.mig}
    return "".join("01"[n in positions] for n in range(max(positions, default=-1) + 1))


@settings(max_examples=tries(60), deadline=None)
@given(
    clusters(),
    st.lists(
        st.one_of(requests(), st.tuples(st.integers(0, 5), st.data())), min_size=2, max_size=8
    ),
)
def test_an_updated_index_decides_like_a_new_one(nodes: list[LedgerNode], steps: list[Any]) -> None:
    index = index_of(*nodes)
    mirror = index.mirror
    truth = {node.facts.name: node for node in nodes}

    for number, step in enumerate(steps):
        if isinstance(step, PodRequest):
            _check(step, index, list(truth.values()))
            answer = place_explained(step, index, dice(number))
            if not isinstance(answer, Refusal):
                mirror.reserve(
                    PodUid(str(number)), answer[0], step.resources, step.anti_affinity_groups
                )
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
                devices=tuple(
                    (card, structs.replace(u, fence=1000 + number)) for card, u in node.devices
                ),
            )
            mirror.remove_node(name)
            mirror.put_node(node)
            truth[name] = node


@st.composite
def _partitioned(draw: Any) -> LedgerNode:
    cards = [
        device(f"GPU-{n}", n, memory_mib=98, mode=DeviceMode.MIG, layouts=draw(layouts))
        for n in range(draw(st.integers(1, 2)))
    ]
    return ledger_node("n0", *((card, draw(_uses(card))) for card in cards), served=("t",))


layouts = st.sampled_from(LAYOUTS[1:])
gpu_requests = st.builds(
    lambda sizes, inits, order: request(
        *(gpu(f"c{n}", 1, size, mig_allowed=True, init=n in inits) for n, size in enumerate(sizes)),
        device_order=order,
        triggers=(),
        resources={},
    ),
    st.lists(st.sampled_from([None, 1, 7, 14, 21, 30]), min_size=1, max_size=3),
    st.sampled_from([(), (), (0,), (1,), (0, 2)]),
    st.sampled_from(DeviceOrder),
)


@settings(max_examples=tries(100), deadline=None)
@given(_partitioned(), st.lists(gpu_requests, min_size=2, max_size=7))
def test_successive_instances_agree_with_the_naive_scan(
    node: LedgerNode, steps: list[PodRequest]
) -> None:
    index = index_of(node)
    mirror = index.mirror

    for number, step in enumerate(steps):
        _check(step, index, [node])
        answer = place_explained(step, index, dice(number))
        if not isinstance(answer, Refusal):
            mirror.reserve(PodUid(str(number)), answer[0], step.resources)
            taken = {card.uuid: use.slots_taken for card, use in node.devices}
            for share in answer[0].shares:
                assert share.mig is not None
                assert taken[share.device][share.mig.position : share.mig.position + 1] != "1"
            node = _with_taken(node, answer[0], step)


@st.composite
def _linked_cards(draw: Any) -> LedgerNode:
    cards = [
        device(
            f"GPU-{n}",
            n,
            numa=draw(among(None, 0, 0, 1, 1)),
            pcie=draw(among("", "pci0000:3a", "pci0000:3a", "pci0000:85")),
        )
        for n in range(draw(st.integers(3, 5)))
    ]
    scores = draw(st.lists(st.sampled_from([10, 10, 50, 150]), min_size=10, max_size=10))
    return ledger_node("n0", *(_linked(cards, scores) if draw(st.booleans()) else cards))


@settings(max_examples=tries(150), deadline=None)
@given(
    _linked_cards(),
    st.integers(2, 3),
    st.booleans(),
    st.sampled_from([*2 * [TopologyScope.NODE], *TopologyScope]),
    st.sampled_from([DeviceOrder.FIRST, DeviceOrder.LAST]),
)
def test_several_devices_are_linked_as_well_as_any_set_of_them(
    node: LedgerNode, gpus: int, prefers: bool, scope: TopologyScope, order: DeviceOrder
) -> None:
    wanted = request(
        gpu("c", gpus, 1),
        prefer_links=prefers,
        topology_scope=scope,
        device_order=order,
        triggers=(),
        resources={},
    )
    _check(wanted, index_of(node), [node])


def test_a_tentative_reservation_and_the_total_that_contains_it_count_once() -> None:
    index = index_of(ledger_node("n1", device()))
    mirror = index.mirror
    wanted = request(gpu(memory=1000))
    answer = place_explained(wanted, index, dice(1))
    assert not isinstance(answer, Refusal)
    mirror.reserve(PodUid("uid"), answer[0], wanted.resources)
    card = mirror.nodes[NodeName("n1")].devices[0]
    assert (card.used_mib, card.shares) == (1000, 1)

    mirror.update_device_use(card.uuid, use(1000, fence=1))
    mirror.update_node_use(NodeName("n1"), wanted.resources, 2)
    assert card.used_mib == 2000, "the totals do not yet contain the tentative reservation"
