"""The partitioner's daemons and shared servers of MPS, for an agent without privileges."""

from collections.abc import Iterable
from pathlib import Path

from services.node_agent.mps.daemon import MpsDaemon, MpsLimits, MpsTarget, StartedDaemon
from services.node_agent.partition.partition_client import exchange
from services.node_agent.partition.partition_protocol import (
    CheckMpsRequest,
    EnsureMpsRequest,
    GetMpsRequest,
    MpsDoneReply,
    MpsNodeReply,
    MpsReply,
    ProbeMpsRequest,
    RepairMpsRequest,
    StopMpsRequest,
    TerminateMpsRequest,
)

READ_S = 30.0
"""A daemon is read by several commands, which take milliseconds, or 10 s at most."""
START_S = 25.0
"""The kubelet waits 30 s for PreStartContainer."""
REPAIR_S = 60.0
"""Time limit of ending a daemon, whose commands may not reply, and starting it anew."""


class RemoteMpsDaemons:
    """Calls raise UnavailableError without a partitioner, too."""

    def __init__(self, socket: Path, *, shared: bool = False) -> None:
        self.socket = socket
        self.shared = shared

    async def missing_reason(self) -> str:
        return (await self._check()).missing_reason

    async def list(self) -> tuple[StartedDaemon, ...]:
        return (await self._check()).started

    async def ensure(self, target: MpsTarget, *, fence: int, limits: MpsLimits) -> MpsDaemon:
        request = EnsureMpsRequest(target, fence, limits)
        return (await exchange(self.socket, request, MpsReply, START_S)).daemon

    async def get(self, target: MpsTarget) -> MpsDaemon:
        return (await exchange(self.socket, GetMpsRequest(target), MpsReply, READ_S)).daemon

    async def terminate(self, target: MpsTarget, clients: Iterable[int]) -> None:
        request = TerminateMpsRequest(target, tuple(clients))
        await exchange(self.socket, request, MpsDoneReply, READ_S)

    async def probe(self, target: MpsTarget) -> None:
        await exchange(self.socket, ProbeMpsRequest(target), MpsDoneReply, READ_S)

    async def repair(self, target: MpsTarget) -> str:
        request = RepairMpsRequest(target)
        return (await exchange(self.socket, request, MpsDoneReply, REPAIR_S)).text

    async def stop(self, target: MpsTarget, *, fence: int) -> None:
        await exchange(self.socket, StopMpsRequest(target, fence), MpsDoneReply, REPAIR_S)

    async def _check(self) -> MpsNodeReply:
        return await exchange(self.socket, CheckMpsRequest(self.shared), MpsNodeReply, READ_S)
