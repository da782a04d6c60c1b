"""The stack of a night: `leasehold up` whose parts can be held, slowed, kept away, or lied to."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio

from services.node_agent.isolation.library import simulated_library
from shared.model.errors import LeaseholdError
from shared.model.names import NodeName
from simcluster.node_agent.gpus import uuid_of
from tests.campaign.stack.clocks import Clocks
from tests.support.stack import PODS, Done, Stack, gpu_pod, stack, vgpu
from tests.support.waiting import until

NODES = ("node-0", "node-1")
GPUS = 6
LAYOUT = f"{GPUS}xT4"
KILL_S = 0.2
CERTIFICATE_S = 4000 * 86400.0
"""Longer than a certificate is valid."""
COMMAND_S = 40.0
DISK_MIB = 64
"""Of the agent of the first node."""
CLOCKS = ("valkey-server", "webhook", *(f"agent-{node}" for node in NODES))
"""Parts whose clocks can be shifted."""
USE_UUIDS = "volcano.sh/vgpu-use-gpuuuid"
RUNS = "runs"
WAITS = "waits"


@dataclass(slots=True)
class Night:
    """A running stack, and what is done to it."""

    up: Stack
    clocks: Clocks
    gpu: str = "node-0/0"
    """Where both pods want to run, and which GPU the faults of GPUs are of."""
    has_small_disk: bool = False
    older: Path | None = None
    patience: float = 1.0
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def node(self) -> str:
        return self.gpu.partition("/")[0]

    @property
    def index(self) -> str:
        return self.gpu.partition("/")[2]

    # Processes

    def signal(self, part: str, number: signal.Signals) -> None:
        """Send a signal to a part, if it has a process."""
        with contextlib.suppress(ProcessLookupError, TypeError, StopIteration):
            os.kill(self.up.pid(part), number)

    def hold(self, *parts: str) -> None:
        """Stop processes, which keep their connections and reply to nothing."""
        for part in parts:
            self.signal(part, signal.SIGSTOP)

    def go_on(self, *parts: str) -> None:
        for part in parts:
            self.signal(part, signal.SIGCONT)

    def keep_away(self, *parts: str) -> None:
        """Kill parts again as often as they are started."""

        async def kill_forever() -> None:
            while True:
                for part in parts:
                    self.signal(part, signal.SIGKILL)
                await asyncio.sleep(KILL_S)

        self.begin("away", kill_forever())

    def slow_down(self, part: str, *, still_s: float, works_s: float) -> None:
        """Have a process work for a part of the time only."""

        async def alternate() -> None:
            try:
                while True:
                    self.hold(part)
                    await asyncio.sleep(still_s)
                    self.go_on(part)
                    await asyncio.sleep(works_s)
            finally:
                self.go_on(part)

        self.begin("slow", alternate())

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(work)

    async def end(self, *names: str) -> None:
        for name in names:
            task = self._tasks.pop(name)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # Redis

    async def redis(self, *command: str) -> Any:
        """Send a command as the administrator."""
        url = self.up.state()["redis_url"]
        async with redis.asyncio.Redis.from_url(url, **self.up.login()) as client:
            return await client.execute_command(*command)

    def save_redis(self) -> None:
        store = self.up.root / "valkey"
        self.older = store / "older"
        shutil.rmtree(self.older, ignore_errors=True)
        shutil.copytree(store / "appendonlydir", self.older)

    def roll_back_redis(self) -> None:
        """Have the server start again with the older file."""
        assert self.older is not None
        store = self.up.root / "valkey"
        (store / "appendonlydir").rename(store / f"newer-{time.time_ns()}")
        self.older.rename(store / "appendonlydir")
        self.signal("valkey", signal.SIGKILL)

    # The webhook's certificate

    @property
    def _certificate(self) -> Path:
        return self.up.root / "webhook"

    async def let_certificate_expire(self) -> None:
        """Let the webhook's time pass, while it cannot write a new certificate."""
        await self._mount("--bind", "-o", "ro", str(self._certificate), str(self._certificate))
        self.clocks.shift("webhook", CERTIFICATE_S)

    def renew_certificate(self) -> None:
        self.clocks.shift("webhook", 0.0)
        subprocess.run(("umount", "--lazy", str(self._certificate)), check=False)

    async def _mount(self, *words: str) -> bool:
        """Mount, and return whether this user may."""
        if shutil.which("mount") is None:
            return False
        mounting = await asyncio.create_subprocess_exec("mount", *words, stderr=subprocess.DEVNULL)
        return await mounting.wait() == 0

    # The disk of a node

    async def make_disk_small(self) -> None:
        """Move the state of the first node's agent to a small file system, if this user may."""
        directory = self.up.root / "agents" / NODES[0]
        part = f"agent-{NODES[0]}"
        self.hold(part)
        kept = directory.with_name("kept")
        shutil.copytree(directory, kept, ignore=shutil.ignore_patterns("*.sock"))
        self.has_small_disk = await self._mount(
            "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)
        )
        if self.has_small_disk:
            shutil.copytree(kept, directory, dirs_exist_ok=True)
            self.signal(part, signal.SIGKILL)
        self.go_on(part)

    @property
    def filling(self) -> Path:
        return self.up.root / "agents" / NODES[0] / "filling"

    def fill_disk(self) -> None:
        with contextlib.suppress(OSError), self.filling.open("wb") as file:
            while True:
                file.write(b"0" * 65536)
                file.flush()

    @property
    def library(self) -> Path:
        """The file that stands for HAMi-core's library on the node of the fault."""
        return simulated_library(self.up.root / "agents" / self.node / "library").path

    def unmount(self) -> None:
        if self.has_small_disk:
            directory = str(self.up.root / "agents" / NODES[0])
            subprocess.run(("umount", "--lazy", directory), check=False)

    # Pods

    async def create_pod(self, name: str, *, memory_mib: int = 1000) -> None:
        """Create a pod that may have only the GPU of this fault; try for some seconds."""
        uuid = uuid_of(NodeName(self.node), int(self.index))
        pod = gpu_pod(name, vgpu(memory=memory_mib), annotations={USE_UUIDS: uuid})
        await self.up.create(pod)

    async def delete_pod(self, name: str) -> None:
        """Delete a pod, and wait until it is gone."""
        await self.up.kube.delete(f"{PODS}/{name}")
        await until(self.up.pods, lambda pods: name not in map(name_of, pods))

    async def phase(self, name: str) -> str:
        with contextlib.suppress(LeaseholdError):
            return str((await self.up.pod(name))["status"].get("phase", ""))
        return ""

    async def leasehold(self, *words: str) -> Done:
        try:
            async with asyncio.timeout(COMMAND_S * self.patience):
                return await self.up.leasehold(*words)
        except TimeoutError:
            return Done(1, "", f"the command has not ended within {COMMAND_S * self.patience:g} s")

    async def command(self, *words: str, codes: Collection[int] = (0,)) -> str:
        """Run a command that must end with one of these exit codes, and return its output."""
        done = await self.leasehold(*words)
        assert done.code in codes, f"leasehold {' '.join(words)}: {done.out}{done.err}"
        return done.out

    async def sim(self, *words: str) -> None:
        """Break or heal the GPU of this fault."""
        action, *flags = words
        await self.command("sim", action, self.gpu, *flags)

    @property
    def page(self) -> str:
        return f"http://127.0.0.1:{self.up.state()['ports']['page']}"

    def addresses(self) -> dict[str, str]:
        """Return where each part serves /metrics."""
        shown = {
            file.stem: json.loads(file.read_text())["http"]
            for file in (self.up.root / "run").glob("*.json")
        }
        ports = self.up.state()["ports"]
        usage = {name: f"127.0.0.1:{port}" for name, port in ports.items() if "usage-" in name}
        return shown | usage


def name_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


@contextlib.asynccontextmanager
async def night_stack() -> AsyncIterator[Night]:
    """Start the stack of a night, and stop it at the end.

    Its programs are executed, so that the loader gives them their clocks, and each exports its own
    metrics only: forks of one process have those of all services, and alerts fire for them.
    """
    with tempfile.TemporaryDirectory(prefix="lh-clocks-") as folder:
        clocks = Clocks(Path(folder))
        env = clocks.environment_of_all(CLOCKS)
        flags = ("--nodes", str(len(NODES)), "--gpus", LAYOUT)
        async with stack(*flags, webhook=True, env=env, loader=True) as up:
            night = Night(up, clocks)
            await night.make_disk_small()
            try:
                yield night
            finally:
                for name in tuple(night._tasks):
                    await night.end(name)
                night.go_on(*(component["name"] for component in up.state()["components"]))
                night.unmount()
