"""Gangs in a batch: decided together, by priority, all or nothing."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.placer.rounds.decisions import DecisionContext, split_into_units
from services.placer.rounds.gang_decisions import (
    GangDecision,
    changed_verdicts,
    choose_offer_recipients,
    decide_gang,
)
from services.placer.rounds.refusal_texts import GANG_NOT_DECIDED, gang_does_not_fit, gang_too_small
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import GangEnrollment, LedgerNode, WaitingPod
from shared.model.requests.placement import Refusal
from shared.model.requests.request import DeviceSelection, Gang, PodRequest
from tests.support.build import device, devices, dice, gpu, ledger_node, pod_queued, request, use
from tests.support.effort import tries
from tests.support.placer.placing import index_of

GANG = Gang(name="default/g", min_member=3)
MIB = 10_000


def member(pod: str, mib: int = 5_000, *, gang: Gang | None = GANG, priority: int = 0) -> PodQueued:
    """A pod of a gang; 0: without GPUs."""
    wanted = request(gpu(memory=mib)) if mib else request()
    return pod_queued(pod, structs.replace(wanted, gang=gang, priority=priority))


def cluster(nodes: int, gpus: int) -> DecisionContext:
    names = [f"n{number}" for number in range(nodes)]
    return context_of(*(ledger_node(n, *devices(gpus, n, memory_mib=MIB)) for n in names))


def context_of(*nodes: LedgerNode) -> DecisionContext:
    return DecisionContext(index_of(*nodes), dice(1))


def used_mib(context: DecisionContext) -> list[int]:
    return [card.used_mib for node in context.mirror.nodes.values() for card in node.devices]


def test_a_batch_is_split_into_gangs_and_single_pods_by_priority() -> None:
    alone = Gang(name="default/alone", min_member=1)
    events = [
        member("low", gang=None),
        member("g-0"),
        member("high", gang=None, priority=9),
        member("g-1", priority=5),
        member("alone", gang=alone, priority=7),
    ]

    units = [
        (u.gang and u.gang.name, [event.pod for event in u.pods]) for u in split_into_units(events)
    ]

    assert units == [(None, ["high", "alone"]), ("default/g", ["g-1", "g-0"]), (None, ["low"])]


@settings(deadline=None, max_examples=tries(60))
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 1_000, 4_000, 6_000, 10_000, 20_000]), min_size=1, max_size=12),
    st.data(),
)
def test_a_gang_is_placed_in_full_or_leaves_nothing_behind(
    nodes: int, gpus: int, sizes: list[int], data: st.DataObject
) -> None:
    context = cluster(nodes, gpus)
    needed = data.draw(st.integers(1, len(sizes)))
    members = [member(f"p{n}", mib) for n, mib in enumerate(sizes)]

    decided = decide_gang(members, needed, context)

    if decided.refusal is None:
        chosen = [event.pod for event, _ in decided.chosen]
        assert len(chosen) == len(set(chosen)) == needed
        assert sum(used_mib(context)) == sum(sizes[int(pod[1:])] for pod in chosen)
        assert max(used_mib(context)) <= MIB
    else:
        assert (decided.chosen, sum(used_mib(context))) == ([], 0)
        assert decided.fitting < needed


def test_large_pods_go_first_and_spare_ones_are_left_out() -> None:
    context = cluster(1, 2)
    mixed = [member("s-0", 4_000), member("s-1", 4_000), member("l-0", 6_000), member("l-1", 6_000)]
    assert decide_gang(mixed, 4, context).refusal is None

    context = cluster(1, 1)
    spared = [member("l", 10_000), *(member(f"s-{n}", 5_000) for n in range(2))]
    found = decide_gang(spared, 2, context)
    assert [event.pod for event, _ in found.chosen] == ["s-0", "s-1"]


def test_a_gang_of_which_too_few_pods_can_ever_fit_is_refused_permanently() -> None:
    context = cluster(1, 1)
    hopeless = member("huge", 90_000)

    refusal = decide_gang([hopeless, member("s")], 2, context).refusal

    assert refusal is not None
    assert refusal.permanent


def test_a_gang_with_a_pod_that_never_fits_is_led_to_what_that_pod_needs() -> None:
    context = context_of(ledger_node("n", (device(memory_mib=MIB), use(MIB))))
    never = member("never", 1_000)
    selection = DeviceSelection(types=("H100",))
    never = replace(never, request=structs.replace(never.request, selection=selection))

    decision = decide_gang([member("later", 9_000), never], 2, context)

    assert decision.refusal is not None
    refusal = gang_does_not_fit(GANG, live=0, decision=decision, refusal=decision.refusal)
    assert refusal.permanent
    assert "had no GPU of an allowed type" in refusal.reason
    assert refusal.hint.startswith(
        "each pod of the gang needs a change: waiting alone does not help: remove the annotation"
    )


def test_a_gang_that_would_not_fit_an_empty_cluster_is_not_advised_to_wait() -> None:
    three = [member(name) for name in "abc"]
    busy, idle = cluster(nodes=1, gpus=2), cluster(nodes=1, gpus=1)
    busy.choose(member("other", 9_000))

    hopeful = decide_gang(three, 3, busy)
    hopeless = decide_gang(three, 3, idle)
    assert hopeful.refusal is not None
    assert hopeless.refusal is not None
    refusal = gang_does_not_fit(GANG, live=0, decision=hopeless, refusal=hopeless.refusal)
    waits = gang_does_not_fit(GANG, live=0, decision=hopeful, refusal=hopeful.refusal)

    assert (hopeful.lacking, hopeful.fitting) == (None, 2)
    assert refusal.permanent
    assert refusal.hint == (
        "waiting does not help: if no other pod ran, 2 of 3 equal pods of the gang would fit: "
        "lower the gang's minimum to 2, as 2 of its pods have room now; or request less in each of "
        "its pods, or ask an administrator to add nodes"
    )
    assert waits.hint == (
        "lower the gang's minimum to 2, as 2 of its pods have room now; or wait until other pods "
        "have ended"
    )
    for context in (busy, idle):
        assert decide_gang(three, 2, context).refusal is None


def test_refusals_name_what_the_gang_lacks() -> None:
    missing = gang_too_small(GANG, live=0, waiting=1)
    full = Refusal(reason="0/1 nodes are available.")

    assert missing.reason == ("gang default/g needs 3 pods at once; 1 of 3 pods exist")
    assert missing.hint == (
        "create 2 more, or lower the gang's minimum; pods with another schedulerName count "
        "once that scheduler has placed them"
    )
    beside = structs.replace(GANG, placed_elsewhere=2)
    assert gang_too_small(beside, live=0, waiting=1).reason.startswith(
        "gang default/g needs 3 pods at once, beside 2 of other schedulers; 1 of 3"
    )
    assert gang_does_not_fit(
        GANG, live=0, decision=GangDecision([], 2), refusal=full
    ).reason.endswith("; 2 of 3 fit, and beside them: 0/1 nodes are available.")
    assert gang_does_not_fit(
        GANG, live=1, decision=GangDecision([], 0), refusal=full
    ).reason.endswith("; 1 of 3 have a lease, 0 of the other 2 fit: 0/1 nodes are available.")


def test_the_amounts_beside_pods_of_the_gang_that_fit_are_said_to_count_them() -> None:
    context = cluster(nodes=1, gpus=1)
    decided = decide_gang([member(f"g-{n}", 4_000) for n in range(3)], 3, context)
    assert decided.refusal is not None

    refusal = gang_does_not_fit(GANG, live=0, decision=decided, refusal=decided.refusal)

    assert refusal.text.endswith(
        "2 of 3 fit, and beside them: 0/1 nodes are available: 1 Insufficient GPU memory. Waiting "
        "does not help: if no other pod ran, 2 of 3 equal pods of the gang would fit: lower the "
        "gang's minimum to 2, as 2 of its pods have room now; or request less in each of its pods, "
        "or ask an administrator to add nodes."
    )
    assert refusal.nearest_nodes[0].reason.endswith(", with the 2 that fit counted")
    assert used_mib(context) == [0]


def test_capacity_is_offered_to_one_pod_of_each_different_request() -> None:
    small = member("a")
    same = member("b")
    large = member("c", 9_000)

    assert choose_offer_recipients([small, same, large]) == {"a", "c"}
    assert choose_offer_recipients(
        [pod_queued("x", PodRequest()), pod_queued("y", PodRequest())]
    ) == {"x"}


def test_only_changed_verdicts_and_offer_recipients_are_written() -> None:
    why = Refusal(reason="2 of 3 fit")
    pods = [member(name) for name in ("a", "b", "c", "d")]

    def known(event: PodQueued, refusal: Refusal, *, receives_offers: bool) -> WaitingPod:
        return WaitingPod(
            queued=event, refusal=refusal, capacity=1, receives_offers=receives_offers
        )

    enrollment = GangEnrollment(
        live_count=0,
        waiting_count=4,
        waiting=(
            known(pods[0], why, receives_offers=True),
            known(pods[1], why, receives_offers=False),
            known(pods[2], GANG_NOT_DECIDED, receives_offers=False),
            known(pods[3], why, receives_offers=True),
        ),
    )

    written = changed_verdicts(pods, enrollment, why, {pods[0].pod})

    assert [event.pod for event in written] == ["a", "c", "d"]


def test_pods_of_a_gang_with_anti_affinity_do_not_share_a_device() -> None:
    context = context_of(ledger_node("n1", device("GPU-1", memory_mib=MIB)))
    tagged = [
        replace(pod, request=structs.replace(pod.request, anti_affinity_groups=("default/g",)))
        for pod in (member("a", 1_000), member("b", 1_000))
    ]

    decided = decide_gang(tagged, 2, context)

    assert decided.fitting == 1
    assert used_mib(context) == [0]
