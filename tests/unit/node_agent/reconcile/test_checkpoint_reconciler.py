"""What is requested of the kubelet to find pods that have ended."""

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from services.node_agent.kubelet.pods import KubeletContainer, KubeletPod, PodResources
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from shared.dialects.dialect import ContainerSetup
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.build import allocation_of
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import lease_of

NODE = NodeName("node-0")


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
    reconciler = CheckpointReconciler(
        checkpoint,
        KnownLeases(NODE),
        pods=kubelet,
        pod_resources=kubelet,
        list_mig_instances=AsyncMock(return_value={}),
        retain_refused=Mock(),
        files=Mock(),
        clock=FakeClock(),
    )

    assert await reconciler.forget_ended(None) == (pod,)
    assert kubelet.list_holdings.await_count == requests
    assert checkpoint.pods == {"p"} & {recorded}
