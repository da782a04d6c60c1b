"""Without the kubelet's pod list, pods are resolved by their requests and never guessed."""

import asyncio

from msgspec import structs

from services.node_agent.allocate.admission_window import WINDOW_FULL
from shared.model.leases.lease import LeaseState
from shared.model.names import PodUid
from tests.support.binder.node_binder import Binder, post, reserve
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.simcluster.kubelet import container, pod
from tests.support.waiting import until

UNREADABLE = "the kubelet's list of pods cannot be read"


def set_permissions(cluster: OneNodeCluster, *allowed: str) -> None:
    cluster.node.kubelet.endpoint.allowed_resources = set(allowed)


async def test_equal_pods_are_bound_one_by_one_and_each_gets_its_own_limits() -> None:
    async with one_node_cluster("4xA100-80GB") as cluster:
        set_permissions(cluster)
        async with cluster.running():
            binder = Binder(cluster)
            await until(lambda: cluster.reported and cluster.reported[-1].pods_unreadable)
            async with asyncio.TaskGroup() as group:
                for n in range(8):
                    part = share(n % 4, 1000 + n, slot=n // 4, fence=n // 4 + 1)
                    group.create_task(binder.bind(reserve(cluster, n, part)))
            for n in range(8):
                await cluster.node.phase(f"p{n}", "Running")
            limits = [cluster.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] for n in range(8)]

        assert limits == [f"{1000 + n}m" for n in range(8)]
        assert not cluster.refused
        assert any(why.startswith(WINDOW_FULL) and UNREADABLE in why for why in binder.waits)


async def test_a_pod_without_a_lease_does_not_get_the_lease_of_an_equal_pod() -> None:
    async with one_node_cluster() as cluster:
        set_permissions(cluster)
        async with cluster.running():
            lease = reserve(cluster, 0, share(0, 1000))
            await cluster.push_lease(
                cluster.ledger.grant(structs.replace(lease, state=LeaseState.BOUND, version=2))
            )
            cluster.node.create(pod("stray", limits={NUMBER: 1}))
            await cluster.node.phase("stray", "Failed")
            text = cluster.message("stray")
            post(cluster, "p0")
            await cluster.node.phase("p0", "Running")

        assert UNREADABLE in text
        assert not cluster.annotation("stray", "volcano.sh/bind-phase")


async def test_containers_of_one_pod_are_resolved_by_their_order_and_its_lease_is_requested() -> (
    None
):
    init = container("first", limits={NUMBER: 1}, restartPolicy="Always")
    names = ["first", "a", "b"]
    apps = [container(name, limits={NUMBER: 1}) for name in names[1:]]
    async with one_node_cluster() as cluster:
        set_permissions(cluster)
        async with cluster.running():
            parts = [share(0, 1000 + n, container=c, slot=n) for n, c in enumerate(names)]
            obj = pod("p0", containers=apps, initContainers=[init])
            cluster.bind(obj, *parts, lease_known=False)
            await cluster.node.phase("p0", "Running")

        for n, name in enumerate(names):
            assert cluster.env("p0", name)["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"


async def test_the_pod_list_is_read_again_once_either_permission_is_granted() -> None:
    async with one_node_cluster(rate=50) as cluster, cluster.running() as agent:
        for right in ("nodes/pods", "nodes/proxy"):
            set_permissions(cluster)
            await until(lambda: cluster.reported and cluster.reported[-1].pods_unreadable)
            reason = agent.pods.unreadable_reason
            set_permissions(cluster, right)
            await until(lambda: not cluster.reported[-1].pods_unreadable)

            assert "Forbidden" in reason
            assert "grant the agent's account" in reason


async def test_a_kubelet_restart_does_not_make_the_pod_list_unreadable() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        await cluster.node.kubelet.restart()
        await until(lambda: agent.plugins.unready_reason() is None)
        await agent.pods.list_pods()

        assert not agent.pods.unreadable_reason


async def test_a_deleted_pods_termination_is_reported_without_the_pod_list() -> None:
    async with one_node_cluster(proc_dir=None) as cluster:
        cluster.changes["proc_dir"] = cluster.root / "proc"
        set_permissions(cluster)
        async with cluster.running():
            lease = await cluster.run_pod("one", share(0, 1000))
            running = await cluster.terminated(lease.pod)
            deleted_pod = PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")
            cgroup = cluster.root / "proc" / "17" / "cgroup"
            cgroup.parent.mkdir(parents=True)
            cgroup.write_text(f"0::/kubepods/pod{deleted_pod}/{'a' * 64}\n")
            with_process = await cluster.terminated(deleted_pod)
            cgroup.unlink()
            without_process = await cluster.terminated(deleted_pod)

    assert (running, with_process, without_process) == (False, False, True)
