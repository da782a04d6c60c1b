"""MIG instances of one node, for the tests of its agent."""

from collections.abc import Mapping
from typing import Any

from services.node_agent.mig.instances import MigInstance
from shared.model.leases.lease import Lease, MigPlacement, RequestedUnits, Share
from shared.model.names import NodeName
from simcluster.node_agent.agent import MIG_FILE
from simcluster.node_agent.gpus import SimulatedGpus, uuid_of
from tests.support.node_agent.agent import OneNodeCluster, share
from tests.support.simcluster.kubelet import NODE

GPU = uuid_of(NodeName(NODE), 0)
PROFILES = {
    "group1": ("1g.5gb", 5120, 7),
    "group2": ("2g.10gb", 10240, 3),
    "group3": ("3g.20gb", 20480, 2),
    "group4": ("7g.40gb", 40960, 1),
}
PHASE = "volcano.sh/bind-phase"


def mig_share(group: str, position: int = 0, requested_mib: int = 3000, **changes: Any) -> Share:
    """Return a share that is an instance of the node's first device."""
    profile, memory_mib, count = PROFILES[group]
    if position >= count:
        profile = "1g.5gb"
        memory_mib = 5120
    facts: dict[str, Any] = {
        "slot": position,
        "fence": 1,
        "cores_percent": 0,
        "mig": MigPlacement(layout=group, position=position, profile=profile),
        "device_mib": 40960,
        "requested_units": RequestedUnits(memory_mib=requested_mib),
    }
    return share(changes.pop("index", 0), memory_mib, **(facts | changes))


def plugin_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that do not come from the kubelet."""
    usual = ("PATH", "HOSTNAME", "HOME", "KUBERNETES_")
    return {name: value for name, value in env.items() if not name.startswith(usual)}


def hardware(cluster: OneNodeCluster) -> SimulatedGpus:
    settings = cluster.settings
    return SimulatedGpus(
        NodeName(NODE), settings.gpus, settings.fault_file, settings.state_dir / MIG_FILE
    )


async def instances_by_start(cluster: OneNodeCluster) -> dict[int, MigInstance]:
    """Return the device's instances by their first slice."""
    return {instance.start: instance for instance in await hardware(cluster).instances(GPU)}


async def end_pod(cluster: OneNodeCluster, lease: Lease) -> None:
    """End a pod and its lease."""
    await cluster.delete_pod(lease.name)
    await cluster.release(lease)
