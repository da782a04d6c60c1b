"""Pods of many containers, cards of many slots, and things in the way of sockets."""

import shutil

from services.node_agent.gpus.simulated.gpus import uuid_of
from shared.model.names import NodeName
from tests.support.node_agent.agent import NUMBER, share, site
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until


async def test_each_of_twenty_containers_of_one_pod_gets_its_own_limits() -> None:
    names = [f"c{n}" for n in range(20)]
    async with site("2xA100-80GB") as at, at.running():
        at.bind(
            pod("many", containers=[container(name, limits={NUMBER: 1}) for name in names]),
            *(
                share(n % 2, 1000 + n, container=name, slot=n // 2, fence=n + 1, cores_percent=1)
                for n, name in enumerate(names)
            ),
        )
        await at.node.phase("many", "Running")
        given = [at.env("many", name)["CUDA_DEVICE_MEMORY_LIMIT_0"] for name in names]

    assert given == [f"{1000 + n}m" for n in range(20)]


async def test_a_card_may_have_two_thousand_slots() -> None:
    async with site("2xT4", device_split_count=2000) as at, at.running() as agent:
        at.bind(pod("last", limits={NUMBER: 1}), share(1, 1000, slot=1999))
        await at.node.phase("last", "Running")
        held = await at.node.allocated_devices()

        assert len(agent.state.shown.served[NUMBER]) == 4000
        assert held["last", "main"] == {f"{uuid_of(NodeName(NODE), 1)}-1999"}


async def test_a_directory_where_the_kubelets_socket_was_is_waited_out() -> None:
    async with site() as at, at.running() as agent:
        socket = at.node.kubelet.files.root / "device-plugins" / "kubelet.sock"
        aside = socket.with_name("aside.sock")
        socket.rename(aside)
        socket.mkdir()
        await until(lambda: agent.plugins.unready_reason() is not None)
        shutil.rmtree(socket)
        aside.rename(socket)
        await until(lambda: agent.plugins.unready_reason() is None, limit_s=30)
        await at.node.allocatable(NUMBER, 20)
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
