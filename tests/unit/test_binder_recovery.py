"""Which leases an emptied ledger gets back, and in which order they claim their place."""

from dataclasses import replace

from services.binder.recovery import Evidence, recover
from shared.model.events import BoundPod
from shared.model.lease import Lease, LeaseState
from shared.model.lease_copy import dump_lease
from shared.model.node_events import Activation
from tests.support.binder_world import lease


def activation(held: Lease) -> Activation:
    return Activation(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container="c",
        resource="volcano.sh/vgpu-number",
        device_ids=("GPU-n1-0-0",),
        lease=held,
    )


def bound(held: Lease) -> BoundPod:
    return BoundPod(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        node=held.node,
        lease=dump_lease(held),
    )


def test_a_pod_that_is_not_listed_claims_its_place_after_all_that_are() -> None:
    over, runs, starts = lease("over"), lease("runs"), replace(lease("starts"), created_at=2.0)
    evidence = Evidence(
        pods=(bound(runs), bound(starts)),
        activations={over.node: (activation(over), activation(runs))},
    )

    recovery = recover(evidence)

    assert [(each.name, each.state) for each in recovery.leases] == [
        ("runs", LeaseState.ACTIVE),
        ("starts", LeaseState.BOUND),
        ("over", LeaseState.ACTIVE),
    ]
    assert recovery.problems == ()


def test_a_pod_whose_copy_is_of_another_size_than_its_agents_word_is_to_be_written_anew() -> None:
    old = lease("resized")
    new = replace(old, version=5, shares=(replace(old.shares[0], memory_mib=7_000),))
    same = lease("same")
    evidence = Evidence(
        pods=(bound(old), bound(same)),
        activations={old.node: (activation(new), activation(same))},
    )

    recovery = recover(evidence)

    assert [(each.name, each.shares[0].memory_mib) for each in recovery.leases] == [
        ("resized", 7_000),
        ("same", 1_000),
    ]
    assert [each.name for each in recovery.lagging] == ["resized"]
