"""Fakes of what a resize needs: locks, limits and annotations."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from services.binder.agent_client import NodeAgentClient
from services.binder.observations import PodAnnotations
from services.binder.pod_client import PodClient
from shared.model.device import Device, DeviceUse
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.request_reply import LimitsReply, LimitsRequest
from shared.model.lease import Lease, ShareSize, StaleLeaseError
from shared.model.ledger import LedgerNode, NoCapacity, NodeTotals, counted_use
from shared.model.names import NodeName, PodUid
from shared.model.node import NodeFacts


class FakeResizes:
    """The ledger's side: locks, sizes, and leases whose views may lag."""

    def __init__(self, *leases: Lease) -> None:
        self.leases = {each.pod: each for each in leases}
        self.cards: tuple[Device, ...] = ()
        self.locks: dict[PodUid, str] = {}
        self.unsynced_versions: dict[PodUid, int] = {}
        self.full: NoCapacity | None = None
        self.before_resize: Callable[[], None] = lambda: None

    @property
    def resizes(self) -> "FakeResizes":
        return self

    @property
    def totals(self) -> "FakeResizes":
        return self

    async def pages(self) -> AsyncIterator[list[NodeTotals]]:
        yield []

    async def of_nodes(self, names: Sequence[NodeName]) -> list[NodeTotals]:
        uses, _ = counted_use(self.leases.values())
        return [
            NodeTotals(
                node=LedgerNode(
                    facts=NodeFacts(name=name),
                    devices=tuple((d, uses.get(d.uuid, DeviceUse())) for d in self.cards),
                    served=("volcano.sh/vgpu-number", "tencent.com/vcuda-core"),
                ),
                leases=(),
            )
            for name in names
        ]

    async def lock(self, pod: PodUid, *, ttl_s: float) -> str | None:
        if pod in self.locks:
            return None
        self.locks[pod] = f"lock of {pod}"
        return self.locks[pod]

    async def unlock(self, pod: PodUid, token: str) -> None:
        if self.locks.get(pod) == token:
            del self.locks[pod]

    async def apply(self, lease: Lease, *, token: str = "") -> Lease | NoCapacity | StaleLeaseError:
        self.before_resize()
        stored = self.leases.get(lease.pod)
        if stored is None or stored.version != lease.version:
            version = stored.version if stored else None
            return StaleLeaseError(lease.pod, read=lease.version, stored=version)
        if token and self.locks.get(lease.pod) != token:
            raise ConflictError("the lock has expired")
        if self.full is not None:
            return self.full
        self.locks.pop(lease.pod, None)
        resized = structs.replace(lease, version=lease.version + 1, resized_at=1.0)
        self.leases[lease.pod] = resized
        self.unsynced_versions[lease.pod] = resized.version
        return resized

    async def unsynced(self, *, older_than_s: float) -> list[PodUid]:
        return list(self.unsynced_versions)

    async def set_synced(self, pod: PodUid, version: int) -> bool:
        known = self.unsynced_versions.get(pod)
        if known is None or known > version:
            return False
        del self.unsynced_versions[pod]
        return True

    async def set_unsynced(self, leases: Sequence[Lease]) -> None:
        self.unsynced_versions.update((lease.pod, lease.version) for lease in leases)


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
        self.annotated: dict[str, PodAnnotations] = {}
        self.conflicts = 0
        self.writes = 0
        self.before_read: Callable[[], None] = lambda: None
        self.before_annotate: Callable[[], None] = lambda: None

    async def get_annotations(self, namespace: str, name: str) -> PodAnnotations | None:
        self.before_read()
        return self.annotated.get(name)

    async def annotate(
        self, namespace: str, name: str, read: PodAnnotations, annotations: Mapping[str, str]
    ) -> None:
        self.before_annotate()
        now = self.annotated[name]
        if self.conflicts or now.resource_version != read.resource_version:
            self.conflicts = max(0, self.conflicts - 1)
            raise ConflictError("it has changed")
        self.writes += 1
        self.annotated[name] = replace(
            now,
            resource_version=f"{now.resource_version}+",
            annotations={**now.annotations, **annotations},
        )
