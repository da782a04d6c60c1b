"""Which leases an empty ledger gets back, and in which order."""

from msgspec import structs

from services.binder.ledger_sync.recovery import Evidence, recover
from shared.model.lease import LeaseState
from tests.support.binder.events import activation, bound
from tests.support.binder.world import lease


def test_leases_of_listed_pods_are_restored_before_those_of_unlisted_pods() -> None:
    terminated, runs, starts = (
        lease("terminated"),
        lease("runs"),
        structs.replace(lease("starts"), created_at=2.0),
    )
    evidence = Evidence(
        pods=(bound(runs), bound(starts)),
        allocations={terminated.node: (activation(terminated), activation(runs))},
    )

    recovery = recover(evidence)

    assert [(each.name, each.state) for each in recovery.leases] == [
        ("runs", LeaseState.ACTIVE),
        ("starts", LeaseState.BOUND),
        ("terminated", LeaseState.ACTIVE),
    ]
    assert recovery.problems == ()


def test_an_annotation_that_lags_behind_a_resize_is_marked() -> None:
    old = lease("resized")
    new = structs.replace(
        old, version=5, shares=(structs.replace(old.shares[0], memory_mib=7_000),)
    )
    same = lease("same")
    evidence = Evidence(
        pods=(bound(old), bound(same)),
        allocations={old.node: (activation(new), activation(same))},
    )

    recovery = recover(evidence)

    assert [(each.name, each.shares[0].memory_mib) for each in recovery.leases] == [
        ("resized", 7_000),
        ("same", 1_000),
    ]
    assert [each.name for each in recovery.lagging] == ["resized"]
