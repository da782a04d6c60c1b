"""AdmissionReview v1 in, AdmissionReview v1 out.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from services.webhook.admission import BAD_REQUEST, FORBIDDEN, UNREADABLE, Decision
from shared.model.errors import RequestError

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
REASONS = {BAD_REQUEST: "BadRequest", FORBIDDEN: "Forbidden", UNREADABLE: "Invalid"}
"""What Kubernetes calls a Status with such a code."""


def request_of(review: Any) -> Mapping[str, Any]:
    """Return the request of a review. Raises RequestError for what is none."""
    if not isinstance(review, dict) or review.get("kind") != KIND:
        raise RequestError(f"the body is no {KIND}")
    request = review.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise RequestError(f"the {KIND} has no request with a uid")
    return request


def is_new_pod(request: Mapping[str, Any]) -> bool:
    """Say whether a pod is created; everything else is none of our business."""
    resource = request.get("resource") or {}
    return (
        request.get("operation") == "CREATE"
        and (resource.get("group", ""), resource.get("resource")) == ("", "pods")
        and not request.get("subResource")
    )


def answered(uid: str, decision: Decision) -> dict[str, Any]:
    """Return the review that carries a decision."""
    response: dict[str, Any] = {"uid": uid, "allowed": decision.allowed}
    if not decision.allowed:
        response["status"] = {
            "status": "Failure",
            "message": decision.message,
            "reason": REASONS[decision.code],
            "code": decision.code,
        }
    elif decision.patches:
        operations = [patch.operation() for patch in decision.patches]
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(operations).encode()).decode()
    if decision.warnings:
        response["warnings"] = list(decision.warnings)
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}
