"""The agent and devices in MIG mode, beside a simulated kubelet and simulated NVML."""

import pytest

from services.node_agent.kubelet.pod_list import KubeletPods
from shared.model.names import PodUid
from simcluster.kubelet.containers.container_spec import RUN_FOR
from tests.support.node_agent.agent import NUMBER, one_node_cluster
from tests.support.node_agent.mig import (
    GPU,
    PHASE,
    end_pod,
    hardware,
    instances_by_start,
    mig_share,
    plugin_variables,
)
from tests.support.simcluster.kubelet import container, pod
from tests.support.waiting import until

SWITCHES = {"NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}
REGISTER = "volcano.sh/node-vgpu-register"


async def test_item_45_a_container_gets_only_its_instance_and_the_switches() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        await cluster.run_pod("one", mig_share("group2", 3))
        state = cluster.node.container("one")
        await until(lambda: cluster.annotation("one", PHASE) == "success")
        held = await cluster.node.allocated_devices()
        instances = await instances_by_start(cluster)

    assert {start: one.profile for start, one in instances.items()} == {
        0: "2g.10gb", 2: "2g.10gb", 4: "2g.10gb", 6: "1g.5gb"
    }  # fmt: skip
    assert plugin_variables(state.env) == {"NVIDIA_VISIBLE_DEVICES": instances[6].uuid, **SWITCHES}
    assert state.mounts == []
    assert held["one", "main"] == {f"{GPU}::3"}


async def test_the_register_annotation_has_the_mode_of_each_device() -> None:
    async with (
        one_node_cluster("1xT4+1xA100-40GB:mig", device_split_count=3) as cluster,
        cluster.running() as agent,
    ):
        await until(lambda: cluster.node.node()["metadata"]["annotations"].get(REGISTER))
        text = cluster.node.node()["metadata"]["annotations"][REGISTER]
        served = list(agent.node.shown.served[NUMBER])

    t4, a100, rest = text.split(":")
    assert t4.endswith("3,15360,NVIDIA-Tesla T4,true,hami-core")
    assert a100.endswith("7,40960,NVIDIA A100-SXM4-40GB,true,mig")
    assert rest == ""
    assert len(served) == 3 + 7, "an ID for every position"


async def test_a_device_is_partitioned_before_the_first_allocate() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        lease = cluster.bind(pod("one", limits={NUMBER: 1}, node=None), mig_share("group3"))
        await cluster.push_lease(lease)

        async def is_partitioned() -> bool:
            instances = await instances_by_start(cluster)
            return [one.profile for one in instances.values()] == ["3g.20gb", "3g.20gb"]

        await until(is_partitioned)


async def test_item_44_seven_containers_at_once_each_get_an_instance_of_their_own() -> None:
    both = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        cluster.bind(
            pod("p0", containers=both),
            mig_share("group1", 0, container="a"),
            mig_share("group1", 1, container="b"),
        )
        for n in range(2, 7):
            obj = pod(f"p{n}", limits={NUMBER: 1})
            cluster.bind(obj, mig_share("group1", n, fence=n + 1), lease_known=n % 2 == 0)
        names = ["p0", *(f"p{n}" for n in range(2, 7))]
        for name in names:
            await cluster.node.phase(name, "Running")
        instances = await instances_by_start(cluster)

        given = [
            cluster.env("p0", "a"),
            *(cluster.env(n, "b" if n == "p0" else "main") for n in names),
        ]
        uuids = [env["NVIDIA_VISIBLE_DEVICES"] for env in given]
        assert uuids == [instances[start].uuid for start in range(7)]
        assert not cluster.refused


async def test_an_instance_of_a_running_pod_is_not_allocated_again() -> None:
    async with one_node_cluster("1xA100-40GB:mig", rate=16) as cluster, cluster.running():
        await cluster.run_pod("one", mig_share("group1", 0))
        await cluster.fail_pod("two", mig_share("group1", 0, fence=2))

        assert "is in use by pod default/one" in cluster.message("two")


async def test_an_instance_is_reused_as_soon_as_its_pod_is_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale: set[PodUid] = set()

    async def running(_: KubeletPods) -> frozenset[PodUid]:
        return frozenset(stale)

    monkeypatch.setattr(KubeletPods, "list_running", running)
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        short = pod("one", limits={NUMBER: 1}, annotations={RUN_FOR: "50ms"}, restartPolicy="Never")
        first = cluster.bind(short, mig_share("group1", 0))
        stale.add(first.pod)
        await cluster.node.phase("one", "Succeeded")
        await cluster.run_pod("two", mig_share("group1", 0, fence=2))

        assert not cluster.refused


async def test_an_instance_is_reused_only_after_the_containers_of_a_deleted_pod_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale: list[PodUid] = []

    async def running(_: KubeletPods) -> frozenset[PodUid]:
        return frozenset([stale.pop()] if stale else [])

    monkeypatch.setattr(KubeletPods, "list_running", running)
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        first = await cluster.run_pod("one", mig_share("group1", 0))
        stale += [first.pod] * 3
        await end_pod(cluster, first)
        await cluster.run_pod("two", mig_share("group1", 0, fence=2))

        assert not cluster.refused
        assert not stale


async def test_an_older_lease_with_another_layout_is_refused() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        await cluster.run_pod("new", mig_share("group1", fence=5))
        await cluster.fail_pod("old", mig_share("group4", fence=4))

        assert "of layout group1" in cluster.message("old")


async def test_a_newer_lease_that_the_ledger_has_lost_is_no_reason_to_refuse_another() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        unbound = pod("lost", limits={NUMBER: 1}, node=None)
        lost = cluster.bind(unbound, mig_share("group1", fence=5))
        del cluster.ledger.leases[lost.pod]

        cluster.bind(pod("next", limits={NUMBER: 1}), mig_share("group4", fence=4))

        await cluster.node.phase("next", "Running")


async def test_without_partitioning_the_existing_instances_are_served() -> None:
    async with one_node_cluster("1xA100-40GB:mig", partition=False) as cluster:
        mig = hardware(cluster).mig
        for start in (0, 4):
            mig.create_compute(GPU, mig.create_instance(GPU, 9, start))
        async with cluster.running() as agent:
            names = [layout.name for layout in agent.node.devices[0].layouts]
            await cluster.run_pod("one", mig_share("group3", 1))
            await cluster.fail_pod("two", mig_share("group1", fence=2))

            assert names == ["group3"]
            assert len(await instances_by_start(cluster)) == 2
            assert cluster.node.pod("one")["status"]["phase"] == "Running"
