"""Which leases an empty ledger gets back, and in which order."""

from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.ledger_sync.recovery import Recovery
from shared.model.leases.lease import Lease, LeaseState, Share, WaitingSize
from shared.model.names import DeviceUuid, NodeName
from tests.support.binder.events import activation, bound
from tests.support.binder.world import lease


def test_leases_of_listed_pods_are_restored_before_those_of_unlisted_pods() -> None:
    terminated = lease("terminated")
    runs = lease("runs")
    starts = structs.replace(lease("starts"), created_at=2.0)
    recovery = Recovery([bound(runs), bound(starts)])

    reported = recovery.add_reports({runs.node: (activation(terminated), activation(runs))})
    [annotated] = recovery.annotated()

    assert [(each.lease.name, each.lease.state) for each in reported] == [
        ("runs", LeaseState.ACTIVE)
    ]
    assert [(each.name, each.state) for each in annotated] == [("starts", LeaseState.BOUND)]
    assert [each.name for each in recovery.unlisted.values()] == ["terminated"]
    assert recovery.problems == []


def sized(mib: int, version: int = 5) -> Lease:
    shares = (structs.replace(KNOWN.shares[0], memory_mib=mib),)
    return structs.replace(KNOWN, version=version, shares=shares)


KNOWN = lease("p1")
GIVEN = structs.replace(KNOWN.shares[0], slot=(KNOWN.shares[0].slot or 0) + 1, fence=9)


@pytest.mark.parametrize(
    ("reported", "copy", "shares", "version", "lags"),
    [
        pytest.param(sized(7_000), KNOWN, KNOWN.shares, 6, True, id="the copy has less"),
        pytest.param(sized(700), KNOWN, sized(700).shares, 5, True, id="the agent has less"),
        pytest.param(KNOWN, KNOWN, KNOWN.shares, 1, False, id="the same"),
        pytest.param(KNOWN, sized(7_000), KNOWN.shares, 6, True, id="a resize is lost"),
        pytest.param(
            structs.replace(KNOWN, shares=(GIVEN,)), KNOWN, (GIVEN,), 1, True, id="another slot"
        ),
    ],
)
def test_a_lease_has_the_slot_of_its_agent_and_the_smaller_size_in_a_new_version(
    reported: Lease, copy: Lease, shares: tuple[Share, ...], version: int, *, lags: bool
) -> None:
    """Agents follow newer leases only."""
    recovery = Recovery([bound(copy)])

    [found] = recovery.add_reports({KNOWN.node: (activation(reported),)})

    assert (found.lease.shares, found.lease.version) == (shares, version)
    assert bool(recovery.lagging) is lags
    assert recovery.problems == []


def test_a_lease_that_waits_for_a_smaller_size_is_resized_by_a_binder_after_a_rebuild() -> None:
    size = WaitingSize(container="c", memory_mib=500, cores_percent=10, since=1.0)
    waiting = structs.replace(KNOWN, waiting_size=size)
    other = structs.replace(lease("p2"), waiting_size=size)
    recovery = Recovery([bound(waiting), bound(other), bound(lease("p3"))])

    [reported] = recovery.add_reports({KNOWN.node: (activation(KNOWN),)})
    [_] = recovery.annotated()

    assert reported.lease.waiting_size == size
    assert [lagging.name for lagging in recovery.lagging] == ["p1", "p2"]


def test_a_lease_on_other_devices_than_its_copy_is_restored_from_the_copy() -> None:
    elsewhere = structs.replace(KNOWN.shares[0], device=DeviceUuid("GPU-n2-0"))
    forged = structs.replace(KNOWN, shares=(elsewhere,))
    recovery = Recovery([bound(KNOWN)])

    assert recovery.add_reports({KNOWN.node: (activation(forged),)}) == []
    [[restored]] = recovery.annotated()

    assert restored.shares == KNOWN.shares
    assert "other devices than those" in recovery.problems[0]


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
