"""AdmissionReview v1: decodes requests and encodes responses; pure.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

import msgspec

from services.webhook.admission import BAD_REQUEST, FORBIDDEN, UNPROCESSABLE, AdmissionDecision
from shared.model.errors import RequestError

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
REASONS = {BAD_REQUEST: "BadRequest", FORBIDDEN: "Forbidden", UNPROCESSABLE: "Invalid"}
"""The reason of a Kubernetes Status with each code."""


class ReviewedResource(msgspec.Struct, frozen=True):
    """The resource under review."""

    group: str = ""
    resource: str = ""


class ReviewRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The request of a review."""

    uid: str
    operation: str = ""
    resource: ReviewedResource | None = None
    sub_resource: str | None = None
    namespace: str | None = None
    dry_run: bool | None = None
    raw_object: msgspec.Raw = msgspec.field(name="object", default_factory=msgspec.Raw)
    """The object under review, undecoded."""

    @property
    def is_new_pod(self) -> bool:
        """Whether a pod is created; the webhook allows everything else."""
        resource = self.resource or ReviewedResource()
        return (
            self.operation == "CREATE"
            and (resource.group, resource.resource) == ("", "pods")
            and not self.sub_resource
        )


class _ReviewIn(msgspec.Struct, frozen=True):
    kind: str = ""
    request: ReviewRequest | None = None


class _ReviewStatus(msgspec.Struct, frozen=True):
    status: str
    message: str
    reason: str
    code: int


class _ReviewResponse(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    uid: str
    allowed: bool
    status: _ReviewStatus | None = None
    patch_type: str = ""
    patch: bytes = b""
    """In base64, as msgspec encodes bytes in JSON."""
    warnings: tuple[str, ...] = ()


class _ReviewOut(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    response: _ReviewResponse


def decode_request(body: bytes) -> ReviewRequest:
    """Decode the request of a review. Raises RequestError for any other body."""
    try:
        review = msgspec.json.decode(body, type=_ReviewIn)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not an {KIND}: {error}") from error
    if review.kind != KIND:
        raise RequestError(f"the body is not an {KIND}")
    if review.request is None:
        raise RequestError(f"the {KIND} has no request with a uid")
    return review.request


def encode_response(uid: str, decision: AdmissionDecision) -> bytes:
    """Encode the review that carries a decision."""
    if not decision.allowed:
        status = _ReviewStatus(
            status="Failure",
            message=decision.message,
            reason=REASONS[decision.code],
            code=decision.code,
        )
        response = _ReviewResponse(
            uid=uid, allowed=False, status=status, warnings=decision.warnings
        )
    elif decision.patches:
        patch = msgspec.json.encode(decision.patches)
        response = _ReviewResponse(
            uid=uid, allowed=True, patch_type="JSONPatch", patch=patch, warnings=decision.warnings
        )
    else:
        response = _ReviewResponse(uid=uid, allowed=True, warnings=decision.warnings)
    return msgspec.json.encode(_ReviewOut(api_version=API_VERSION, kind=KIND, response=response))
