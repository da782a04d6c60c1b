"""Lists in pages: all pages of a list show the version of the first one."""

import base64
from dataclasses import dataclass

import msgspec

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, decode, encode
from simcluster.apimachinery.selectors import Selection
from simcluster.apiserver.requests.query_parameters import ListOptions
from simcluster.apiserver.storage.records import ObjectRecord
from simcluster.apiserver.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class ListPage:
    """The records of one page, and the metadata of its list."""

    records: list[ObjectRecord]
    meta: Json


def list_page(
    store: ObjectStore, resource: str, selection: Selection, options: ListOptions
) -> ListPage:
    """Return a list or a page of it; 410 for an expired token, 504 for a future version."""
    if options.version is not None and options.version > store.version:
        raise version_too_large(options.version, store.version)
    version = None
    start = ""
    if options.continue_token:
        version, start = _read_token(options.continue_token)
    elif options.match == "Exact":
        version = options.version
    try:
        page = store.page(resource, selection, limit=options.limit, start=start, version=version)
    except ApiError as error:
        if error.code != 410:
            raise
        raise _continue_expired(error) from error
    meta: Json = {"resourceVersion": str(page.version)}
    if page.rest is not None:
        meta["continue"] = _token(page.version, page.rest)
        if not (selection.labels or selection.fields):
            meta["remainingItemCount"] = page.remaining
    return ListPage(page.records, meta)


def version_too_large(requested: int, current: int) -> ApiError:
    """Return the 504 for a version that does not exist yet."""
    cause = Cause("ResourceVersionTooLarge", "Too large resource version")
    return ApiError(
        504,
        "Timeout",
        f"Too large resource version: {requested}, current: {current}",
        details={"causes": [{"reason": cause.reason, "message": cause.message}]},
        retry_after_s=1,
    )


def _continue_expired(error: ApiError) -> ApiError:
    return ApiError.expired(
        "The provided continue parameter is too old to display a consistent list result. You must "
        f"start a new list without the continue parameter. ({error.message})"
    )


def _token(version: int, start: str) -> str:
    body = encode({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(body).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, str]:
    try:
        body = decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(body["rv"]), str(body["start"])
    except (ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise ApiError.bad_request(f"continue key is not valid: {error}") from error
