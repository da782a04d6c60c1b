"""The agent's client of the partitioner for limits of memory."""

from pathlib import Path

from services.node_agent.gpus.memory_limits import DriverAccounting, LimitTarget, MemoryLimit
from services.node_agent.partition.partition_client import exchange
from services.node_agent.partition.partition_protocol import (
    AccountingReply,
    AccountingRequest,
    ClearLimitRequest,
    GetLimitRequest,
    LimitReply,
    LimitRequest,
    SetLimitRequest,
)
from shared.model.names import DeviceUuid

TIMEOUT_S = 4.0
"""A container that starts waits for it, for 5 s at most."""


class RemoteLimits:
    """Each call raises LimitError with its fault, RequestError or UnavailableError."""

    def __init__(self, socket: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = socket
        self.timeout_s = timeout_s

    async def set(self, target: LimitTarget, *, fence: int, memory_bytes: int) -> MemoryLimit:
        """Return what the driver has after that, which may be an earlier limit."""
        return await self._limit(SetLimitRequest(target, fence, memory_bytes))

    async def get(self, target: LimitTarget) -> MemoryLimit:
        return await self._limit(GetLimitRequest(target))

    async def clear(self, target: LimitTarget, *, fence: int) -> MemoryLimit:
        return await self._limit(ClearLimitRequest(target, fence))

    async def accounting(self, device: DeviceUuid) -> DriverAccounting:
        request = AccountingRequest(device)
        return (await exchange(self.socket, request, AccountingReply, self.timeout_s)).found

    async def _limit(self, request: LimitRequest) -> MemoryLimit:
        return (await exchange(self.socket, request, LimitReply, self.timeout_s)).limit
