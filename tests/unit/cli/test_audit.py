"""The audit of devices and leases, and its output."""

from dataclasses import replace
from io import StringIO

from msgspec import structs
from rich.console import Console

from services.cli.audit.audit import render as render_audit
from services.cli.audit.audit import shape as audit_shape
from services.cli.audit.invariants import differences, unread_checkpoints
from services.cli.audit.lease_checks import unexplained
from services.cli.audit.snapshot import Difference, Snapshot, lasting_differences
from shared.model.device import DeviceUse
from shared.model.events.node_events import Allocation
from shared.model.lease import LeaseState
from shared.model.lease_copy import ANNOTATION, dump_lease
from shared.model.ledger import LedgerNode, NodeTotals
from shared.model.names import NodeName
from shared.model.node import NodeFacts
from tests.support.audit import (
    DEVICE,
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
    with_use,
)


def test_a_sound_ledger_has_no_differences() -> None:
    two = (lease("a"), lease("b", share(slot=1, fence=2)))

    assert found(facts(account(*two))) == []


def test_a_total_that_is_not_the_sum_of_its_leases_is_found_with_both_numbers() -> None:
    sound = account(lease("a"))
    use = DeviceUse(memory_mib=4_000, cores_percent=30, shares=1, fence=1, slots_taken="1")
    wrong = with_use(sound, use)

    assert found(facts(wrong)) == [
        ("S1", "the ledger counts 4000 MiB, its leases add up to 3000"),
    ]


def test_a_lease_copy_of_another_size_and_an_invalid_one_are_found() -> None:
    held = lease("a")
    other = structs.replace(held, shares=(share(memory_mib=2_000),))
    lags = pod("a", annotations={ANNOTATION: dump_lease(other)})

    assert found(facts(account(held), pods=(lags,))) == [
        (
            "S7",
            "its annotation has [('GPU-0', 2000, 30)] (device, MiB, %), its lease has "
            "[('GPU-0', 3000, 30)]",
        )
    ]
    (none,) = found(facts(account(held), pods=(pod("a", annotations={ANNOTATION: "{}"}),)))
    assert none[0] == "S7"
    assert "is not a lease" in none[1]


def test_a_node_total_that_is_not_the_sum_of_its_leases_is_found() -> None:
    sound = account(lease("a"))
    wrong = replace(sound, node=replace(sound.node, used={"cpu": 700, "pods": 1}))

    assert found(facts(wrong)) == [("S1", "the ledger counts 700 of cpu, its leases add up to 500")]


def test_more_memory_than_the_device_has_is_found() -> None:
    over = account(
        lease("a", share(memory_mib=9_000)), lease("b", share(memory_mib=9_000, slot=1, fence=2))
    )

    assert found(facts(over)) == [("S1", "leases take 18000 MiB, it has 15000")]


def test_more_cores_and_more_slots_than_the_device_has_are_found() -> None:
    many = [lease(f"p{slot}", share(memory_mib=10, slot=slot, fence=slot + 1)) for slot in range(5)]

    assert found(facts(account(*many))) == [
        ("S1", "leases take 150 % of its cores, it has 100"),
        ("S1", "leases take 5 slots, it has 4"),
        ("S1", "slot 4 is held, it has 4"),
    ]


def test_a_slot_that_two_containers_hold_is_found() -> None:
    same = account(lease("a"), lease("b", share(fence=2)))

    assert found(facts(same)) == [("S1", "2 containers hold slot 0")]


def test_a_second_lease_on_an_exclusive_device_is_found() -> None:
    beside = account(
        lease("a", share(memory_mib=10, cores=100)), lease("b", share(cores=0, slot=1, fence=2))
    )

    assert found(facts(beside)) == [
        ("S1", "pod default/a holds it exclusively, and 1 others hold it, too")
    ]


def test_a_lease_on_a_device_that_is_not_in_the_ledger_is_found() -> None:
    sound = account(lease("a"))
    gone = replace(sound, node=replace(sound.node, devices=()))

    assert found(facts(gone)) == [
        ("S1", "leases hold 3000 MiB of a device that is not in the ledger")
    ]


def test_a_second_live_lease_of_a_pod_is_found() -> None:
    other = NodeName("node-1")
    both = facts(account(lease("a")), account(lease("a", node=other), node=other))

    assert ("S2", "it holds 2 live leases, on node-0, node-1") in found(both)


def test_a_pod_that_we_bound_and_that_holds_no_lease_is_found() -> None:
    assert found(facts(account(), pods=(pod("a"),))) == [
        ("S3", "it is bound to node-0 and holds no lease")
    ]


def test_pods_that_others_bound_and_pods_that_ended_need_no_lease() -> None:
    pods = (pod("a", annotations={}), pod("b", phase="Succeeded"))

    assert found(facts(account(), pods=pods)) == []


def test_a_lease_on_another_node_than_the_pods_is_found() -> None:
    elsewhere = facts(account(lease("a")), pods=(pod("a", node="node-7"),))

    assert found(elsewhere) == [("S3", "it is bound to node-7 and holds a lease on node-0")]


def test_fences_that_repeat_or_pass_the_devices_own_are_found() -> None:
    sound = account(lease("a"), lease("b", share(slot=1)))
    use = structs.replace(sound.node.devices[0][1], fence=0)

    assert found(facts(with_use(sound, use))) == [
        ("S4", "2 shares carry fence 1"),
        ("S4", "a share carries fence 1, the device 0"),
    ]


def test_an_allocation_larger_than_its_lease_is_found() -> None:
    reported = allocation(lease("a", share(memory_mib=5_000)))

    ((invariant, text),) = found(facts(account(lease("a")), allocations={NODE: (reported,)}))

    assert invariant == "S7"
    assert "5000" in text
    assert "3000" in text


def test_an_allocation_without_a_lease_is_found() -> None:
    reported = allocation(lease("a"))

    assert found(facts(account(), pods=(), allocations={NODE: (reported,)})) == [
        ("S5", "container main has devices from the kubelet, and no live lease")
    ]


def test_an_active_lease_without_an_allocation_is_found() -> None:
    active = structs.replace(lease("a"), state=LeaseState.ACTIVE)

    assert found(facts(account(active), allocations={NODE: ()})) == [
        ("S5", "its lease is active, and the node's agent handed no device to the kubelet")
    ]


def test_a_lease_that_outlives_its_pod_is_found_and_may_last_thirty_seconds() -> None:
    (difference,) = differences(facts(account(lease("a")), pods=()))

    assert difference.invariant == "P2"
    assert difference.settles_s == 30.0
    assert lasting_differences([difference], {}, NOW)[0] == ()
    assert lasting_differences([difference], {difference: NOW - 29}, NOW)[0] == ()
    assert lasting_differences([difference], {difference: NOW - 30}, NOW)[0] == (difference,)


def test_a_reservation_past_its_expiry_is_found() -> None:
    late = structs.replace(lease("a"), state=LeaseState.RESERVED, expires_at=NOW - 60)

    assert found(facts(account(late))) == [("P2", "its reservation has expired and is still held")]


def test_a_difference_that_settles_starts_again_when_it_returns() -> None:
    seen = Difference(invariant="P2", subject="pod a", text="x", settles_s=30.0)

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


def test_what_was_not_checked_is_listed() -> None:
    found = replace(facts(account(lease("a"))), not_checked=("budgets: no right to them",))

    assert audit_shape(found, ())["not_checked"] == ["budgets: no right to them"]
    text = StringIO()
    Console(file=text).print(render_audit(found, ()))
    assert "clean: 1 lease" in text.getvalue()
    assert "not checked: budgets" in text.getvalue()


def test_the_json_form_counts_what_was_checked() -> None:
    shape = audit_shape(facts(account(lease("a"))), ())

    assert shape["clean"] is True
    assert shape["checked"] == {"nodes": 1, "devices": 1, "leases": 1, "pods": 1, "agents": 0}


def test_a_device_that_two_nodes_report_is_found() -> None:
    one = replace(account(), reported=(GPU,))
    other = NodeTotals(
        node=LedgerNode(facts=NodeFacts(name=NodeName("node-1"))), leases=(), reported=(GPU,)
    )

    assert found(facts(one)) == []
    assert found(facts(one, other)) == [("S1", "it is reported by 2 nodes: node-0, node-1")]


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
    assert [each.text for each in later if "slots" in each.text]
