"""A node whose GPUs are shared in five ways side by side, and pods that come and go there.

Each pod's limits are judged by what the simulated driver has, and HAMi-core's region, while the
container runs. The leases are made here, as the placer makes them: what holds a share is chosen by
the same function, from what the agent offers.
"""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.node_agent.memory_limits.build_hook import build_hook
from services.node_agent.service import NodeAgent
from shared.model.devices.device import Device
from shared.model.devices.enforcers import INSTANCE, WHOLE, HeldBy
from shared.model.leases.lease import MIB, Lease, Share
from simcluster.apimachinery.objects import Json
from simcluster.gpu_driver.control import control
from simcluster.kubelet.containers.container_spec import RUN_FOR
from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState
from simcluster.kubelet.programs.cgroups import VARIABLE
from simcluster.node_agent.driver import instances_in
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.mig import mig_share
from tests.support.node_agent.regions import limit_mib
from tests.support.simcluster.kubelet import FAST, pod
from tests.support.waiting import until

LAYOUT = "1xT4+1xT4+1xA100-40GB:mig+1xT4+1xT4"
KINDS = ("driver", "hami-core", "mig", "exclusive", "none")
"""By the index of the GPU."""
SLOTS = {"driver": 10, "hami-core": 10, "mig": 7, "exclusive": 1, "none": 10}
DEMANDS = {
    "driver": HeldBy(memory="driver"),
    "hami-core": HeldBy(memory="hami-core"),
    "none": HeldBy(memory="none", compute="none"),
}
ENDED = ("Succeeded", "Failed")
RUN_S = 2.0
LOOK_S = 0.25
LEASES = itertools.count(1)


@asynccontextmanager
async def limited_cluster(
    layout: str, hook: Path, accounting: str
) -> AsyncIterator[OneNodeCluster]:
    """Run an agent on a node whose driver limits memory; `hook` is where its hook is built."""
    build_hook(hook)
    settings = replace(FAST, cgroups=True)
    async with one_node_cluster(layout, settings=settings) as cluster:
        files = cluster.node.kubelet.files
        cluster.changes |= {
            "gpu_driver_dir": files.gpu_state.parent,
            "cgroup_root": files.cgroups,
            "proc_dir": files.proc,
            "limit_hook": hook,
            "device_list_strategy": ("cdi-cri",),
            "cdi_dir": files.cdi,
        }
        async with cluster.running():
            control(files.gpu_state, "accounting", accounting)
        async with cluster.running() as agent:
            await until(lambda: "driver" in agent.node.devices[0].offer.memory)
            yield cluster


def driver_limits(cluster: OneNodeCluster) -> dict[tuple[str, str], int]:
    """Return the hard limits that the driver has, in bytes, by GPU and cgroup."""
    limits = {}
    for row in control(cluster.node.kubelet.files.gpu_state, "limits").splitlines():
        words = row.split()
        if words[0] == "limit":
            limits[words[1], words[2]] = int(words[words.index("hard") + 1])
    return limits


@asynccontextmanager
async def mixed_node(hook: Path, accounting: str) -> AsyncIterator["MixedNode"]:
    async with limited_cluster(LAYOUT, hook, accounting) as cluster:
        assert cluster.agent is not None
        yield MixedNode(cluster, cluster.agent)


@dataclass
class MixedNode:
    cluster: OneNodeCluster
    agent: NodeAgent
    free: dict[str, set[int]] = field(
        default_factory=lambda: {kind: set(range(count)) for kind, count in SLOTS.items()}
    )
    running: dict[str, Lease] = field(default_factory=dict)
    judged: dict[str, str] = field(default_factory=dict)
    """The kind of each pod whose limits were judged, by its name."""
    wrong: list[str] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)

    async def run(self, pods: int, *, per_minute: float, seed: int = 0) -> None:
        """Run so many pods, one after the other at a rate, and judge them until all have ended."""
        chance = random.Random(seed)  # noqa: S311 - the same pods each time
        judging = asyncio.create_task(self._judge_again())
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(pods):
                    await asyncio.sleep(began + number * 60 / per_minute - time.monotonic())
                    kind = await until(lambda: self._free_kind(chance))
                    slot = self.free[kind].pop()
                    group.create_task(self._run_pod(f"{kind}-{number}", kind, slot, chance))
        finally:
            judging.cancel()
            await asyncio.gather(judging, return_exceptions=True)

    def _free_kind(self, chance: random.Random) -> str:
        free = [kind for kind in KINDS if self.free[kind]]
        return chance.choice(free) if free else ""

    async def _run_pod(self, name: str, kind: str, slot: int, chance: random.Random) -> None:
        spec = pod(
            name,
            limits={NUMBER: 1},
            annotations={RUN_FOR: f"{RUN_S:g}s"},
            restartPolicy="Never",
        )
        began = time.monotonic()
        lease = self.cluster.bind(spec, self._share(kind, slot, chance.randrange(100, 1_500)))
        self.running[name] = lease
        await self._reached(name, "Running", *ENDED)
        self.start_s.append(time.monotonic() - began)
        status = await self._reached(name, *ENDED)
        if status["phase"] == "Failed":
            self.wrong.append(f"{name} failed: {status}")
        del self.running[name]
        await self.cluster.delete_pod(name)
        await self.cluster.release(lease)
        self.free[kind].add(slot)

    async def _reached(self, name: str, *phases: str) -> Json:
        status: Json = await until(
            lambda: self.cluster.node.pod(name)["status"],
            lambda status: status.get("phase") in phases,
        )
        return status

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

    # What the driver has

    async def _judge_again(self) -> None:
        while True:
            await self.judge()
            await asyncio.sleep(LOOK_S)

    async def judge(self) -> None:
        """Compare containers that run before and after the driver's state is read."""
        before = dict(self._containers())
        files = self.cluster.node.kubelet.files
        limits = await asyncio.to_thread(driver_limits, self.cluster)
        instances = await asyncio.to_thread(instances_in, files.gpu_state.parent)
        after = dict(self._containers())
        for name, lease in before.items():
            container = self._container(name)
            if name in after and container is not None:
                self.wrong += self._differences(name, lease, container, limits, instances)
                self.judged[name] = name.rpartition("-")[0]

    def _containers(self) -> Iterator[tuple[str, Lease]]:
        for name, lease in self.running.items():
            container = self._container(name)
            if container is not None and container.phase is ContainerPhase.RUNNING:
                yield name, lease

    def _container(self, name: str) -> ContainerState | None:
        state = self.cluster.node.kubelet.state_of("default", name)
        return state.containers["main"] if state else None

    def _differences(
        self,
        name: str,
        lease: Lease,
        container: ContainerState,
        limits: dict[tuple[str, str], int],
        instances: dict[str, str],
    ) -> Iterator[str]:
        (held,) = lease.shares
        own = container.env[VARIABLE]
        places = {own, str(Path(own).parent)}
        held_bytes = {key: amount for key, amount in limits.items() if key[1] in places}
        wanted = {}
        if held.memory == "driver":
            wanted = {(held.device, place): held.memory_mib * MIB for place in places}
        if held_bytes != wanted:
            yield f"{name}: the driver has {held_bytes} instead of {wanted}"
        if "hami-core" in (held.memory, held.compute):
            in_region = limit_mib(self.cluster.region_of(lease))
            if in_region != held.memory_mib:
                yield f"{name}: the region has {in_region} instead of {held.memory_mib} MiB"
        if held.mig is not None:
            profiles = [instances.get(uuid) for uuid in container.gpus]
            if profiles != [held.mig.profile]:
                yield f"{name}: it has {container.gpus} instead of an instance {held.mig.profile}"
        elif container.gpus != [held.device]:
            yield f"{name}: it has {container.gpus} instead of GPU {held.device}"
