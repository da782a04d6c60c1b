"""Daemons of MPS, one for each container, as the partitioner starts them."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterable
from pathlib import Path

from services.node_agent.mps.control import PROBE
from services.node_agent.mps.daemon import MpsLimits, MpsTarget, WedgedError
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.daemons import MpsDaemons
from shared.dialects.mps import PIPE_VARIABLE
from shared.model.names import PodUid
from simcluster.gpu_driver.mps_control import command
from tests.hardware.machine import Machine


class PrivateMps:
    """Each method waits until the daemon has replied."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        root = Path(tempfile.mkdtemp(prefix="lh-mps-"))  # short: a socket's path has 107 bytes
        node = MpsNode(root)
        if machine.driver:
            variables = (f"{name}={text}" for name, text in machine.driver.environment.items())
            node = MpsNode(root, program=command(), probe_program=("env", *variables, *PROBE))
        self.daemons = MpsDaemons(node)

    @property
    def missing_reason(self) -> str:
        return asyncio.run(self.daemons.missing_reason())

    def start(self, name: str, *, percent: int = 100, mib: int | None = None) -> dict[str, str]:
        """Start the daemon of a container; return the variables of its programs."""
        limits = MpsLimits(percent=percent, memory_mib={self.machine.gpu.uuid: mib})
        daemon = asyncio.run(self.daemons.ensure(_target(name), fence=1, limits=limits))
        return {PIPE_VARIABLE: daemon.pipes}

    def clients(self, name: str) -> frozenset[int]:
        return asyncio.run(self.daemons.get(_target(name))).clients

    def terminate(self, name: str, clients: Iterable[int]) -> bool:
        """End the work of clients; return whether that ends."""
        return not _hangs(self.daemons.terminate(_target(name), clients))

    def probe(self, name: str) -> bool:
        """Return whether a new client starts."""
        return not _hangs(self.daemons.probe(_target(name)))

    def repair(self, name: str) -> str:
        return asyncio.run(self.daemons.repair(_target(name)))

    def close(self) -> None:
        asyncio.run(self._stop_all())
        shutil.rmtree(self.daemons.node.root)

    async def _stop_all(self) -> None:
        for started in await self.daemons.list():
            await self.daemons.stop(started.target, fence=started.fence)


def _target(name: str) -> MpsTarget:
    return MpsTarget(PodUid(name), "main")


def _hangs(call: Coroutine[None, None, None]) -> bool:
    try:
        asyncio.run(call)
    except WedgedError:
        return True
    return False
