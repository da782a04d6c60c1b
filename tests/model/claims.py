"""ResourceClaims: the API server's objects, kube-scheduler, and the watcher's events about them."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from services.watcher.service import ClaimTracker
from shared.kubernetes.errors import ErrorResponse, NotFoundError
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim
from shared.model.devices.device import Device, DeviceMode
from shared.model.errors import ConflictError, LeaseholdError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.event import Event
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import CORES, DRIVER, MEMORY, REFUSED, device_name
from tests.model.mig import SLICE_MIB, SLICES

if TYPE_CHECKING:
    from tests.model.api_server import ApiServer
    from tests.model.node import Node

AskWebhook = Callable[[ClaimLeaseRequest, int], Awaitable[ClaimLeaseReply]]
REQUEST = "gpu"
ALL_CORES = 100


@dataclass(slots=True)
class Claim:
    """A ResourceClaim as the API server has it."""

    uid: PodUid
    name: str
    mib: int
    consumers: list[str]
    """Uids of the pods that it is reserved for."""
    owner: str = ""
    """UID of the pod for which it was made from a template, if it was."""
    node: NodeName | None = None
    """Where it is allocated, if it is."""
    device: DeviceUuid | None = None
    allocations: int = 0
    """Those that schedulers have begun to write."""
    allocated_by: int = 0
    """The number of the one that was written."""
    statuses: list[dict[str, Any]] = field(default_factory=list)
    """What the binder has written."""
    version: int = 1
    ending: bool = False
    """Its last pod ends: the kubelet unprepares it before it is deallocated."""
    allocation: AllocatedClaim | None = None

    @property
    def cores_percent(self) -> int:
        return self.mib // 2

    @property
    def generation(self) -> str:
        return self.allocation.generation if self.allocation else ""

    @property
    def answer(self) -> str:
        return self.allocation.answer if self.allocation else ""

    def object(self) -> ApiResourceClaim:
        result = {
            "request": REQUEST,
            "driver": DRIVER,
            "pool": self.node,
            "device": device_name(self.device) if self.device else "",
            "shareID": f"share-{self.allocated_by}",
            "consumedCapacity": {MEMORY: f"{self.mib}Mi", CORES: str(self.cores_percent)},
        }
        allocation = {
            "devices": {"results": [result]},
            "allocationTimestamp": str(self.allocated_by),
        }
        owners = [{"kind": "Pod", "uid": self.owner, "controller": True}] if self.owner else []
        reserved = [{"resource": "pods", "name": uid, "uid": uid} for uid in self.consumers]
        content = {
            "metadata": {
                "name": self.name,
                "namespace": "default",
                "uid": self.uid,
                "resourceVersion": str(self.version),
                "ownerReferences": owners,
            },
            "status": {
                **({"allocation": allocation} if self.node else {}),
                "reservedFor": reserved,
                "devices": self.statuses,
            },
        }
        return msgspec.json.decode(msgspec.json.encode(content), type=ApiResourceClaim)


class Claims:
    """All claims. Binders and agents use it in place of their client of the API server."""

    def __init__(self, publish: Callable[[Sequence[Event]], None]) -> None:
        self.publish = publish
        self.stored: dict[str, Claim] = {}
        self.tracker = ClaimTracker()
        self._numbers = 0

    # Users, kube-scheduler and the controller of claims

    def create(self, name: str, mib: int) -> None:
        self._numbers += 1
        uid = PodUid(f"{name}-{self._numbers}")
        user = f"{uid}-user-1"
        # Every second one is made from a template.
        self.stored[name] = Claim(uid, name, mib, [user], owner=user if self._numbers % 2 else "")

    def find(self, uid: PodUid) -> Claim | None:
        return next((claim for claim in self.stored.values() if claim.uid == uid), None)

    def begin_write(self, claim: Claim, node: NodeName, device: DeviceUuid) -> Claim:
        """Return the claim as a scheduler is about to write it."""
        claim.allocations += 1
        draft = replace(
            claim,
            consumers=[*claim.consumers],
            node=node,
            device=device,
            allocated_by=claim.allocations,
            statuses=[],
        )
        draft.allocation = allocated_claim(draft.object())
        return draft

    def write(self, draft: Claim) -> None:
        """Write an allocation. Raises ConflictError if the claim has changed since."""
        claim = self.stored.get(draft.name)
        if claim is None or (claim.uid, claim.version) != (draft.uid, draft.version):
            raise ConflictError(f"claim {draft.name} has changed")
        claim.node = draft.node
        claim.device = draft.device
        claim.statuses = draft.statuses
        claim.allocated_by = draft.allocated_by
        self._changed(claim)

    def deallocate(self, claim: Claim) -> None:
        claim.node = None
        claim.statuses = []
        self._changed(claim)

    def add_consumer(self, claim: Claim) -> None:
        self._numbers += 1
        claim.consumers.append(f"{claim.uid}-user-{self._numbers}")
        self._changed(claim)

    def remove_consumer(self, claim: Claim) -> None:
        """Remove one; without any, the claim is deallocated."""
        claim.consumers.pop()
        self._changed(claim)
        if not claim.consumers:
            self.deallocate(claim)

    def fail_users(self, device: DeviceUuid) -> None:
        """End all pods that use parts of a device."""
        for claim in self.stored.values():
            if claim.node and claim.device == device:
                claim.consumers.clear()
                claim.ending = False
                self.deallocate(claim)

    def on(self, device: DeviceUuid) -> list[Claim]:
        """Return the claims that have been allocated parts of a device."""
        return [claim for claim in self.stored.values() if claim.node and claim.device == device]

    # The watcher

    def list_all(self) -> tuple[AllocatedClaim, ...]:
        allocations = (claim.allocation for claim in self.stored.values())
        return tuple(allocation for allocation in allocations if allocation is not None)

    def resync(self) -> None:
        self.publish(self.tracker.resync())

    def resync_unanswered(self) -> None:
        self.publish(self.tracker.resync_unanswered())

    def _changed(self, claim: Claim) -> None:
        claim.version += 1
        claim.allocation = allocated_claim(claim.object())
        self.publish(self.tracker.update(claim.uid, claim.allocation))

    # In place of a client

    async def read(self, path: str, kind: type[Any]) -> Any:
        """Return a claim. Raises NotFoundError; also for every pod: none combines requests."""
        claim = self.stored.get(path.rpartition("/")[2]) if "resourceclaims" in path else None
        if claim is None:
            raise _not_found("GET", path)
        return claim.object()

    async def apply(self, path: str, body: Mapping[str, Any], *, manager: str) -> None:
        """Write an answer. Raises ConflictError if the claim has changed."""
        claim = self.stored.get(body["metadata"]["name"])
        if claim is None:
            raise _not_found("PATCH", path)
        written = (body["metadata"]["uid"], body["metadata"]["resourceVersion"])
        if written != (claim.uid, str(claim.version)):
            raise ConflictError(f"claim {claim.name} has changed")
        claim.statuses = list(body["status"]["devices"])
        self._changed(claim)


class KubeScheduler:
    """Allocates claims; a webhook asks a binder during its writes, unless it is another one's."""

    def __init__(
        self,
        claims: Claims,
        api: "ApiServer",
        nodes: "Mapping[NodeName, Node]",
        ask_webhook: AskWebhook,
    ) -> None:
        self.claims = claims
        self.api = api
        self.nodes = nodes
        self.ask_webhook = ask_webhook
        self.writes: dict[asyncio.Task[None], Claim] = {}
        """Those that have not ended."""

    def devices(self) -> list[tuple[NodeName, Device]]:
        """Return the devices that claims can share, with their nodes."""
        return [
            (name, device)
            for name in sorted(self.api.nodes - self.api.cordoned)
            for device in self.nodes[name].reported_devices()
            if device.healthy and device.mode is DeviceMode.HAMI_CORE
        ]

    def schedule(self) -> None:
        """Allocate what fits by the slices, which follow the leases that agents know."""
        for claim in self.claims.stored.values():
            if claim.answer == REFUSED:
                self.claims.deallocate(claim)
            if claim.node is None and claim.consumers and claim.uid not in self._writing():
                fitting = (
                    candidate for candidate in self.devices() if self._fits(claim, *candidate)
                )
                chosen = next(fitting, None)
                if chosen is not None and claim.allocations % 2:
                    self.allocate(claim, chosen[0], chosen[1].uuid)
                elif chosen is not None:
                    self.begin_write(claim, chosen[0], chosen[1].uuid, replicas=(0,))

    def allocate(self, claim: Claim, node: NodeName, device: DeviceUuid) -> None:
        """Allocate as a scheduler whose writes are not answered, or while the webhook is away."""
        self.claims.write(self.claims.begin_write(claim, node, device))

    def begin_write(
        self,
        claim: Claim,
        node: NodeName,
        device: DeviceUuid,
        *,
        replicas: Sequence[int],
        is_lost: bool = False,
    ) -> None:
        """Begin a write during which the webhook asks binders, each after the other."""
        draft = self.claims.begin_write(claim, node, device)
        task = self.api.clock.loop.create_task(self._write(draft, replicas, is_lost))
        self.writes[task] = draft
        task.add_done_callback(self.writes.pop)

    async def _write(self, draft: Claim, replicas: Sequence[int], is_lost: bool) -> None:
        assert draft.allocation is not None
        reply = ClaimLeaseReply()
        for replica in replicas:
            reply = await self.ask_webhook(ClaimLeaseRequest(claim=draft.allocation), replica)
        if reply.refusal or is_lost:
            return
        draft.statuses = [json.loads(status) for status in reply.devices]
        about = f"allocation {draft.allocated_by} of {draft.uid}"
        with contextlib.suppress(LeaseholdError):  # the scheduler tries again
            await self.api.write(about, lambda: self.claims.write(draft))

    def _writing(self) -> set[PodUid]:
        return {draft.uid for draft in self.writes.values()}

    def _fits(self, claim: Claim, node: NodeName, device: Device) -> bool:
        of_pods = [
            share
            for lease in self.nodes[node].agent.leases.leases.values()
            for share in lease.shares
            if share.device == device.uuid and lease.claim is None
        ]
        writing = [write for write in self.writes.values() if write.device == device.uuid]
        of_claims = [*self.claims.on(device.uuid), *writing, claim]
        memory = sum(s.memory_mib for s in of_pods) + sum(c.mib for c in of_claims)
        cores = sum(s.cores_percent for s in of_pods) + sum(c.cores_percent for c in of_claims)
        slots = len(of_pods) + len(of_claims)
        return memory <= SLICES * SLICE_MIB and cores <= ALL_CORES and slots <= device.slots


def _not_found(method: str, path: str) -> NotFoundError:
    return NotFoundError(ErrorResponse(method=method, path=path, code=404, reason="", message=""))
