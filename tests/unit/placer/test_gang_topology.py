"""Gangs whose pods share a domain: in one rack, or in as few racks as possible."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.placer.rounds.decisions import DecisionContext, split_into_units
from services.placer.rounds.gang_decisions import choose_beside, decide_gang
from services.placer.rounds.gang_domains import values_on
from services.placer.rounds.refusal_texts import gang_does_not_fit
from services.placer.rounds.room_counts import pods_on_nodes
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import LedgerNode
from shared.model.names import NodeName
from shared.model.requests.placement import DomainRoom, Refusal
from shared.model.requests.request import Gang
from tests.support.build import devices, dice, gpu, ledger_node, pod_queued, request
from tests.support.effort import tries
from tests.support.placer.placing import index_of

RACK = "example.com/rack"
ZONE = "example.com/zone"
HOSTNAME = "kubernetes.io/hostname"
MIB = 10_000
IN_RACK = Gang(name="default/g", min_member=8, required_topology=(RACK,))
NEAR = Gang(name="default/g", min_member=8, preferred_topology=(RACK,))


def member(pod: str, gang: Gang = IN_RACK, mib: int = MIB) -> PodQueued:
    return pod_queued(pod, structs.replace(request(gpu(memory=mib)), gang=gang))


def members(count: int, gang: Gang = IN_RACK, mib: int = MIB) -> list[PodQueued]:
    return [member(f"p{number}", gang, mib) for number in range(count)]


def node(name: str, gpus: int, **labels: str) -> LedgerNode:
    keys = {"rack": RACK, "zone": ZONE}
    named = {keys[key]: value for key, value in labels.items()}
    return ledger_node(name, *devices(gpus, name, memory_mib=MIB), labels=named)


def context_of(*nodes: LedgerNode) -> DecisionContext:
    return DecisionContext(index_of(*nodes), dice(1))


def racks(**gpus: int) -> DecisionContext:
    """Racks of nodes with two GPUs each, as many as given."""
    return context_of(
        *(
            node(f"{rack}-{number}", 2, rack=rack)
            for rack, count in gpus.items()
            for number in range(count // 2)
        )
    )


def racks_of(context: DecisionContext) -> dict[str, int]:
    """How many pods use each rack."""
    used: dict[str, int] = {}
    for mirrored in context.mirror.nodes.values():
        rack = mirrored.facts.labels.get(RACK, "none")
        count = sum(card.shares for card in mirrored.devices)
        if count:
            used[rack] = used.get(rack, 0) + count
    return used


def taken(context: DecisionContext, rack: str, count: int) -> None:
    """Let other pods use GPUs of a rack."""
    for number in range(count):
        chosen = context.choose(member(f"other-{rack}-{number}"), ((RACK, frozenset({rack})),))
        assert not isinstance(chosen, Refusal)


def test_all_pods_get_the_smallest_rack_that_has_room_for_them() -> None:
    context = racks(r1=6, r2=12, r3=8)

    decided = decide_gang(members(8), 8, context)

    assert decided.refusal is None
    assert racks_of(context) == {"r3": 8}


def test_a_rack_that_is_partly_used_is_left_out() -> None:
    context = racks(r1=8, r2=12)
    taken(context, "r1", 1)

    decided = decide_gang(members(8), 8, context)

    assert decided.refusal is None
    assert racks_of(context) == {"r1": 1, "r2": 8}


def test_a_refusal_names_what_each_rack_lacks() -> None:
    context = racks(r1=8, r2=8)
    taken(context, "r1", 3)
    taken(context, "r2", 5)

    decided = decide_gang(members(8), 8, context)

    assert decided.refusal is not None
    assert decided.chosen == []
    assert racks_of(context) == {"r1": 3, "r2": 5}
    refusal = gang_does_not_fit(IN_RACK, live=0, decision=decided, refusal=decided.refusal)
    assert refusal.domains == (DomainRoom(domain="r1", room=5), DomainRoom(domain="r2", room=3))
    assert refusal.reason.startswith(
        "gang default/g needs 8 pods at once, all with the same example.com/rack; 5 of 8 fit "
        "(r1 has room for 5 of 8, r2 for 3), and beside them: 0/8 nodes are available: "
    )
    assert refusal.hint.endswith("or wait until other pods have ended")
    assert not refusal.permanent


def test_a_gang_larger_than_every_rack_is_not_advised_to_wait() -> None:
    context = racks(r1=6, r2=4)
    taken(context, "r1", 1)

    decided = decide_gang(members(8), 8, context)

    assert decided.refusal is not None
    refusal = gang_does_not_fit(IN_RACK, live=0, decision=decided, refusal=decided.refusal)
    assert refusal.permanent
    assert refusal.hint.startswith(
        "waiting does not help: if no other pod ran, 6 of 8 pods of the gang with the same "
        "example.com/rack would fit: "
    )
    assert refusal.domains == (DomainRoom(domain="r1", room=5), DomainRoom(domain="r2", room=4))


def test_a_gang_with_a_claim_of_one_node_reads_which_claim_it_is() -> None:
    on_one = structs.replace(IN_RACK, required_topology=(HOSTNAME,), one_node_claim="data")
    nodes = [
        ledger_node(name, *devices(gpus, name, memory_mib=MIB), labels={HOSTNAME: name})
        for name, gpus in (("n1", 6), ("n2", 4))
    ]
    free = structs.replace(IN_RACK, required_topology=())
    mixed = [member("other", free), *members(7, on_one)]

    decided = decide_gang(mixed, 8, context_of(*nodes))
    fits = decide_gang([member("other", free), *members(6, on_one)], 7, context_of(*nodes))

    assert decided.refusal is not None
    refusal = gang_does_not_fit(free, live=0, decision=decided, refusal=decided.refusal)
    assert refusal.reason.startswith(
        "gang default/g needs 8 pods at once, all with the same kubernetes.io/hostname, as one "
        "node at a time can mount their claim data; "
    )
    assert "use a claim with ReadWriteMany, or one for each pod" in refusal.hint
    nodes_of = {str(event.pod): candidates[0].node for event, candidates in fits.chosen}
    assert {nodes_of.pop("other"), *nodes_of.values()} == {"n1", "n2"}
    assert set(nodes_of.values()) == {"n1"}


def test_nodes_without_the_label_are_in_no_domain() -> None:
    context = context_of(node("n1", 8), node("n2", 4, rack="r1"))

    decided = decide_gang(members(8), 8, context)
    unlabelled = decide_gang(members(2), 2, context_of(node("n1", 8)))

    assert decided.domains == (DomainRoom(domain="r1", room=4),)
    assert unlabelled.refusal is not None
    assert unlabelled.refusal.reason == f"no node has the label {RACK}"
    assert unlabelled.refusal.permanent


def test_pods_of_a_gang_that_name_different_labels_are_asked_for_one() -> None:
    named = structs.replace(IN_RACK, required_topology=(RACK, "room"))

    decided = decide_gang(members(2, named), 2, context_of(node("n1", 8, rack="r1")))

    assert decided.refusal is not None
    assert decided.refusal.reason == f"no node has all of the labels {RACK} and room"
    assert decided.refusal.hint.endswith("or write one label that they have into all its pods")


def test_several_labels_are_shared_together() -> None:
    gang = structs.replace(IN_RACK, required_topology=(ZONE, RACK))
    context = context_of(
        node("a", 4, zone="z1", rack="r1"),
        node("b", 4, zone="z2", rack="r1"),
        node("c", 8, zone="z2", rack="r2"),
    )

    decided = decide_gang(members(8, gang), 8, context)
    larger = decide_gang(members(8, gang), 8, context)

    assert decided.refusal is None
    assert {candidates[0].node for _, candidates in decided.chosen} == {"c"}
    assert [room.domain for room in larger.domains] == ["z1/r1", "z2/r1", "z2/r2"]


def test_preferred_racks_are_as_few_as_possible() -> None:
    context = racks(r1=4, r2=6, r3=2, r4=4)
    assert decide_gang(members(8, NEAR), 8, context).refusal is None
    assert racks_of(context) in ({"r1": 2, "r2": 6}, {"r2": 6, "r4": 2})

    roomy = racks(r1=4, r2=8)
    assert decide_gang(members(8, NEAR), 8, roomy).refusal is None
    assert racks_of(roomy) == {"r2": 8}

    unlabelled = context_of(node("n1", 6), node("n2", 2, rack="r1"))
    assert decide_gang(members(8, NEAR), 8, unlabelled).refusal is None

    small = racks(r1=4, r2=2)
    refused = decide_gang(members(8, NEAR), 8, small)
    assert (refused.fitting, refused.domains, refused.lacking) == (6, (), (6, 8))
    assert racks_of(small) == {}


def test_a_rack_is_preferred_within_the_zone_that_is_required() -> None:
    gang = structs.replace(IN_RACK, required_topology=(ZONE,), preferred_topology=(RACK,))
    context = context_of(
        node("a", 4, zone="z1", rack="r1"),
        node("b", 8, zone="z2", rack="r2"),
        node("c", 4, zone="z2", rack="r3"),
        node("d", 4, zone="z1", rack="r4"),
    )

    assert decide_gang(members(8, gang), 8, context).refusal is None
    assert racks_of(context) in ({"r2": 8}, {"r1": 4, "r4": 4})
    taken_racks = decide_gang(members(8, gang), 8, context)
    assert taken_racks.refusal is None


def test_further_pods_join_the_rack_of_those_that_run() -> None:
    context = racks(r1=8, r2=12)
    running = decide_gang(members(8), 6, context)
    assert running.refusal is None
    nodes = [candidates[0].node for _, candidates in running.chosen]
    joined = values_on(nodes, (RACK,), context.index)
    assert joined == ((RACK, frozenset({"r1"})),)

    rest = [choose_beside(member(f"late-{number}"), context, joined) for number in range(3)]
    more = decide_gang([member("more")], 1, context, joined)

    assert [isinstance(result, Refusal) for result in rest] == [False, False, True]
    assert racks_of(context) == {"r1": 8}
    assert more.refusal is not None
    assert more.domains == (DomainRoom(domain="r1", room=0),)


def test_further_pods_leave_a_rack_that_is_only_preferred() -> None:
    context = racks(r1=2, r2=4)
    joined = ((RACK, frozenset({"r1"})),)

    late = [choose_beside(member(f"late-{n}", NEAR), context, joined) for n in range(3)]

    assert not any(isinstance(result, Refusal) for result in late)
    assert racks_of(context) == {"r1": 2, "r2": 1}


def test_pods_that_name_no_label_run_anywhere() -> None:
    context = context_of(node("a", 2, rack="r1"), node("b", 1))
    free = structs.replace(IN_RACK, required_topology=())
    mixed = [*members(2), member("driver", free)]

    decided = decide_gang(mixed, 3, context)

    assert decided.refusal is None
    places = {event.pod: candidates[0].node for event, candidates in decided.chosen}
    assert places == {"p0": "a", "p1": "a", "driver": "b"}


def test_one_pod_with_a_topology_is_a_gang() -> None:
    gang = structs.replace(IN_RACK, min_member=1)

    units = split_into_units([member("a", gang), member("b", gang)])

    assert [(unit.gang, len(unit.pods)) for unit in units] == [(gang, 2)]


@settings(deadline=None, max_examples=tries(40))
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.lists(st.sampled_from([2_000, 4_000, 6_000, 10_000]), min_size=1, max_size=6),
    st.booleans(),
)
def test_equal_pods_share_a_rack_exactly_if_one_has_room(
    used: list[int], sizes: list[int], preferred: bool
) -> None:
    context = racks(**{f"r{number}": 4 for number in range(len(used))})
    for number, count in enumerate(used):
        taken(context, f"r{number}", count)
    before = racks_of(context)
    gang = NEAR if preferred else IN_RACK
    pods = [member(f"m{number}", gang, mib) for number, mib in enumerate(sizes)]
    equal = [member(f"e{number}", gang, sizes[0]) for number in range(len(sizes))]

    room = max((4 - count) * (MIB // sizes[0]) for count in used)
    decided = decide_gang(equal, len(equal), context)

    if not preferred:
        assert (decided.refusal is None) == (room >= len(equal))
    nodes = [candidates[0].node for _, candidates in decided.chosen]
    values = dict(values_on(nodes, (RACK,), context.index)).get(RACK, frozenset[str]())
    if not preferred or room >= len(equal):
        assert len(values) <= 1
    for event, _ in decided.chosen:
        context.mirror.drop(event.pod)
    mixed = decide_gang(pods, len(pods), context)
    for event, _ in mixed.chosen:
        context.mirror.drop(event.pod)
    assert racks_of(context) == before


def test_nodes_that_were_removed_are_not_kept_with_their_room() -> None:
    context = context_of(node("n0", 1))
    index = context.index
    mirror = context.mirror
    wanted = request(gpu(memory=100))

    for number in range(1, 20):
        mirror.put_node(node(f"n{number}", 1))
        mirror.remove_node(NodeName(f"n{number - 1}"))
        fitting = index.fitting_nodes(wanted)
        assert isinstance(fitting, int)
        assert pods_on_nodes(wanted, index, fitting, 5) == 5

    [counts] = index.pods_on_node.values()
    assert {kept.name for kept in counts} <= {"n18", "n19"}
