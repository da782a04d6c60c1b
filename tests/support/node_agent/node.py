"""A node with fake clients, for parts of its agent."""

from pathlib import Path
from typing import Any

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.enforcers.table import enforcer_table
from services.node_agent.kubelet.pods import (
    ClaimHolding,
    Holding,
    KubeletPod,
    PodResources,
    RunningPods,
)
from services.node_agent.node import Node
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.devices.device import Device
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.build import allocation_of
from tests.support.simcluster.kubelet import NODE


class FakeKubelet:
    """Lists pods, running pods and held devices that a test sets."""

    unreadable_reason = ""
    is_passing = False
    error = ""
    """The error of `list_holdings`; empty: none."""
    blind = ""
    """The error of `find_running`; empty: none."""
    silent_reason = ""

    def __init__(self, *pods: KubeletPod, running: frozenset[PodUid] = frozenset()) -> None:
        self.pods = list(pods)
        self.running = running
        self.holdings: list[Holding] = []
        self.claims: frozenset[ClaimHolding] = frozenset()
        self.active: frozenset[tuple[str, str]] = frozenset()
        self.processes: dict[PodUid, frozenset[str]] = {}
        self.list_calls = 0
        self.holdings_calls = 0

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        self.list_calls += 1
        return tuple(self.pods)

    async def list_running(self) -> frozenset[PodUid]:
        return self.running

    async def find_running(self) -> RunningPods:
        if self.blind:
            raise UnavailableError(self.blind)
        return RunningPods(processes=self.processes, starting=self.running)

    async def list_holdings(self) -> PodResources:
        self.holdings_calls += 1
        if self.error:
            raise UnavailableError(self.error)
        return PodResources(holdings=tuple(self.holdings), claims=self.claims, pods=self.active)


def kubelet_pod(name: str, uid: str = "", **facts: Any) -> KubeletPod:
    """Return a pod of the namespace `default`."""
    uid = uid or f"uid-{name}"
    return KubeletPod(uid=PodUid(uid), namespace=Namespace("default"), name=name, **facts)


def snapshot_of(*devices: Device) -> NodeSnapshot:
    """Return the snapshot of a node with these devices."""
    return NodeSnapshot(
        name=NodeName(NODE),
        devices={device.uuid: device for device in devices},
        served=advertisement_of(DIALECTS.values(), devices, "auto").served,
        paths=Paths(library="/l", preload="/p", containers="/c"),
    )


def entry_of(
    lease: Lease, setup: ContainerSetup | None = None, **allocation: Any
) -> CheckpointEntry:
    """Return the record of a container of the lease's pod."""
    return CheckpointEntry(
        allocation=allocation_of(lease, **allocation),
        setup=setup or ContainerSetup(environment={}),
    )


def node_of(kubelet: Any = None, requester: Any = None, **parts: Any) -> Node:
    """Return a node whose leases are synced; what is not given must not be used."""
    name = NodeName(NODE)
    facts: dict[str, Any] = {
        "name": name,
        "kubernetes": None,
        "kubelet": kubelet,
        "pod_resources": kubelet,
        "checkpoint": Checkpoint(Path("unused"), name),
        "lease_sync": LeaseSync(KnownLeases(name, synced=True), requester),
        "files": None,
        "cdi": None,
        "metrics": None,
    }
    files: Any = parts.get("files")
    facts["enforcers"] = enforcer_table(files)
    return Node(**(facts | parts))
