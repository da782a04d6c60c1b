"""Errors of the Kubernetes API: each one carries an HTTP code and becomes a Status; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from simcluster.apimachinery.objects import Json


@dataclass(frozen=True, slots=True)
class Cause:
    """One invalid field and the reason; `reason` is a Kubernetes `CauseType`."""

    reason: str
    message: str
    field: str = ""


class ApiError(Exception):
    """An error of the Kubernetes API, with the HTTP code and the reason of its Status."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Json | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.retry_after_s = retry_after_s

    def status(self) -> Json:
        """Return the error as a Status object."""
        body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        details = dict(self.details or {})
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        if details:
            body["details"] = details
        body["code"] = self.code
        return body

    @classmethod
    def not_found(cls, qualified: str, name: str) -> Self:
        """404: the object does not exist; `qualified` is like `leases.coordination.k8s.io`."""
        return cls(
            404, "NotFound", f'{qualified} "{name}" not found', details=_details(qualified, name)
        )

    @classmethod
    def already_exists(cls, qualified: str, name: str) -> Self:
        """409: an object of that name exists."""
        text = f'{qualified} "{name}" already exists'
        return cls(409, "AlreadyExists", text, details=_details(qualified, name))

    @classmethod
    def conflict(cls, qualified: str, name: str, detail: str) -> Self:
        """409: the object has changed, or a precondition does not hold."""
        text = f'Operation cannot be fulfilled on {qualified} "{name}": {detail}'
        return cls(409, "Conflict", text, details=_details(qualified, name))

    @classmethod
    def bad_request(cls, message: str) -> Self:
        """400: the request is malformed, whatever the state of the cluster."""
        return cls(400, "BadRequest", message)

    @classmethod
    def forbidden(
        cls, qualified: str, name: str, detail: str, causes: Sequence[Cause] = ()
    ) -> Self:
        """403: the request is understood and not allowed."""
        text = " ".join((qualified, *([f'"{name}"'] if name else ()), f"is forbidden: {detail}"))
        return cls(403, "Forbidden", text, details=_details(qualified, name, causes))

    @classmethod
    def expired(cls, message: str) -> Self:
        """410: the requested history is gone; the client must list again."""
        return cls(410, "Expired", message)

    @classmethod
    def invalid(cls, kind: str, group: str, name: str, causes: Sequence[Cause]) -> Self:
        """422: fields are invalid; each of them is listed as a cause."""
        messages = [f"{cause.field}: {cause.message}" for cause in causes]
        joined = messages[0] if len(messages) == 1 else f"[{', '.join(messages)}]"
        qualified = f"{kind}.{group}" if group else kind
        details = _details(qualified, name, causes)
        details["kind"] = kind
        return cls(422, "Invalid", f'{qualified} "{name}" is invalid: {joined}', details=details)


def _details(qualified: str, name: str, causes: Sequence[Cause] = ()) -> Json:
    kind, _, group = qualified.partition(".")
    details: Json = {"name": name, "kind": kind}
    if group:
        details["group"] = group
    if causes:
        details["causes"] = [
            {"reason": cause.reason, "message": cause.message, "field": cause.field}
            for cause in causes
        ]
    return details
