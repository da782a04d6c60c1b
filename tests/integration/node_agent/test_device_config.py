"""The agent and Volcano's ConfigMaps, at a simulated API server."""

import json

from shared.model.events.node_events import DeviceReported
from tests.support.node_agent.agent import NUMBER, one_node_cluster
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until


async def test_config_maps_of_the_cluster_divide_the_node() -> None:
    async with one_node_cluster("2xA100-40GB:mig") as cluster:
        text = (
            "nvidia:\n  deviceSplitCount: 4\n  gpuMemoryFactor: 10\n  knownMigGeometries:\n"
            "  - models: [A100]\n    allowedGeometries:\n"
            "    - {group: half, geometries: [{name: 3g.20gb, memory: 20480, count: 2}]}\n"
        )
        own = {
            "nodeconfig": [{"name": NODE, "devicesplitcount": 2, "filterdevices": {"index": [1]}}]
        }
        for name, key, document in (
            ("volcano-vgpu-device-config", "device-config.yaml", text),
            ("volcano-vgpu-node-config", "config.json", json.dumps(own)),
        ):
            metadata = {"name": name, "namespace": "kube-system"}
            cluster.node.store.create("configmaps", {"metadata": metadata, "data": {key: document}})
        async with cluster.running() as agent:
            (device,) = agent.node.devices

            assert [layout.name for layout in device.layouts] == ["half"]
            assert (device.slots, device.unit_mib) == (2, 10)
            assert len(agent.node.shown.served[NUMBER]) == 2


async def test_one_report_has_the_errors_of_an_invalid_config_map() -> None:
    async with one_node_cluster("1xA100-40GB") as cluster:
        metadata = {"name": "volcano-vgpu-node-config", "namespace": "kube-system"}
        data = {"config.json": '{"nodeconfig": [{"name": "n", "name": "n"}]}'}
        cluster.node.store.create("configmaps", {"metadata": metadata, "data": data})
        async with cluster.running() as agent:
            await until(lambda: cluster.events_of(DeviceReported))
            agent.node.report_due.set()
            first, *later = await until(
                lambda: cluster.events_of(DeviceReported), lambda reports: len(reports) > 1
            )

    assert "config.json is ignored" in first.config_errors
    assert "the key 'name' is there twice" in first.config_errors
    assert not any(report.config_errors for report in later)
