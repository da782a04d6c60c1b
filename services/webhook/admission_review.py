"""AdmissionReview v1: decodes requests and encodes responses, of pods and of ResourceClaims; pure.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from dataclasses import dataclass

import msgspec

from services.webhook.admission import AdmissionDecision, denied
from services.webhook.patches import add
from services.webhook.pod_admission import FORBIDDEN, STATUSES, TOO_MANY
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim
from shared.model.bounds import cut
from shared.model.denial import Denial
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.request_reply import ClaimLeaseReply

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
EPHEMERAL_CONTAINERS = "ephemeralcontainers"
REASONS = {status: code for code, status in STATUSES.items()}


class ReviewedResource(msgspec.Struct, frozen=True):
    group: str = ""
    resource: str = ""


class ReviewRequest(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    operation: str = ""
    resource: ReviewedResource | None = None
    sub_resource: str | None = None
    namespace: str | None = None
    dry_run: bool | None = None
    raw_object: msgspec.Raw = msgspec.field(name="object", default_factory=msgspec.Raw)
    raw_old_object: msgspec.Raw = msgspec.field(name="oldObject", default_factory=msgspec.Raw)

    @property
    def is_new_pod(self) -> bool:
        return self.operation == "CREATE" and self._is_pod and not self.sub_resource

    @property
    def is_changed_pod(self) -> bool:
        changes = self.sub_resource or ""
        return self.operation == "UPDATE" and self._is_pod and changes in {"", EPHEMERAL_CONTAINERS}

    @property
    def is_claim_status(self) -> bool:
        resource = self.resource or ReviewedResource()
        return (self.operation, resource.group, resource.resource, self.sub_resource) == (
            "UPDATE",
            "resource.k8s.io",
            "resourceclaims",
            "status",
        )

    @property
    def _is_pod(self) -> bool:
        resource = self.resource or ReviewedResource()
        return (resource.group, resource.resource) == ("", "pods")


class _ReviewIn(msgspec.Struct, frozen=True):
    kind: str = ""
    request: ReviewRequest | None = None


def decode_request(body: bytes) -> ReviewRequest:
    try:
        review = msgspec.json.decode(body, type=_ReviewIn)
    except UNDECODABLE as error:
        raise RequestError(f"the body is not an {KIND}: {error}") from error
    if review.kind != KIND:
        raise RequestError(f"the body is not an {KIND}")
    if review.request is None:
        raise RequestError(f"the {KIND} has no request with a uid")
    return review.request


def late_response(uid: str, *, all_pods: bool = False) -> bytes:
    """A webhook that fails open would let in a pod that could not be reviewed in time.

    With `all_pods`, the review only chooses a scheduler, so the pod keeps its own.
    """
    text = (
        "the webhook is busy with other pods and did not get to this one in time: create it again "
        "later, or fewer and smaller pods at once"
    )
    decision = AdmissionDecision(allowed=True) if all_pods else denied(Denial(TOO_MANY, text))
    return encode_response(uid, decision)


def encode_response(uid: str, decision: AdmissionDecision) -> bytes:
    """API servers drop warnings that are not printable."""
    response: dict[str, object] = {"uid": uid, "allowed": decision.allowed}
    if decision.warnings:
        response["warnings"] = list(map(cut, decision.warnings))
    if not decision.allowed:
        response["status"] = {
            "status": "Failure",
            "message": cut(decision.message),
            "reason": REASONS[decision.code],
            "code": decision.code,
        }
    elif decision.patches:
        # msgspec encodes bytes in base64.
        response |= {"patchType": "JSONPatch", "patch": msgspec.json.encode(decision.patches)}
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})


DEVICES = "/status/devices"


@dataclass(frozen=True, slots=True)
class NewAllocation:
    claim: AllocatedClaim
    has_statuses: bool
    """The claim's `status.devices` has entries already."""

    def decide(self, reply: ClaimLeaseReply) -> AdmissionDecision:
        """An empty reply leaves the write as it is."""
        if reply.refusal:
            return denied(Denial(FORBIDDEN, reply.refusal))
        patches = [add(f"{DEVICES}/-", msgspec.Raw(device.encode())) for device in reply.devices]
        if patches and not self.has_statuses:
            patches.insert(0, add(DEVICES, []))
        return AdmissionDecision(allowed=True, patches=tuple(patches))


def new_allocation(request: ReviewRequest) -> NewAllocation | None:
    """Return None if the allocation is not ours or answered already. Raises RequestError."""
    try:
        claim = msgspec.json.decode(request.raw_object, type=ApiResourceClaim)
        before = msgspec.json.decode(request.raw_old_object, type=ApiResourceClaim)
    except UNDECODABLE as error:
        raise RequestError(f"the object is no ResourceClaim: {error}") from error
    allocated = allocated_claim(claim) if before.status.allocation is None else None
    if allocated is None or allocated.answer:
        return None
    return NewAllocation(allocated, has_statuses=bool(claim.status.devices))
