"""The audit: devices and leases, claims, waiting pods, gangs, nodes, accounts; its output."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from services.cli.audit.account_checks import window_totals
from services.cli.audit.audit import render as render_audit
from services.cli.audit.audit import shape as audit_shape
from services.cli.audit.invariants import differences, unread_checkpoints
from services.cli.audit.lease_checks import unexplained
from services.cli.audit.snapshot import Snapshot, lasting_differences
from services.timekeeper.accounts.accrual import RESTORED
from shared.ledger.total_checks import Difference
from shared.model.budgets.budget import BudgetWindow, ChargeEntry
from shared.model.budgets.charges import charge_of
from shared.model.budgets.cost_records import FREE, CostHour
from shared.model.budgets.fair_share import fair_share_of
from shared.model.budgets.quota import Quota, QuotaLimits, QuotaTotals
from shared.model.devices.device import DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import ClaimAllocation, Lease, LeaseState
from shared.model.leases.lease_copy import ANNOTATION, dump_lease
from shared.model.leases.ledger import LedgerNode, NodeTotals
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import LEASED
from tests.support.audit import (
    DEVICE,
    GANG,
    GPU,
    NODE,
    NOW,
    account,
    allocation,
    facts,
    found,
    lease,
    pod,
    share,
    waits,
    with_use,
)
from tests.support.binder.world import allocated, on
from tests.support.snapshots import cluster_of, explained


def claimed(name: str = "c", *consumers: str) -> tuple[AllocatedClaim, Lease]:
    claim = allocated(name, on(GPU, 3_000, request="gpu", share_id="s1"), node="node-0")
    held = structs.replace(
        lease(name, structs.replace(share(), container="gpu", share_id="s1")),
        resources={},
        claim=ClaimAllocation(generation="g1", consumers=tuple(map(PodUid, consumers))),
    )
    return replace(claim, answer=LEASED), held


def test_a_pod_is_explained_by_the_lease_of_its_claim() -> None:
    consumer = pod("p")
    other = pod("q")
    _, held = claimed("c", consumer.pod, other.pod)
    held = structs.replace(held, intervals={"gpu": "Short"})

    explanation = explained(consumer, cluster_of(account(held)))

    assert explanation.verdict == "running"
    assert "claim       default/c, which 2 pods use" in explanation.lines
    assert (
        "slices      Short on the GPUs of request gpu, by the claim's parameters"
        in explanation.lines
    )
    assert any(line.startswith("request     gpu: ") for line in explanation.details)


SOUND = account(lease("a"))
OTHER = NodeName("node-1")
ELSEWHERE = NodeTotals(node=LedgerNode(facts=NodeFacts(name=OTHER)), leases=(), reported=(GPU,))
ACTIVE = structs.replace(lease("a"), state=LeaseState.ACTIVE)
MEMBER = structs.replace(lease("a"), gang=GANG.name)
PENDING = (pod("a", node="", phase="Pending"), pod("b", node="", phase="Pending"))
GANG_WAITS = facts(
    pods=PENDING,
    waiting=tuple(waits(name, GANG) for name in ("a", "b")),
    waiting_gangs={GANG.name: frozenset(each.pod for each in PENDING)},
)


def two(first: Lease, second: Lease) -> Snapshot:
    return facts(account(first, second))


CLAIM, CLAIMED = claimed()
MOVED = replace(CLAIM, devices=(replace(CLAIM.devices[0], share_id="s2"),))
LARGE = lease("a", share(memory_mib=5_000))
SMALL_COPY = dump_lease(structs.replace(lease("a"), shares=(share(memory_mib=2_000),)))


PREEMPTED = with_use(account(), DeviceUse(exclusive=True, claimed_by=True))
CLAIMING = replace(PREEMPTED, node=replace(PREEMPTED.node, used={"cpu": 100}))


def counted(totals: NodeTotals, **use: object) -> Snapshot:
    return facts(with_use(totals, structs.replace(totals.node.devices[0][1], **use)))


def small(name: str, slot: int, cores: int = 30) -> Lease:
    return lease(name, share(memory_mib=10, cores=cores, slot=slot, fence=slot + 1))


SOUND_CASES = {
    "a sound ledger": two(lease("a"), lease("b", share(slot=1, fence=2))),
    "a claim with its lease": replace(facts(account(CLAIMED)), claims=(CLAIM,)),
    "a claim that was not read": facts(account(CLAIMED)),
    "a device of one node": facts(replace(account(), reported=(GPU,))),
    "a gang": facts(account(MEMBER), gangs={GANG.name: frozenset({MEMBER.pod})}),
    "a waiting gang": GANG_WAITS,
    "nodes that were not read": facts(account(), api_nodes=None),
    "what a preemption has claimed of a node": facts(
        CLAIMING, preemption_claims={NODE: {"cpu": 100}}
    ),
    "a node that both have": facts(account(), api_nodes=frozenset({NODE})),
    "a claim that is not answered": replace(facts(account()), claims=(replace(CLAIM, answer=""),)),
    "pods that others bound and pods that ended": facts(
        account(), pods=(pod("a", annotations={}), pod("b", phase="Succeeded"))
    ),
    "a node that neither knows": facts(replace(account(), is_known=False), api_nodes=frozenset()),
}
CASES: dict[str, tuple[Any, ...]] = {
    "a total that is not the sum of its leases": (
        counted(SOUND, memory_mib=4_000, slots_taken="01"),
        "S1 the ledger counts 01 as shares held, its leases add up to 1",
        "S1 the ledger counts 4000 MiB, its leases add up to 3000",
    ),
    "a lease copy of another size": (
        facts(SOUND, pods=(pod("a", annotations={ANNOTATION: SMALL_COPY}),)),
        "S7 its annotation has [('GPU-0', 2000, 30)] (device, MiB, %), its lease has "
        "[('GPU-0', 3000, 30)]",
    ),
    "a node's total that is not the sum of its leases": (
        facts(replace(SOUND, node=replace(SOUND.node, used={"cpu": 700, "pods": 1}))),
        "S1 the ledger counts 700 of cpu, its leases add up to 500",
    ),
    "a node's total with what no preemption has claimed": (
        facts(CLAIMING),
        "S1 the ledger counts 100 of cpu, its leases add up to 0",
    ),
    "more memory than the device has": (
        two(
            lease("a", share(memory_mib=9_000)),
            lease("b", share(memory_mib=9_000, slot=1, fence=2)),
        ),
        "S1 leases take 18000 MiB, it has 15000",
    ),
    "more cores and shares than the device has": (
        facts(account(*(small(f"p{slot}", slot) for slot in range(5)))),
        "S1 leases take 150 % of its cores, it has 100",
        "S1 leases take 5 shares, it has 4",
        "S1 share 4 is held, it has 4",
    ),
    "a slot that two containers hold": (
        two(lease("a"), lease("b", share(fence=2))),
        "S1 2 containers hold share 0",
    ),
    "a second lease on an exclusive device": (
        two(small("a", 0, cores=100), small("b", 1, cores=0)),
        "S1 pod default/a holds it exclusively, and 1 others hold it, too",
    ),
    "a lease on a device that is not in the ledger": (
        facts(replace(SOUND, node=replace(SOUND.node, devices=()))),
        "S1 leases hold 3000 MiB of a device that is not in the ledger",
    ),
    "a claim that is answered and has no lease": (
        replace(facts(account()), claims=(CLAIM,)),
        "S3 it is answered as leased and holds no lease",
    ),
    "a lease of another share than the allocated one": (
        replace(facts(account(CLAIMED)), claims=(MOVED,)),
        "S7 it is allocated [('gpu', 'gpu-0', 's2')] (request, device, share), its lease "
        "has [('gpu', 'gpu-0', 's1')]",
    ),
    "a lease of a claim without an allocation": (
        replace(facts(account(CLAIMED)), claims=()),
        "P2 it has no allocation and its lease is bound, version 0",
    ),
    "an annotation that is no lease": (
        facts(SOUND, pods=(pod("a", annotations={ANNOTATION: "{}"}),)),
        "S7 leasehold.dev/lease of default/a is not a lease: KeyError('format')",
    ),
    "a second live lease of a pod": (
        facts(SOUND, account(lease("a", node=OTHER), node=OTHER)),
        "S2 it holds 2 live leases, on node-0, node-1",
    ),
    "an allocation larger than its lease": (
        facts(SOUND, allocations={NODE: (allocation(LARGE),)}),
        "S7 container main was given [('GPU-0', 5000, 30)] (device, MiB, %), its lease "
        "has [('GPU-0', 3000, 30)]",
    ),
    "a pod that we bound and that holds no lease": (
        facts(account(), pods=(pod("a"),)),
        "S3 it is bound to node-0 and holds no lease",
    ),
    "a lease on another node than the pod's": (
        facts(SOUND, pods=(pod("a", node="node-7"),)),
        "S3 it is bound to node-7 and holds a lease on node-0",
    ),
    "fences that repeat or pass the device's own": (
        counted(account(lease("a"), lease("b", share(slot=1))), fence=0),
        "S4 2 shares have the same lease number 1",
        "S4 a share has lease number 1, above the latest, 0",
    ),
    "an allocation without a lease": (
        facts(account(), pods=(), allocations={NODE: (allocation(lease("a")),)}),
        "S5 container main has devices from the kubelet, and no live lease",
    ),
    "an active lease without an allocation": (
        facts(account(ACTIVE), allocations={NODE: ()}),
        "S5 its lease is active, and the node's agent handed no device to the kubelet",
    ),
    "a reservation past its expiry": (
        facts(account(structs.replace(lease("a"), state=LeaseState.RESERVED, expires_at=NOW - 60))),
        "P2 its reservation has expired and is still held",
    ),
    "a device that two nodes report": (
        facts(replace(account(), reported=(GPU,)), ELSEWHERE),
        "S1 it is reported by 2 nodes: node-0, node-1",
    ),
    "a gang counted with other pods than its leases": (
        facts(account(MEMBER), gangs={"default/other": frozenset({MEMBER.pod})}),
        "P5 1 of its pods hold a lease and are not counted",
        "P5 1 pods are counted that do not hold a lease",
    ),
    "a gang counted with other pods than wait": (
        replace(GANG_WAITS, waiting_gangs={GANG.name: frozenset({PodUid("uid-a"), PodUid("x")})}),
        "P5 1 of its pods wait and are not counted",
        "P5 1 pods are counted that do not wait",
    ),
    "waiting pods that are gone, bound or terminated": (
        facts(
            pods=(
                pod("waits", node="", phase="Pending"),
                pod("bound", annotations={}),
                pod("ended", node="", phase="Failed"),
            ),
            waiting=tuple(map(waits, ("waits", "bound", "ended", "gone"))),
        ),
        f"P2 the pod is bound to {NODE} and the ledger has it as waiting",
        "P2 the pod has failed and the ledger has it as waiting",
        "P2 the pod is gone and the ledger has it as waiting",
    ),
    "nodes that only the ledger or only the API server has": (
        facts(account(), api_nodes=frozenset({OTHER})),
        "O2 the ledger has it, the API server does not",
        "O2 the API server has it, the ledger does not",
    ),
}
"""A snapshot, and what is found in it."""


@pytest.mark.parametrize("seen", SOUND_CASES.values(), ids=SOUND_CASES)
def test_nothing_is_found_where_all_agree(seen: Snapshot) -> None:
    assert differences(seen) == ()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_difference_is_found_with_both_numbers(case: tuple[Any, ...]) -> None:
    seen, *expected = case

    assert [f"{each.invariant} {each.text}" for each in differences(seen)] == expected


def test_a_lease_that_outlives_its_pod_is_found_and_may_last_thirty_seconds() -> None:
    (difference,) = differences(facts(account(lease("a")), pods=()))

    assert difference.invariant == "P2"
    assert difference.settles_s == 30.0
    assert lasting_differences([difference], {}, NOW)[0] == ()
    assert lasting_differences([difference], {difference: NOW - 29}, NOW)[0] == ()
    assert lasting_differences([difference], {difference: NOW - 30}, NOW)[0] == (difference,)


def test_a_difference_that_settles_starts_again_when_it_returns() -> None:
    seen = Difference("P2", "pod a", "x", 30.0)

    _, since = lasting_differences([seen], {}, 0.0)
    _, since = lasting_differences([], since, 10.0)
    wrong, since = lasting_differences([seen], since, 35.0)

    assert wrong == ()
    assert since == {seen: 35.0}


def test_a_waiting_pod_without_lease_verdict_or_condition_is_unexplained() -> None:
    ours = frozenset({"volcano"})
    waits = pod("a", node="", phase="Pending", annotations={})

    unexplained_pods = list(unexplained(facts(account(), pods=(waits,)), ours))
    reported = replace(waits, unschedulable_message="0/2 nodes are available")
    foreign = replace(waits, scheduler="default-scheduler")
    gated = replace(waits, gates=("example.com/gate",))

    assert [difference.invariant for difference in unexplained_pods] == ["P1"]
    assert not list(unexplained(facts(account(), pods=(reported, foreign, gated)), ours))


def test_nodes_with_active_leases_and_no_readable_checkpoint_are_named() -> None:
    active = structs.replace(lease("a"), state=LeaseState.ACTIVE)
    there = replace(facts(account(active)), allocations={NODE: ()})
    many = [
        account(structs.replace(lease(f"p{n}", node=NodeName(f"n{n}")), state=LeaseState.ACTIVE))
        for n in range(7)
    ]

    (elsewhere,) = unread_checkpoints(facts(account(active)))
    (of_many,) = unread_checkpoints(Snapshot(read_at=NOW, nodes=tuple(many)))

    assert elsewhere.startswith("the devices that the agents of node-0 handed to their kubelets")
    assert "n0, n1, n2, n3, n4 and 2 more" in of_many
    assert not list(unread_checkpoints(there))
    assert not list(unread_checkpoints(facts(account(lease("a")))))


def test_the_output_counts_what_was_checked_and_lists_what_was_not() -> None:
    seen = replace(facts(SOUND), not_checked=("budgets: no right to them",))

    shape = audit_shape(seen, ())
    text = StringIO()
    Console(file=text).print(render_audit(seen, ()))

    assert shape["clean"] is True
    assert shape["checked"] == {"nodes": 1, "devices": 1, "leases": 1, "pods": 1, "agents": 0}
    assert shape["not_checked"] == ["budgets: no right to them"]
    assert "clean: 1 lease" in text.getvalue()
    assert "not checked: budgets" in text.getvalue()


def test_an_agent_that_has_given_out_more_than_the_device_has_is_found() -> None:
    given = tuple(allocation(lease(name, share(memory_mib=8_000))) for name in ("a", "b"))
    whole = (allocation(lease("a", share(cores=100))), allocation(lease("b", share(cores=0))))

    def over_allocated(allocations: tuple[Allocation, ...]) -> list[str]:
        seen = facts(account(), allocations={NODE: allocations})
        return [text for invariant, text in found(seen) if invariant == "S9"]

    assert over_allocated(given[:1]) == []
    assert over_allocated(given) == ["the agent of node-0 has given out 16000 MiB, it has 15000"]
    assert over_allocated(whole) == [
        "the agent of node-0 has given it to 2 pods, to one exclusively"
    ]


def test_a_device_that_its_node_has_not_reported_since_a_rebuild_is_not_judged_yet() -> None:
    unreported = replace(DEVICE, index=-1, slots=0)
    totals = account(lease("one"))
    used = totals.node.devices[0][1]
    node = replace(totals.node, devices=((unreported, used),))
    found = differences(facts(replace(totals, node=node)))

    first, seen = lasting_differences(found, {}, NOW)
    later, _ = lasting_differences(found, seen, NOW + 15)

    assert not [each for each in first if each.invariant == "S1"]
    assert [each.text for each in later if "shares, it has 0" in each.text]


def test_a_gang_that_counts_a_pod_that_is_gone_is_found() -> None:
    member = structs.replace(lease("a"), gang=GANG.name)
    uncounted = facts(account(member), pods=())
    counted = replace(uncounted, gangs={GANG.name: frozenset({member.pod})})

    assert [text for invariant, text in found(uncounted) if invariant == "P5"] == []
    assert [text for invariant, text in found(counted) if invariant == "P5"] == [
        "1 pods are counted that are gone, as if they hold a lease"
    ]


def test_a_quota_whose_usage_and_charges_differ_is_found() -> None:
    one = lease("one")
    team = one.namespace
    charge = charge_of(one.shares, {GPU: DEVICE.memory_mib})
    sound = QuotaTotals(
        quotas={team: Quota(namespace=team, limits=QuotaLimits(cards=1))},
        used={team: {"": charge}},
        charges={one.pod: (team, {"": charge})},
    )
    turns = fair_share_of([DEVICE], [one], {})
    facts = Snapshot(
        read_at=NOW, nodes=(account(one),), pods=(pod("one"),), quotas=sound, fair_share=turns
    )

    uncharged = replace(facts, quotas=replace(sound, charges={}))
    orphaned = replace(facts, nodes=(account(),), fair_share=replace(turns, used={}))

    assert not differences(facts)
    assert [found.text for found in differences(uncharged)] == [
        "its lease is not charged to its quota",
        "the ledger counts 300 milli-GPU, 1 devices as used, charges add up to 0 on 0",
    ]
    assert "it is charged and has no lease" in [found.text for found in differences(orphaned)]


def test_a_fair_share_usage_that_no_lease_has_is_found_with_both_numbers() -> None:
    sound = facts(account(lease("a")))
    wrong = replace(sound, fair_share=replace(sound.fair_share, used={}))

    [difference] = differences(wrong)

    assert difference.subject == "namespace default"
    assert "counts 0 % of cores and 0 MiB for it, its leases take" in difference.text


def test_a_budget_whose_usage_differs_from_its_entries_is_found_with_both_numbers() -> None:
    window = BudgetWindow(id="2031-04", start_ms=1, used_units=30)
    entries = [
        ChargeEntry(
            window="2031-04", kind="adjust", units=10, reason=f"{RESTORED} the status of 5"
        ),
        ChargeEntry(window="2031-04", kind="adjust", units=99, reason="the limit was 1 and is 100"),
        ChargeEntry(window="2031-04", kind="charge", units=20),
        ChargeEntry(window="2031-04", kind="grant", units=7),
        ChargeEntry(window="2031-03", kind="charge", units=50),
    ]
    team = Namespace("team-a")
    sound = replace(facts(account()), budget_windows=(window_totals(team, window, entries),))
    wrong = replace(facts(account()), budget_windows=(window_totals(team, window, entries[1:]),))

    assert differences(sound) == ()
    [difference] = differences(wrong)
    assert (difference.invariant, difference.subject) == ("S6", "budget team-a")
    assert "has 30" in difference.text
    assert "add up to 20" in difference.text


def test_an_hour_in_which_uses_do_not_add_up_to_the_capacity_is_found_with_both_numbers() -> None:
    hour = CostHour(0, 3_600_000, 3_600_000, {"T4": 3_600_000})
    hour.add(FREE, "T4", 4, 3_600_000_000)
    wrong = CostHour(0, 3_600_000, 3_600_000, {"T4": 3_600_000})
    wrong.add(Namespace("a"), "T4", 0, 3_599_999_999)

    assert differences(replace(facts(account()), cost_hours=(hour,))) == ()
    [difference] = differences(replace(facts(account()), cost_hours=(wrong,)))
    assert (difference.invariant, difference.subject) == ("S6", "costs from 1970-01-01T00:00:00Z")
    assert "3599999999" in difference.text
    assert "capacity is 3600000000" in difference.text
