"""Limits on disk and the metrics page, of an agent beside a simulated kubelet."""

import contextlib
from pathlib import Path

from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.settings import AgentSettings
from shared.model.lease import Lease
from simcluster.node_agent.agent import SimulatedAgentSettings
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until

MIB = 1 << 20
CRASHING = {"sim.leasehold.dev/run-for": "50ms", "sim.leasehold.dev/exit-code": "3"}


async def test_the_limits_of_a_container_are_set_before_it_starts() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        obj = pod("one", limits={NUMBER: 2})
        both = share(1, 2000, cores_percent=50), share(0, 3000, cores_percent=50)
        lease = cluster.bind(obj, *both)
        await cluster.node.phase("one", "Running")
        image = cluster.region_of(lease).read_bytes()

    assert image == image_of(
        RegionSeed(
            memory_bytes=(3000 * MIB, 2000 * MIB), cores_percent=(50, 50), other_cores_percent=50
        )
    )


async def test_a_container_whose_limits_cannot_be_set_again_does_not_start() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        lease = cluster.bind(pod("one", limits={NUMBER: 1}, annotations=CRASHING), share(0, 1000))
        place = await until(lambda: _place(cluster, lease))
        while not place.is_dir():  # a start may be putting a fresh one there
            place.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                (place / "full").mkdir(parents=True)
        why = await until(lambda: _waiting(cluster, "one"))

    assert "limits of the container cannot be set" in why


def test_metrics_of_real_gpus_are_on_the_published_port() -> None:
    assert AgentSettings().monitor_address == "0.0.0.0:9394"
    assert AgentSettings(monitor_http="127.0.0.1:0").monitor_address == "127.0.0.1:0"
    assert SimulatedAgentSettings().monitor_address is None


def _place(cluster: OneNodeCluster, lease: Lease) -> Path | None:
    found = list(cluster.root.glob(f"agent/containers/{lease.pod}_main/*.cache"))
    return found[0] if found else None


def _waiting(cluster: OneNodeCluster, name: str) -> str:
    """Return why the pod's container does not start, if its status has a reason."""
    statuses = cluster.node.pod(name)["status"].get("containerStatuses", [])
    text = str(statuses)
    return text if "cannot be set" in text else ""
