"""What the API server answers when it does not do what was asked: one error, one Status."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from simcluster.apimachinery.objects import Json


@dataclass(frozen=True, slots=True)
class Cause:
    """One field that is wrong, and how; `reason` is a Kubernetes `CauseType`."""

    reason: str
    message: str
    field: str = ""


class ApiError(Exception):
    """A refusal, carrying the HTTP code and the reason of a Kubernetes Status."""

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
        """Return the Status object that says this."""
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
        """There is no such object; `qualified` is `pods` or `leases.coordination.k8s.io`."""
        return cls(
            404, "NotFound", f'{qualified} "{name}" not found', details=_details(qualified, name)
        )

    @classmethod
    def already_exists(cls, qualified: str, name: str) -> Self:
        """An object of that name is there already."""
        text = f'{qualified} "{name}" already exists'
        return cls(409, "AlreadyExists", text, details=_details(qualified, name))

    @classmethod
    def conflict(cls, qualified: str, name: str, why: str) -> Self:
        """The object has moved on, or a precondition does not hold."""
        text = f'Operation cannot be fulfilled on {qualified} "{name}": {why}'
        return cls(409, "Conflict", text, details=_details(qualified, name))

    @classmethod
    def bad_request(cls, message: str) -> Self:
        """The request makes no sense, whatever the state of the cluster."""
        return cls(400, "BadRequest", message)

    @classmethod
    def forbidden(cls, qualified: str, name: str, why: str, causes: Sequence[Cause] = ()) -> Self:
        """The request is understood and not allowed."""
        text = f'{qualified} "{name}" is forbidden: {why}'
        return cls(403, "Forbidden", text, details=_details(qualified, name, causes))

    @classmethod
    def expired(cls, message: str) -> Self:
        """410: the history asked for is gone; list again."""
        return cls(410, "Expired", message)

    @classmethod
    def invalid(cls, kind: str, group: str, name: str, causes: Sequence[Cause]) -> Self:
        """422: fields are wrong; every one of them is listed as a cause."""
        each = [f"{cause.field}: {cause.message}" for cause in causes]
        joined = each[0] if len(each) == 1 else f"[{', '.join(each)}]"
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
