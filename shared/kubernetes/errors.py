"""Errors of the API server, by what the caller does next; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shared.model.errors import (
    UNDECODABLE,
    ConflictError,
    LeaseholdError,
    RequestError,
    UnavailableError,
)

RESOURCE_VERSION_TOO_LARGE = "ResourceVersionTooLarge"
DISRUPTION_BUDGET = "DisruptionBudget"


class StatusCause(msgspec.Struct, frozen=True):
    reason: str = ""


class StatusDetails(msgspec.Struct, frozen=True, rename="camel"):
    retry_after_seconds: float = 0
    causes: tuple[StatusCause, ...] = ()


class Status(msgspec.Struct, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    method: str
    path: str
    code: int
    reason: str
    message: str
    causes: frozenset[str] = frozenset()
    retry_after_s: float | None = None

    def __str__(self) -> str:
        reason = f" {self.reason}" if self.reason else ""
        return f"{self.method} {self.path} failed: {self.code}{reason}: {self.message}"


class KubernetesError(LeaseholdError):
    advice = ""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(f"{response}. {self.advice}" if self.advice else str(response))
        self.response = response


class RequestRejectedError(KubernetesError, RequestError):
    pass


class UnauthorizedError(RequestRejectedError):
    advice = (
        "The API server does not accept these credentials (expired, revoked, or of another "
        "cluster). Check the token or client certificate in the kubeconfig, or the pod's service "
        "account"
    )


class ForbiddenError(RequestRejectedError):
    advice = (
        "These credentials lack a permission. Grant the verb and resource named above in a Role or "
        "ClusterRole bound to this account; `kubectl auth can-i` shows whether it worked"
    )


class NotFoundError(RequestRejectedError):
    pass


class InvalidError(RequestRejectedError):
    pass


class KubernetesConflictError(KubernetesError, ConflictError):
    """The object exists already, has another uid or version, or the pod is already bound."""


class ExpiredError(KubernetesError, ConflictError):
    """The API server no longer has the resource version or the state of the continue token."""


class OverloadedError(KubernetesError, UnavailableError):
    """`response.retry_after_s` is the Retry-After."""


class EvictionBlockedError(OverloadedError):
    pass


class UnreachableError(UnavailableError):
    """No response was received; a write may or may not have happened."""

    def __init__(self, method: str, path: str, why: str) -> None:
        super().__init__(f"{method} {path} received no response: {why}")
        self.method = method
        self.path = path
        self.why = why


class UnexpectedResponseError(RequestError):
    """JSON of an unexpected shape."""


def is_throttled(error: LeaseholdError) -> bool:
    return isinstance(error, KubernetesError) and error.response.code == 429


BY_CODE: Mapping[int, type[KubernetesError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    408: OverloadedError,
    409: KubernetesConflictError,
    410: ExpiredError,
    422: InvalidError,
    429: OverloadedError,
}


def parse_error(
    method: str, path: str, code: int, body: bytes, retry_after: str | None = None
) -> KubernetesError:
    """Read the API server's Status, or a proxy's text.

    >>> str(parse_error("GET", "/api/v1/nodes/n1", 404, b"no such page"))
    'GET /api/v1/nodes/n1 failed: 404: no such page'
    """
    try:
        status = msgspec.json.decode(body, type=Status)
    except UNDECODABLE:
        status = Status()
    text = status.message or body[:300].decode(errors="replace").strip() or "no message"
    status = msgspec.structs.replace(status, message=text, code=code)
    after_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return error_of(method, path, status, retry_after_s=after_s)


def error_of(
    method: str, path: str, status: Status, *, retry_after_s: float | None = None
) -> KubernetesError:
    """A Retry-After header has precedence over the Status.

    A version from the future counts as expired: the store was restored, and the client must list
    again.
    """
    details = status.details or StatusDetails()
    if retry_after_s is None and details.retry_after_seconds > 0:
        retry_after_s = details.retry_after_seconds
    response = ErrorResponse(
        method=method,
        path=path,
        code=status.code,
        reason=status.reason,
        message=status.message.rstrip("."),
        causes=frozenset(cause.reason for cause in details.causes),
        retry_after_s=retry_after_s,
    )
    if RESOURCE_VERSION_TOO_LARGE in response.causes:
        return ExpiredError(response)
    if response.code == 429 and DISRUPTION_BUDGET in response.causes:
        return EvictionBlockedError(response)
    fallback = OverloadedError if response.code >= 500 else RequestRejectedError
    return BY_CODE.get(response.code, fallback)(response)
