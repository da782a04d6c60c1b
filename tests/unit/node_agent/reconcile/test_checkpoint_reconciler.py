"""What is requested of the kubelet to find pods that have ended."""

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from services.node_agent.kubelet.pods import (
    ClaimHolding,
    KubeletContainer,
    KubeletPod,
    PodResources,
)
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.dialects.dialect import ContainerSetup
from shared.model.lease import ClaimAllocation
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.build import allocation_of
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import lease_of

NODE = NodeName("node-0")


def reconciler_of(
    checkpoint: Checkpoint, kubelet: Any, *, serves_claims: bool = True
) -> CheckpointReconciler:
    return CheckpointReconciler(
        checkpoint,
        KnownLeases(NODE),
        pods=kubelet,
        pod_resources=kubelet,
        list_mig_instances=AsyncMock(return_value={}),
        retain_refused=Mock(),
        files=Mock(),
        clock=FakeClock(),
        serves_claims=serves_claims,
    )


@pytest.mark.parametrize(
    ("limits", "recorded", "requests"),
    [
        ({}, None, 0),
        ({"nvidia.com/gpu": 1}, None, 1),
        ({"nvidia.com/gpu": 1}, "p", 0),
        ({}, "gone", 1),
    ],
)
async def test_holdings_are_listed_only_if_a_container_may_have_some_that_are_not_recorded(
    tmp_path: Path, limits: dict[str, int], recorded: str | None, requests: int
) -> None:
    container = KubeletContainer(name="main", limits=limits)
    pod = KubeletPod(
        uid=PodUid("p"), namespace=Namespace("default"), name="p", containers=(container,)
    )
    kubelet: Any = Mock(
        list_pods=AsyncMock(return_value=(pod,)),
        list_holdings=AsyncMock(return_value=PodResources()),
        list_running=AsyncMock(return_value=frozenset()),
    )
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", NODE)
    if recorded is not None:
        allocation = allocation_of(lease_of(recorded, name=recorded))
        await checkpoint.save(
            CheckpointEntry(allocation=allocation, setup=ContainerSetup(environment={}))
        )
    reconciler = reconciler_of(checkpoint, kubelet)

    assert await reconciler.forget_ended(None) == (pod,)
    assert kubelet.list_holdings.await_count == requests
    assert checkpoint.pods == {"p"} & {recorded}


HELD = PodResources(
    claims=frozenset({ClaimHolding(namespace="default", pod="p", claim="c", device="d")})
)


@pytest.mark.parametrize(
    ("serves_claims", "held", "running", "kept"),
    [
        (True, PodResources(), frozenset(), True),
        (False, HELD, frozenset(), True),
        (False, PodResources(), frozenset({PodUid("user")}), True),
        (False, PodResources(), frozenset(), False),
    ],
)
async def test_without_the_driver_a_claim_ends_once_no_container_uses_it(
    tmp_path: Path, serves_claims: bool, held: PodResources, running: frozenset[PodUid], kept: bool
) -> None:
    claim = ClaimAllocation(generation="1", consumers=(PodUid("user"),))
    lease = msgspec.structs.replace(lease_of("uid-c", name="c"), claim=claim)
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", NODE)
    await checkpoint.save(
        CheckpointEntry(allocation=allocation_of(lease), setup=ContainerSetup(environment={}))
    )
    kubelet: Any = Mock(
        list_pods=AsyncMock(return_value=()),
        list_holdings=AsyncMock(return_value=held),
        list_running=AsyncMock(return_value=running),
    )

    await reconciler_of(checkpoint, kubelet, serves_claims=serves_claims).forget_ended(None)

    assert bool(checkpoint.claims) is kept
