"""A node whose GPUs are shared in five ways side by side, with an agent in this process.

The leases are made here, as the placer makes them: what holds a share is chosen by the same
function, from what the agent offers.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.node_agent.memory_limits.build_hook import build_hook
from services.node_agent.service import NodeAgent
from shared.model.devices.device import Device
from shared.model.devices.enforcers import INSTANCE, WHOLE, HeldBy
from shared.model.leases.lease import Share
from simcluster.gpu_driver.control import control
from simcluster.kubelet.containers.container_spec import RUN_FOR
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.judged_node import KINDS, LAYOUT, RUN_S, JudgedNode
from tests.support.node_agent.mig import mig_share
from tests.support.simcluster.kubelet import FAST, pod
from tests.support.waiting import until

DEMANDS = {
    "driver": HeldBy(memory="driver"),
    "hami-core": HeldBy(memory="hami-core"),
    "none": HeldBy(memory="none", compute="none"),
}
LEASES = itertools.count(1)


@asynccontextmanager
async def cluster_with_driver(layout: str, hook: Path) -> AsyncIterator[OneNodeCluster]:
    """Yield a node for agents whose GPUs have the driver in C, and a hook for its limits."""
    build_hook(hook)
    async with one_node_cluster(layout, settings=replace(FAST, cgroups=True)) as cluster:
        files = cluster.node.kubelet.files
        cluster.changes |= {
            "gpu_driver_dir": files.gpu_state.parent,
            "cgroup_root": files.cgroups,
            "proc_dir": files.proc,
            "limit_hook": hook,
            "device_list_strategy": ("cdi-cri",),
            "cdi_dir": files.cdi,
        }
        yield cluster


@asynccontextmanager
async def limited_cluster(
    layout: str, hook: Path, accounting: str
) -> AsyncIterator[OneNodeCluster]:
    """Run an agent on a node whose driver limits memory; `hook` is where its hook is built."""
    async with cluster_with_driver(layout, hook) as cluster:
        async with cluster.running():
            control(cluster.node.kubelet.files.gpu_state, "accounting", accounting)
        async with cluster.running() as agent:
            await until(lambda: "driver" in agent.node.devices[0].offer.memory)
            yield cluster


@asynccontextmanager
async def mixed_node(hook: Path, accounting: str) -> AsyncIterator["MixedNode"]:
    async with limited_cluster(LAYOUT, hook, accounting) as cluster:
        assert cluster.agent is not None
        state_dir = cluster.settings.state_dir
        yield MixedNode(
            node=cluster.node, state_dir=state_dir, cluster=cluster, agent=cluster.agent
        )


@dataclass(kw_only=True)
class MixedNode(JudgedNode):
    cluster: OneNodeCluster
    agent: NodeAgent

    async def create(self, name: str, kind: str, slot: int, memory_mib: int) -> None:
        spec = pod(
            name,
            limits={NUMBER: 1},
            annotations={RUN_FOR: f"{RUN_S:g}s"},
            restartPolicy="Never",
        )
        self.running[name] = self.cluster.bind(spec, self._share(kind, slot, memory_mib))

    async def remove(self, name: str) -> None:
        lease = self.running.pop(name)
        await self.cluster.delete_pod(name)
        await self.cluster.release(lease)

    def _share(self, kind: str, slot: int, memory_mib: int) -> Share:
        index = KINDS.index(kind)
        device = self._device(index)
        facts: dict[str, Any] = {"device": device.uuid, "slot": slot, "fence": next(LEASES)}
        if kind == "mig":
            return mig_share("group1", slot, index=index, **facts, **INSTANCE._asdict())
        if kind == "exclusive":
            facts |= WHOLE._asdict() | {"whole": True, "cores_percent": 100}
            return share(index, device.memory_mib, **facts)
        cores = 10 if kind == "hami-core" else 0
        holding = device.offer.holding(DEMANDS[kind], mode="", capped=cores > 0)
        assert holding is not None, (kind, device.offer, device.missing)
        return share(index, memory_mib, cores_percent=cores, **facts, **holding._asdict())

    def _device(self, index: int) -> Device:
        (device,) = (device for device in self.agent.node.devices if device.index == index)
        return device
