"""Fakes of what a resize needs: limits and annotations."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from services.binder.agent_client import NodeAgentClient
from services.binder.observations import PodSnapshot
from services.binder.pod_client import PodClient
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.request_reply import LimitsReply, LimitsRequest
from shared.model.lease import ShareSize
from shared.model.names import NodeName


async def _nothing() -> None:
    """Do nothing."""


class FakeLimits(NodeAgentClient):
    """A node agent's side: the limits it was requested to enforce."""

    def __init__(self) -> None:
        self.limits: list[LimitsRequest] = []
        self.in_use_mib = 0
        self.away: set[NodeName] = set()
        self.kept: ShareSize | None = None
        """The most that its device can give a container."""

    async def set_limits(self, request: LimitsRequest) -> LimitsReply:
        self.limits.append(request)
        if request.node in self.away:
            raise UnavailableError("no reply")
        least = min(share.memory_mib for share in request.lease.shares)
        if request.resize_id and not request.finished and least < self.in_use_mib:
            reason = f"{self.in_use_mib} MiB are in use"
            return LimitsReply(applied=False, reason=reason, in_use_mib=self.in_use_mib)
        if self.kept is not None and least > self.kept.memory_mib:
            reason = "it would be given out twice"
            return LimitsReply(applied=False, reason=reason, container="c", kept=self.kept)
        return LimitsReply(applied=True)


class FakeAnnotations(PodClient):
    """The API server's side: pods' annotations, each write with a version."""

    def __init__(self) -> None:
        self.seen: dict[str, PodSnapshot | None] = {}
        self.conflicts = 0
        self.writes = 0
        self.before_read: Callable[[], Awaitable[None]] = _nothing
        self.before_annotate: Callable[[], Awaitable[None]] = _nothing

    async def annotate(
        self, namespace: str, name: str, read: PodSnapshot, annotations: Mapping[str, str]
    ) -> None:
        await self.before_annotate()
        now = self.seen[name]
        assert now is not None
        if self.conflicts or now.resource_version != read.resource_version:
            self.conflicts = max(0, self.conflicts - 1)
            raise ConflictError("it has changed")
        self.writes += 1
        self.seen[name] = replace(
            now,
            resource_version=f"{now.resource_version}+",
            annotations={**now.annotations, **annotations},
        )
