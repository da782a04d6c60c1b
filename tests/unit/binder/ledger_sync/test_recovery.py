"""Which leases an empty ledger gets back, and in which order."""

from dataclasses import replace

from msgspec import structs

from services.binder.ledger_sync.recovery import Recovery
from shared.model.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, NodeName
from tests.support.binder.events import activation, bound
from tests.support.binder.world import lease


def test_leases_of_listed_pods_are_restored_before_those_of_unlisted_pods() -> None:
    terminated, runs, starts = (
        lease("terminated"),
        lease("runs"),
        structs.replace(lease("starts"), created_at=2.0),
    )
    recovery = Recovery([bound(runs), bound(starts)])

    reported = recovery.add_reports({runs.node: (activation(terminated), activation(runs))})
    [annotated] = recovery.annotated()

    assert [(each.lease.name, each.lease.state) for each in reported] == [
        ("runs", LeaseState.ACTIVE)
    ]
    assert [(each.name, each.state) for each in annotated] == [("starts", LeaseState.BOUND)]
    assert [each.name for each in recovery.unlisted.values()] == ["terminated"]
    assert recovery.problems == []


def sized(lease: Lease, mib: int) -> Lease:
    shares = (structs.replace(lease.shares[0], memory_mib=mib),)
    return structs.replace(lease, version=5, shares=shares)


def test_a_lease_gets_the_size_of_its_agent_or_of_its_copy_whichever_is_less() -> None:
    larger, smaller, same = lease("larger"), lease("smaller"), lease("same")
    recovery = Recovery([bound(larger), bound(smaller), bound(same)])

    reported = recovery.add_reports(
        {
            same.node: (
                activation(sized(larger, 7_000)),
                activation(sized(smaller, 700)),
                activation(same),
            )
        }
    )

    assert [(each.lease.name, each.lease.shares[0].memory_mib) for each in reported] == [
        ("larger", 1_000),
        ("smaller", 700),
        ("same", 1_000),
    ]
    assert [each.name for each in recovery.lagging] == ["larger", "smaller"]
    assert [each.lease.version for each in reported] == [6, 5, 1], "agents follow newer leases"


def test_a_size_that_an_agent_has_from_before_a_resize_is_newer_than_that_of_the_copy() -> None:
    """The resize is lost, and whoever has heard of it follows newer leases only."""
    has, resized = lease("p1"), sized(lease("p1"), 7_000)
    recovery = Recovery([bound(resized)])

    [found] = recovery.add_reports({has.node: (activation(has),)})

    assert found.lease.shares == has.shares
    assert found.lease.version == resized.version + 1


def test_a_lease_on_other_devices_than_its_copy_is_restored_from_the_copy() -> None:
    known = lease("p1")
    forged = structs.replace(
        known, shares=(structs.replace(known.shares[0], device=DeviceUuid("GPU-n2-0")),)
    )
    recovery = Recovery([bound(known)])

    assert recovery.add_reports({known.node: (activation(forged),)}) == []
    [[restored]] = recovery.annotated()

    assert restored.shares == known.shares
    assert "other devices than those" in recovery.problems[0]


def test_a_slot_is_the_one_that_the_agent_has_given() -> None:
    known = lease("p1")
    [share] = known.shares
    given = structs.replace(share, slot=(share.slot or 0) + 1, fence=share.fence + 5)
    recovery = Recovery([bound(known)])

    [found] = recovery.add_reports(
        {known.node: (activation(structs.replace(known, shares=(given,))),)}
    )

    assert found.lease.shares == (given,)
    assert recovery.problems == []


def test_a_node_is_silent_until_it_reports() -> None:
    recovery = Recovery([bound(lease("p1", "n1")), bound(lease("p2", "n2"))])
    recovery.add_reports({NodeName("n1"): ()})

    assert recovery.silent == {"n2"}


def test_each_agents_report_of_an_unlisted_pod_is_kept_until_its_node_is_known() -> None:
    old, new = lease("p1", "n1"), structs.replace(lease("p1", "n2"), version=9)
    recovery = Recovery([])
    recovery.add_reports({new.node: (activation(new),)})
    recovery.add_reports({old.node: (activation(old),)})

    assert [each.node for each in recovery.unlisted.values()] == ["n2", "n1"]


def test_an_activation_on_another_node_than_its_pods_is_no_evidence() -> None:
    here, there = lease("p1", "n1"), lease("p1", "n2")
    recovery = Recovery([replace(bound(here), lease="")])

    assert recovery.add_reports({there.node: (activation(there),)}) == []
    [problem] = recovery.problems
    assert "honours a lease of pod" in problem


def test_each_node_s_oldest_annotated_lease_is_restored_first() -> None:
    young, old = (
        structs.replace(lease(name), created_at=at) for name, at in (("young", 5.0), ("old", 2.0))
    )
    [page] = Recovery([bound(young), bound(old)]).annotated()

    assert [each.name for each in page] == ["old", "young"]
