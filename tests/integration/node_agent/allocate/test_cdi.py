"""Devices named by CDI and by mounts, by an agent beside a simulated kubelet."""

from typing import Any

from services.node_agent.allocate.cdi import FILE
from shared.kubelet_api.deviceplugin import api_pb2
from shared.model.leases.lease import Lease
from simcluster.kubelet.devices.checkpoint import load_checkpoint
from tests.support.node_agent.agent import OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.cdi import cdi_devices
from tests.support.waiting import until


def allocate_response(cluster: OneNodeCluster, lease: Lease) -> api_pb2.ContainerAllocateResponse:
    """Return the Allocate response of the kubelet's checkpoint."""
    ledger = load_checkpoint(cluster.node.kubelet.files.root / "device-plugins")
    assert ledger is not None
    (held,) = ledger.container_allocations(lease.pod, "main")
    return api_pb2.ContainerAllocateResponse.FromString(held.response)


def specification_devices(cluster: OneNodeCluster) -> dict[str, dict[str, Any]]:
    return cdi_devices(cluster.node.kubelet.files.cdi / FILE)


async def test_a_share_gets_its_cdi_name_and_its_limits() -> None:
    strategies = ("cdi-cri", "volume-mounts")
    async with one_node_cluster(device_list_strategy=strategies) as cluster:
        cluster.changes["cdi_dir"] = cluster.node.kubelet.files.cdi
        await check_a_share(cluster)


async def check_a_share(cluster: OneNodeCluster) -> None:
    specification = cluster.node.kubelet.files.cdi / FILE
    async with cluster.running():
        lease = await cluster.run_pod("one", share(1, 1000))
        response = allocate_response(cluster, lease)
        device = lease.shares[0].device
        named = specification_devices(cluster)
        specification.unlink()
        await until(specification.exists)

        name = f"leasehold.dev/gpu={device}"
        assert [each.name for each in response.cdi_devices] == [name]
        assert response.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
        mounts = {mount.container_path for mount in response.mounts}
        assert mounts >= {
            "/etc/ld.so.preload",
            f"{response.envs['NVIDIA_VISIBLE_DEVICES']}/{device}",
        }
        assert name in named
        assert specification_devices(cluster) == named
