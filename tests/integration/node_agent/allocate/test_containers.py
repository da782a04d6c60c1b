"""Init containers, sidecars, restarts, many slots: what containers get, and when they start."""

import shutil

from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.support.node_agent.agent import NUMBER, one_node_cluster, share
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until

GPU = "nvidia.com/gpu"
CRASHING = {"sim.leasehold.dev/run-for": "1500ms", "sim.leasehold.dev/exit-code": "3"}


def limit(env: dict[str, str]) -> str:
    return env["CUDA_DEVICE_MEMORY_LIMIT_0"]


async def test_hami_core_29_an_app_container_reuses_the_slot_of_an_init_container() -> None:
    first = container("first", limits={GPU: 1})
    async with one_node_cluster() as cluster, cluster.running():
        cluster.bind(
            pod("one", limits={GPU: 1}, initContainers=[first]),
            share(0, 500, container="first", init=True, slot=0),
            share(1, 3000, slot=4),
            dialect="nvidia",
        )
        await cluster.node.phase("one", "Running")
        activated = await until(lambda: len(cluster.activated) == 2 and cluster.activated)

        assert limit(cluster.env("one", "first")) == "500m"
        assert limit(cluster.env("one")) == "3000m"
    assert activated[0].allocation.device_ids == activated[1].allocation.device_ids
    assert not cluster.refused


async def test_hami_core_30_a_sidecar_and_an_app_container_hold_devices_side_by_side() -> None:
    side = container("side", limits={GPU: 1}, restartPolicy="Always")
    first, second = (container(name, limits={GPU: 1}) for name in ("first", "second"))
    async with one_node_cluster() as cluster, cluster.running() as agent:
        lease = cluster.bind(
            pod("one", limits={GPU: 1}, initContainers=[first, side, second]),
            share(0, 400, container="first", init=True, slot=0),
            share(0, 500, container="side", slot=0),
            share(0, 600, container="second", init=True, slot=1),
            share(0, 3000, slot=1),
            dialect="nvidia",
        )
        await cluster.node.phase("one", "Running")
        held = await cluster.node.allocated_devices()
        env = {name: cluster.env("one", name) for name in ("first", "side", "second", "main")}
        ids = {each.allocation.container: each.allocation.device_ids for each in cluster.activated}
        writable = {
            name: {
                m.host_path for m in cluster.node.container("one", name).mounts if not m.read_only
            }
            for name in env
        }
        before = len(cluster.reported)
        agent.node.report_due.set()
        report = (await until(lambda: cluster.reported[before:]))[0]

    assert [each.pod for each in report.allocations] == [lease.pod]
    assert {name: limit(one) for name, one in env.items()} == {
        "first": "400m",
        "side": "500m",
        "second": "600m",
        "main": "3000m",
    }
    assert not held["one", "side"] & held["one", "main"]
    assert ids["first"] == ids["side"] != ids["second"] == ids["main"]
    assert len(set().union(*writable.values())) == sum(map(len, writable.values())) > len(env)
    assert not cluster.refused


async def test_a_container_that_restarts_while_the_agent_is_down_starts_once_it_is_back() -> None:
    async with one_node_cluster() as cluster:
        async with cluster.running():
            cluster.bind(pod("one", limits={NUMBER: 1}, annotations=CRASHING), share(0, 1000))
            await cluster.node.phase("one", "Running")
        state = cluster.node.container("one")
        first = state.started_at
        await until(lambda: "has been stopped" in state.message)
        assert state.started_at == first
        async with cluster.running():
            await until(lambda: cluster.node.container("one").started_at > first)

            assert limit(cluster.env("one")) == "1000m"
            assert not cluster.refused


async def test_a_gpu_may_have_2000_slots() -> None:
    async with (
        one_node_cluster("2xT4", device_split_count=2000) as cluster,
        cluster.running() as agent,
    ):
        await cluster.run_pod("last", share(1, 1000, slot=1999))
        held = await cluster.node.allocated_devices()

        assert len(agent.node.shown.served[NUMBER]) == 4000
        assert held["last", "main"] == {f"{uuid_of(NodeName(NODE), 1)}::1999"}


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
