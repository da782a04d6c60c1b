"""The agent and devices in MIG mode, beside a simulated kubelet and simulated NVML."""

import pytest
from msgspec import structs

from services.node_agent.kubelet.pod_list import KubeletPods
from shared.model.errors import RequestError
from shared.model.lease import MigPlacement
from shared.model.names import PodUid
from simcluster.kubelet.containers.container_spec import RUN_FOR
from tests.support.node_agent.agent import NUMBER, one_node_cluster, share
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
    assert held["one", "main"] == {f"{GPU}-3"}


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
    assert a100.endswith("7,40960,NVIDIA-NVIDIA A100-SXM4-40GB,true,mig")
    assert rest == ""
    assert len(served) == 3 + 7, "an ID for every position"


async def test_both_modes_serve_pods_side_by_side() -> None:
    async with one_node_cluster("1xA100-40GB:mig+1xT4") as cluster, cluster.running():
        cluster.bind(pod("instance", limits={NUMBER: 1}), mig_share("group1", 6))
        cluster.bind(pod("share", limits={NUMBER: 1}), share(1, 2000))
        await cluster.node.phase("instance", "Running")
        await cluster.node.phase("share", "Running")

        assert cluster.env("share")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"
        assert cluster.env("instance")["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")


async def test_a_device_is_partitioned_before_the_first_allocate() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        created = cluster.node.create(pod("one", limits={NUMBER: 1}, node=None))["metadata"]
        cluster.bind(pod("other", limits={NUMBER: 1}, node=None), mig_share("group3"))
        await cluster.push_lease(next(iter(cluster.ledger.leases.values())))

        async def is_partitioned() -> bool:
            return len(await instances_by_start(cluster)) >= 2

        await until(is_partitioned)

        assert created["name"] == "one"
        assert {one.profile for one in (await instances_by_start(cluster)).values()} == {"3g.20gb"}


async def test_item_44_two_containers_and_two_pods_get_different_instances() -> None:
    both = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        cluster.bind(
            pod("one", containers=both),
            mig_share("group1", 0, container="a"),
            mig_share("group1", 1, container="b"),
        )
        cluster.bind(pod("two", limits={NUMBER: 1}), mig_share("group1", 2))
        for name in ("one", "two"):
            await cluster.node.phase(name, "Running")
        given = [cluster.env("one", "a"), cluster.env("one", "b"), cluster.env("two")]
        instances = await instances_by_start(cluster)

    uuids = [env["NVIDIA_VISIBLE_DEVICES"] for env in given]
    assert uuids == [instances[start].uuid for start in range(3)]


async def test_item_44_seven_pods_at_once_each_get_an_instance_of_their_own() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        for n in range(7):
            obj = pod(f"p{n}", limits={NUMBER: 1})
            cluster.bind(obj, mig_share("group1", n, fence=n + 1), lease_known=n % 2 == 0)
        for n in range(7):
            await cluster.node.phase(f"p{n}", "Running")
        instances = await instances_by_start(cluster)

        given = [cluster.env(f"p{n}")["NVIDIA_VISIBLE_DEVICES"] for n in range(7)]
        assert given == [instances[n].uuid for n in range(7)]
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
        await end_pod(cluster, first)
        stale += [first.pod] * 3
        await cluster.run_pod("two", mig_share("group1", 0, fence=2))

        assert not cluster.refused
        assert not stale


async def test_a_lease_with_a_removed_layout_is_refused() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running() as agent:
        lease = mig_share("group2", 1)
        gone = structs.replace(lease, mig=MigPlacement(layout="old", position=1, profile="2g.10gb"))
        await cluster.fail_pod("one", gone)
        message = cluster.message("one")
        other = structs.replace(
            lease, mig=MigPlacement(layout="group2", position=3, profile="2g.10gb")
        )
        held = cluster.ledger.leases[next(iter(cluster.ledger.leases))]

        changed = structs.replace(held, shares=(other,))
        with pytest.raises(RequestError, match="were the layouts changed"):
            await agent.mig.instance_uuids(changed, "main")

    assert "layout old" in message
    assert await instances_by_start(cluster) == {}


async def test_an_older_lease_with_another_layout_is_refused() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        await cluster.run_pod("new", mig_share("group1", fence=5))
        await cluster.fail_pod("old", mig_share("group4", fence=4))

        assert "laid out as group1" in cluster.message("old")


async def test_a_newer_lease_that_the_ledger_has_lost_is_no_reason_to_refuse_another() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        unbound = pod("lost", limits={NUMBER: 1}, node=None)
        lost = cluster.bind(unbound, mig_share("group1", fence=5))
        del cluster.ledger.leases[lost.pod]

        cluster.bind(pod("next", limits={NUMBER: 1}), mig_share("group4", fence=4))

        await cluster.node.phase("next", "Running")


async def test_a_lease_for_the_other_device_mode_is_refused() -> None:
    async with one_node_cluster("1xA100-40GB:mig+1xT4") as cluster, cluster.running():
        await cluster.fail_pod("one", share(0, 2000))
        await cluster.fail_pod("two", mig_share("group1", index=1))

        assert "in mig mode, and the lease is for a part of it" in cluster.message("one")
        assert "which does not have it (its layouts: none)" in cluster.message("two")


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
