"""GPUs with many slots, and a blocked kubelet socket."""

import shutil

from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import NUMBER, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until


async def test_a_gpu_may_have_2000_slots() -> None:
    async with (
        one_node_cluster("2xT4", device_split_count=2000) as cluster,
        cluster.running() as agent,
    ):
        await cluster.run_pod("last", share(1, 1000, slot=1999))
        held = await cluster.node.allocated_devices()

        assert len(agent.node.shown.served[NUMBER]) == 4000
        assert held["last", "main"] == {f"{uuid_of(NodeName(NODE), 1)}-1999"}


async def test_the_agent_registers_again_once_a_directory_at_the_kubelets_socket_is_gone() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        socket = cluster.node.kubelet.files.root / "device-plugins" / "kubelet.sock"
        aside = socket.with_name("aside.sock")
        socket.rename(aside)
        socket.mkdir()
        endpoints = agent.plugins.endpoints.values()
        await until(lambda: not any(endpoint.is_served for endpoint in endpoints))
        await cluster.node.allocatable(NUMBER, 0)
        shutil.rmtree(socket)
        aside.rename(socket)
        await until(lambda: agent.plugins.unready_reason() is None)
        await cluster.node.allocatable(NUMBER, 20)
        await cluster.run_pod("one", share(0, 1000))
