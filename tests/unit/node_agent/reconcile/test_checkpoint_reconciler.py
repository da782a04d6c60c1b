"""What is requested of the kubelet to find pods that have ended."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.node_agent.kubelet.pods import ClaimHolding, KubeletContainer
from services.node_agent.node import Node
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from shared.model.leases.lease import ClaimAllocation, Lease
from shared.model.names import PodUid
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.node import FakeKubelet, entry_of, kubelet_pod, node_of
from tests.support.simcluster.kubelet import NODE


async def node_with(kubelet: FakeKubelet, path: Path, *leases: Lease) -> Node:
    """Return a node whose checkpoint has these leases, of which none is known any more."""
    node = node_of(kubelet, checkpoint=Checkpoint(path / "checkpoint.json", NODE))
    for lease in leases:
        await node.checkpoint.save(entry_of(lease))
    return node


def reconciler(node: Node, **changes: Any) -> CheckpointReconciler:
    unused: Any = None
    kubelet: Any = node.kubelet
    return CheckpointReconciler(node, kubelet, unused, **changes)


@pytest.mark.parametrize(
    ("limits", "recorded", "leased", "requests"),
    [
        ({}, None, False, 0),
        ({"nvidia.com/gpu": 1}, None, False, 1),
        ({"nvidia.com/gpu": 1}, "p", True, 0),
        ({}, "gone", False, 1),
    ],
)
async def test_holdings_are_listed_only_if_a_container_may_have_some_that_are_not_recorded(
    tmp_path: Path, limits: dict[str, int], recorded: str | None, leased: bool, requests: int
) -> None:
    pod = kubelet_pod("p", "p", containers=(KubeletContainer(name="main", limits=limits),))
    kubelet = FakeKubelet(pod)
    leases = [lease_of(recorded, name=recorded)] if recorded else []
    node = await node_with(kubelet, tmp_path, *leases)
    if leased:
        node.leases.observe(leases)

    assert await reconciler(node).forget_ended() == (pod,)
    assert kubelet.holdings_calls == requests
    assert node.checkpoint.pods == {"p"} & {recorded}


HELD = frozenset({ClaimHolding(namespace="default", pod="p", claim="c", device="d")})
USER = PodUid("user")


@pytest.mark.parametrize(
    ("serves_claims", "held", "running", "kept"),
    [
        (True, frozenset(), frozenset(), True),
        (False, HELD, frozenset(), True),
        (False, frozenset(), frozenset({USER}), True),
        (False, frozenset(), frozenset(), False),
    ],
)
async def test_without_the_driver_a_claim_ends_once_no_container_uses_it(
    tmp_path: Path,
    serves_claims: bool,
    held: frozenset[ClaimHolding],
    running: frozenset[PodUid],
    kept: bool,
) -> None:
    claim = ClaimAllocation(generation="1", consumers=(USER,))
    lease = msgspec.structs.replace(lease_of("uid-c", name="c"), claim=claim)
    kubelet = FakeKubelet(running=running)
    kubelet.claims = held
    node = await node_with(kubelet, tmp_path, lease)

    await reconciler(node, serves_claims=serves_claims).forget_ended()

    assert bool(node.checkpoint.claims) is kept


@pytest.mark.parametrize(
    ("facts", "unseen"),
    [
        ({}, ""),
        ({"error": "PodResources do not respond"}, "PodResources do not respond"),
        ({"blind": "processes are not visible"}, "processes are not visible"),
        ({"processes": {PodUid("uid-a"): frozenset({"c"})}}, ""),
    ],
)
async def test_a_pod_whose_lease_has_ended_is_over_although_an_old_list_shows_it(
    tmp_path: Path, facts: dict[str, Any], unseen: str
) -> None:
    kubelet = FakeKubelet(kubelet_pod("a", phase="Running"))
    vars(kubelet).update(facts)
    lease = lease_of("uid-a", name="a")
    node = await node_with(kubelet, tmp_path, lease)
    reconciling = reconciler(node)

    await reconciling.forget_ended()

    assert node.checkpoint.pods == (set() if not facts else {"uid-a"})
    assert reconciling.over == (set() if facts else {"uid-a"})
    assert unseen in reconciling.unseen_holders(entry_of(lease_of("uid-b", name="b")))
    assert bool(unseen) is bool(reconciling.unseen_holders(entry_of(lease_of("uid-b"))))
