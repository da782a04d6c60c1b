"""ResourceClaims of an API server for the tests of the binder, and their allocations."""

import json
from dataclasses import replace

from services.binder.claim_client import ClaimAnswer, ClaimClient, RequestUse
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.pod_client import PodClient
from shared.model.claim import device_name
from shared.model.errors import ConflictError, LeaseholdError, RequestError
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid


def allocated(
    name: str, *devices: AllocatedDevice, node: str = "a", generation: str = "g1", version: int = 1
) -> AllocatedClaim:
    return AllocatedClaim(
        claim=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        node=NodeName(node),
        generation=generation,
        devices=devices,
        resource_version=str(version),
    )


def on(uuid: DeviceUuid, memory_mib: int | None = 4_000, **more: object) -> AllocatedDevice:
    known: dict[str, object] = {"request": "gpu", "share_id": f"share-{memory_mib}"}
    return AllocatedDevice(
        device=device_name(uuid),
        memory_mib=memory_mib,
        **(known | more),  # type: ignore[arg-type]
    )


class FakeClaims(ClaimClient):
    """Claims by name, whose versions rise with every write."""

    def __init__(self) -> None:
        self.stored: dict[str, AllocatedClaim] = {}
        self.answers: dict[str, list[ClaimAnswer]] = {}
        self.errors: list[LeaseholdError] = []
        self.uses: dict[str, list[RequestUse]] = {}
        """By name of the pod."""
        self.unreadable: list[LeaseholdError] = []

    def put(self, claim: AllocatedClaim) -> AllocatedClaim:
        self.stored[claim.name] = claim
        return claim

    async def get_allocation(self, namespace: str, name: str) -> AllocatedClaim | None:
        return self.stored.get(name)

    async def list_uses(self, namespace: str, pod: str, uid: PodUid) -> list[RequestUse]:
        if self.unreadable:
            raise self.unreadable.pop(0)
        return self.uses.get(pod, [])

    async def answer(self, claim: AllocatedClaim, answer: ClaimAnswer) -> None:
        if self.errors:
            raise self.errors.pop(0)
        now = self.stored.get(claim.name)
        if now is None:
            raise RequestError("not found")
        if now.resource_version != claim.resource_version:
            raise ConflictError("the object has been modified")
        self.answers.setdefault(claim.name, []).append(answer)
        self.stored[claim.name] = replace(
            now,
            answer=answer.condition,
            lease=json.dumps(answer.lease) if answer.lease else "",
            resource_version=str(int(now.resource_version) + 1),
        )


def holders(pods: PodClient) -> LeaseHolders:
    """Return the holders of leases in a cluster without claims."""
    return LeaseHolders(pods, FakeClaims())
