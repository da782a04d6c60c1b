"""What runs MPS on a node."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from services.node_agent.mps.daemon import MpsDaemon, MpsLimits, MpsTarget, StartedDaemon
from services.node_agent.mps.daemon_directories import MpsNode
from services.node_agent.mps.daemons import MpsDaemons
from services.node_agent.mps.remote_daemons import RemoteMpsDaemons
from services.node_agent.mps.shared_servers import SharedServers


class MpsRunner(Protocol):
    """Calls raise RequestError for an older fence or an unknown target, or UnavailableError."""

    async def missing_reason(self) -> str: ...
    async def list(self) -> tuple[StartedDaemon, ...]: ...
    async def ensure(self, target: MpsTarget, *, fence: int, limits: MpsLimits) -> MpsDaemon: ...
    async def get(self, target: MpsTarget) -> MpsDaemon: ...
    async def terminate(self, target: MpsTarget, clients: Iterable[int]) -> None: ...
    async def probe(self, target: MpsTarget) -> None: ...
    async def repair(self, target: MpsTarget) -> str: ...
    async def stop(self, target: MpsTarget, *, fence: int) -> None: ...


@dataclass(frozen=True, slots=True)
class MpsRunners:
    private: MpsRunner
    shared: MpsRunner

    @classmethod
    def of_node(cls, node: MpsNode) -> Self:
        return cls(MpsDaemons(node), SharedServers(node))

    @classmethod
    def of_partitioner(cls, socket: Path) -> Self:
        return cls(RemoteMpsDaemons(socket), RemoteMpsDaemons(socket, shared=True))
