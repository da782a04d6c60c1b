"""Resources, annotations and reports of a node, with and without a driver."""

import pytest
from yarl import URL

from shared.model.clock import SystemClock
from shared.model.errors import RequestError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import SimulatedGpus
from tests.campaign.stack.tcp_proxy import TcpProxy
from tests.support.node_agent.agent import one_node_cluster
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until


async def test_the_register_annotation_and_patched_amounts_are_restored_if_removed() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        await cluster.node.allocatable("volcano.sh/vgpu-cores", 200)
        key = "volcano.sh/node-vgpu-register"
        await until(lambda: cluster.node.node()["metadata"]["annotations"].get(key))
        cluster.node.store.patch("nodes", None, NODE, {"metadata": {"annotations": {key: None}}})
        lost = {
            "status": {
                part: {"volcano.sh/vgpu-cores": None} for part in ("capacity", "allocatable")
            }
        }
        cluster.node.store.patch("nodes", None, NODE, lost, subresource="status")
        await cluster.node.allocatable("volcano.sh/vgpu-cores", 200)
        await until(lambda: cluster.node.node()["metadata"]["annotations"].get(key))


async def test_item_14_the_agent_overwrites_a_schedulers_handshake() -> None:
    key = "volcano.sh/node-vgpu-handshake"

    def handshake() -> str:
        return str(cluster.node.node()["metadata"].get("annotations", {}).get(key, ""))

    async with one_node_cluster(volcano_handshake=True) as cluster:
        async with cluster.running():
            await until(lambda: handshake().startswith("Reported "))
        deleted = {"metadata": {"annotations": {key: "Deleted_2026.08.20 10:00:00"}}}
        cluster.node.store.patch("nodes", None, NODE, deleted)
        async with cluster.running():
            await until(lambda: handshake().startswith("Reported "))


async def test_17_too_many_units_end_the_start_with_the_factor_needed() -> None:
    async with one_node_cluster("8xA100-80GB", gpu_strategy="share") as cluster:
        with pytest.raises(RequestError, match=r"use --memory-factor 327 or more"):
            async with cluster.running():
                pass


async def test_a_missing_driver_is_reported_and_found_without_a_restart() -> None:
    async with (
        one_node_cluster(None, rate=50) as cluster,
        cluster.running(registered=False) as agent,
    ):
        await until(lambda: "Install the NVIDIA driver" in (agent.watcher.unready_reason() or ""))
        assert cluster.reported == []
        agent.watcher.driver = SimulatedGpus(NodeName(NODE), "2xT4")
        await until(lambda: cluster.reported)

        assert agent.watcher.unready_reason() is None
        assert len(cluster.reported[-1].devices) == 2


async def test_an_agent_that_is_cut_off_from_the_api_server_is_unready_until_it_is_back() -> None:
    async with one_node_cluster(rate=100) as cluster:
        server = URL(cluster.api.url)
        proxy = TcpProxy(server.port or 0)
        await proxy.start()
        proxied = cluster.root / "proxied"
        text = cluster.api.kubeconfig.read_text()
        proxied.write_text(text.replace(cluster.api.url, str(server.with_port(proxy.port))))
        cluster.changes["kubeconfig"] = proxied
        async with cluster.running() as agent:
            unready_reason = agent.probes["api"]
            await until(lambda: unready_reason() is None)

            proxy.cut()
            reason = await until(unready_reason)
            proxy.heal()
            await until(lambda: unready_reason() is None)
        await proxy.close()

    assert "no response within 3 s" in reason


class ClockSetBack(SystemClock):
    """A clock that was set back by an hour."""

    def now(self) -> float:
        return super().now() - 3600


async def test_reports_stay_newer_than_those_before_when_the_clock_is_set_back() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        await until(lambda: cluster.reported)
        agent.clock = ClockSetBack()
        before = len(cluster.reported)
        await agent.resync([])
        await until(lambda: len(cluster.reported) > before)

        times = [report.reported_at for report in cluster.reported]

    assert times == sorted(set(times))
