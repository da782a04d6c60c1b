"""AdmissionReview v1: the request to a webhook, and its response; pure."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jsonpatch
import jsonpointer

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, JsonValue, decode, deep_copy
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.admission.rules import (
    AdmissionAttributes,
    admission_request,
    objects_in_version,
)

_V1 = "admission.k8s.io/v1"


class WebhookCallError(Exception):
    """The call of a webhook failed; `failurePolicy` decides what follows."""


@dataclass(frozen=True, slots=True)
class AdmissionResponse:
    """The response of a webhook: allowed or not, patch, warnings."""

    allowed: bool
    status: Json | None = None
    patch: Sequence[Json] = ()
    warnings: Sequence[str] = ()


def admission_review(request: AdmissionAttributes, kind: Resource, *, uid: str) -> Json:
    """Return the body of the request to a webhook."""
    described = admission_request(request, kind, uid=uid)
    described["object"], described["oldObject"] = objects_in_version(request, kind)
    return {"kind": "AdmissionReview", "apiVersion": _V1, "request": described}


def parse_review(body: JsonValue, *, uid: str, mutating: bool) -> AdmissionResponse:
    """Parse a webhook's response; `WebhookCallError` if it is malformed."""
    response = body.get("response") if isinstance(body, dict) else None
    if not isinstance(response, dict):
        raise _invalid("webhook response was absent")
    if response.get("uid") != uid:
        raise _invalid(f'expected response.uid="{uid}", got "{response.get("uid") or ""}"')
    if (body.get("apiVersion"), body.get("kind")) != (_V1, "AdmissionReview"):
        group, _, version = str(body.get("apiVersion") or "/").rpartition("/")
        raise _invalid(
            "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got "
            f"{group}/{version}, Kind={body.get('kind') or ''}"
        )
    return AdmissionResponse(
        allowed=response.get("allowed") is True,
        status=response.get("status"),
        patch=_patch(response, mutating=mutating),
        warnings=[str(warning) for warning in response.get("warnings") or ()],
    )


def _patch(response: Json, *, mutating: bool) -> Sequence[Json]:
    patch = response.get("patch")
    form = response.get("patchType")
    if not mutating:
        for field, value in (("patch", patch), ("patchType", form)):
            if value:
                raise _invalid(f"validating webhook may not return response.{field}")
        return ()
    if patch and form is None:
        raise _invalid("webhook returned response.patch but not response.patchType")
    if form is not None and not patch:
        raise _invalid("webhook returned response.patchType but not response.patch")
    if not patch:
        return ()
    if form != "JSONPatch":
        raise WebhookCallError(f'unsupported patch type "{form}"')
    try:
        operations = decode(base64.b64decode(patch, validate=True))
    except (binascii.Error, ValueError, TypeError) as error:
        raise WebhookCallError(
            f"received undecodable patch in webhook response: {error}"
        ) from error
    return operations if isinstance(operations, list) else ()


def _invalid(detail: str) -> WebhookCallError:
    return WebhookCallError(f"received invalid webhook response: {detail}")


def apply_webhook_patch(
    request: AdmissionAttributes, kind: Resource, name: str, patch: Sequence[Json]
) -> AdmissionAttributes:
    """Return the request with its object patched; 500 if the patch does not apply."""
    obj, _ = objects_in_version(request, kind)
    if obj is None:
        raise internal_error(
            f'admission webhook "{name}" attempted to modify the object, which is not supported '
            "for this operation"
        )
    try:
        changed: Json = jsonpatch.JsonPatch(patch).apply(deep_copy(obj))
    except (
        jsonpatch.JsonPatchException,
        jsonpointer.JsonPointerException,
        TypeError,
        KeyError,
    ) as e:
        raise internal_error(str(e)) from e
    if "apiVersion" in obj:
        changed["apiVersion"] = (request.obj or obj).get("apiVersion")
    return replace(request, obj=changed)


def denied_error(name: str, status: Json | None) -> ApiError:
    """Return the error for a request that a webhook denied, with the webhook's status."""
    given = status or {}
    by = f'admission webhook "{name}" denied the request'
    if given.get("message") or given.get("reason"):
        message = f"{by}: {given.get('message') or given['reason']}"
    else:
        message = f"{by} without explanation"
    code = max(int(given.get("code") or 0), 400)
    return ApiError(code, str(given.get("reason") or ""), message, details=given.get("details"))


def call_failed_error(name: str, detail: str) -> ApiError:
    """Return the error for a request whose webhook could not be called."""
    return internal_error(f'failed calling webhook "{name}": {detail}')


def dry_run_error(name: str) -> ApiError:
    """Return the error for a dry run of a webhook with side effects."""
    return ApiError.bad_request(f'admission webhook "{name}" does not support dry run')


def internal_error(detail: str) -> ApiError:
    """Return a 500 with the text of the Kubernetes API server."""
    details = {"causes": [{"message": detail}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {detail}", details=details)
