"""Pods that come and go on a node whose GPUs are held in several ways, and what judges them.

Each pod's limits are judged by what the simulated driver has, and HAMi-core's region, while the
container runs.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.model.leases.lease import MIB, Lease
from simcluster.apimachinery.objects import Json
from simcluster.gpu_driver.control import control
from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState
from simcluster.kubelet.programs.cgroups import VARIABLE
from simcluster.node_agent.driver import instances_in
from tests.support.node_agent.regions import limit_mib
from tests.support.simcluster.kubelet import Node
from tests.support.waiting import until

LAYOUT = "1xT4+1xT4+1xA100-40GB:mig+1xT4+1xT4"
KINDS = ("driver", "hami-core", "mig", "exclusive", "none")
"""By the index of the GPU."""
SLOTS = {"driver": 10, "hami-core": 10, "mig": 7, "exclusive": 1, "none": 10}
RUN_S = 2.0
LOOK_S = 0.25
ENDED = ("Succeeded", "Failed")


def driver_limits(gpu_state: Path) -> dict[tuple[str, str], int]:
    """Return the hard limits that the driver has, in bytes, by GPU and cgroup."""
    limits = {}
    for row in control(gpu_state, "limits").splitlines():
        words = row.split()
        if words[0] == "limit":
            limits[words[1], words[2]] = int(words[words.index("hard") + 1])
    return limits


@dataclass(kw_only=True)
class JudgedNode(ABC):
    """A subclass runs a pod, and says which lease it has."""

    node: Node
    state_dir: Path
    """The agent's."""
    free: dict[str, set[int]] = field(
        default_factory=lambda: {kind: set(range(count)) for kind, count in SLOTS.items()}
    )
    running: dict[str, Lease] = field(default_factory=dict)
    """Leases of pods that have not ended, by the pod's name."""
    judged: dict[str, str] = field(default_factory=dict)
    """The kind of each pod whose limits were judged, by its name."""
    wrong: list[str] = field(default_factory=list)
    start_s: dict[str, float] = field(default_factory=dict)
    """From the creation of a pod until it ran, by its name."""
    lasted_s: float = 0.0
    """From the start until the last pod ran."""

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
                    memory_mib = chance.randrange(100, 1_500)
                    group.create_task(self._run_pod(f"{kind}-{number}", kind, slot, memory_mib))
                await until(lambda: len(self.start_s) == pods)
                self.lasted_s = time.monotonic() - began
        finally:
            judging.cancel()
            await asyncio.gather(judging, return_exceptions=True)

    def _free_kind(self, chance: random.Random) -> str:
        free = [kind for kind in KINDS if self.free[kind]]
        return chance.choice(free) if free else ""

    async def _run_pod(self, name: str, kind: str, slot: int, memory_mib: int) -> None:
        began = time.monotonic()
        await self.create(name, kind, slot, memory_mib)
        await self.reached(name, "Running", *ENDED)
        self.start_s[name] = time.monotonic() - began
        status = await self.reached(name, *ENDED)
        if status["phase"] == "Failed":
            self.wrong.append(f"{name} failed: {status}")
        await self.remove(name)
        self.free[kind].add(slot)

    @abstractmethod
    async def create(self, name: str, kind: str, slot: int, memory_mib: int) -> None:
        """Create a pod that ends by itself after `RUN_S`."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Delete a pod that has ended."""

    async def reached(self, name: str, *phases: str) -> Json:
        status: Json = await until(
            lambda: self.node.pod(name)["status"],
            lambda status: status.get("phase") in phases,
        )
        return status

    async def _judge_again(self) -> None:
        while True:
            await self.judge()
            await asyncio.sleep(LOOK_S)

    async def judge(self) -> None:
        """Compare containers that run before and after the driver's state is read."""
        before = dict(self._containers())
        gpu_state = self.node.kubelet.files.gpu_state
        limits = await asyncio.to_thread(driver_limits, gpu_state)
        instances = await asyncio.to_thread(instances_in, gpu_state.parent)
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
        state = self.node.kubelet.state_of("default", name)
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
        if held.memory != name.rpartition("-")[0]:
            yield f"{name}: its lease says that {held.memory} holds its memory"
        own = container.env[VARIABLE]
        places = {own, str(Path(own).parent)}
        held_bytes = {key: amount for key, amount in limits.items() if key[1] in places}
        wanted = {}
        if held.memory == "driver":
            wanted = {(held.device, place): held.memory_mib * MIB for place in places}
        if held_bytes != wanted:
            yield f"{name}: the driver has {held_bytes} instead of {wanted}"
        if "hami-core" in (held.memory, held.compute):
            in_region = limit_mib(self._region(lease, container))
            if in_region != held.memory_mib:
                yield f"{name}: the region has {in_region} instead of {held.memory_mib} MiB"
        if held.mig is not None:
            profiles = [instances.get(uuid) for uuid in container.gpus]
            if profiles != [held.mig.profile]:
                yield f"{name}: it has {container.gpus} instead of an instance {held.mig.profile}"
        elif container.gpus != [held.device]:
            yield f"{name}: it has {container.gpus} instead of GPU {held.device}"

    def _region(self, lease: Lease, container: ContainerState) -> Path:
        name = Path(container.env["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).name
        return self.state_dir / "containers" / f"{lease.pod}_main" / name
