"""Which allocation of a ResourceClaim is being written, and the answer in that write; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-claim-v1/
"""

from dataclasses import dataclass

import msgspec

from services.webhook.admission import FORBIDDEN, AdmissionDecision
from services.webhook.admission_review import ReviewRequest
from services.webhook.patches import add
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.request_reply import ClaimLeaseReply

DEVICES = "/status/devices"


@dataclass(frozen=True, slots=True)
class NewAllocation:
    """An allocation of our devices that a claim gets."""

    claim: AllocatedClaim
    has_statuses: bool
    """The claim's `status.devices` has entries already."""

    def decide(self, reply: ClaimLeaseReply) -> AdmissionDecision:
        """Return the decision on the write; an empty reply leaves it as it is."""
        if reply.refusal:
            return AdmissionDecision(allowed=False, message=reply.refusal, code=FORBIDDEN)
        patches = [add(f"{DEVICES}/-", msgspec.Raw(each.encode())) for each in reply.devices]
        if patches and not self.has_statuses:
            patches.insert(0, add(DEVICES, []))
        return AdmissionDecision(allowed=True, patches=tuple(patches))


def new_allocation(request: ReviewRequest) -> NewAllocation | None:
    """Return the allocation that is written; None: none of our devices, or nothing to answer.

    Raises RequestError if the object is no ResourceClaim, or its allocation is not one of ours.
    """
    try:
        claim = msgspec.json.decode(request.raw_object, type=ApiResourceClaim)
        before = msgspec.json.decode(request.raw_old_object, type=ApiResourceClaim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the object is no ResourceClaim: {error}") from error
    allocated = allocated_claim(claim) if before.status.allocation is None else None
    if allocated is None or allocated.answer:
        return None
    return NewAllocation(allocated, has_statuses=bool(claim.status.devices))
