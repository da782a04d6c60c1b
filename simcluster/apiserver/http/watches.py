"""Watches over HTTP: a JSON line per change, bookmarks, and 410 when the history is gone."""

import asyncio
import random
import time
from dataclasses import dataclass

from aiohttp import web

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, encode
from simcluster.apimachinery.selectors import Selection
from simcluster.apiserver.http.representations import ObjectView
from simcluster.apiserver.requests.query_parameters import ListOptions
from simcluster.apiserver.storage.history import WatchSubscription
from simcluster.apiserver.storage.store import ObjectStore

_SHORTEST_S = 1800
_INITIAL_END = {"k8s.io/initial-events-end": "true"}


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """One watch: the table, the selection, the representation and the client's options."""

    resource: str
    selection: Selection
    view: ObjectView
    options: ListOptions


async def serve_watch(
    request: web.BaseRequest, store: ObjectStore, watch: WatchRequest, *, bookmark_s: float
) -> web.StreamResponse:
    """Stream changes until the timeout, a disconnect, or the loss of the history."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    try:
        await _stream(response, store, watch, bookmark_s=bookmark_s)
    except ApiError as error:
        await response.write(_line(b"ERROR", encode(error.status())))
    except ConnectionError:
        return response
    await response.write_eof()
    return response


async def _stream(
    response: web.StreamResponse, store: ObjectStore, watch: WatchRequest, *, bookmark_s: float
) -> None:
    options = watch.options
    subscription = _subscribe(store, watch)
    if options.initial_events and options.bookmarks:
        await _send_events(response, subscription, watch)
        meta = {"resourceVersion": str(store.version), "annotations": _INITIAL_END}
        await response.write(_bookmark(watch.view, meta))
    timeout_s = options.timeout_s or _SHORTEST_S * (1 + random.random())  # noqa: S311
    ends_at = time.monotonic() + timeout_s
    bookmark_at = time.monotonic() + bookmark_s
    while (now := time.monotonic()) < ends_at:
        closed = subscription.closed
        await _send_events(response, subscription, watch)
        if closed:
            return
        if options.bookmarks and now >= bookmark_at:
            meta = {"resourceVersion": str(store.version)}
            await response.write(_bookmark(watch.view, meta))
            bookmark_at = now + bookmark_s
        next_at = min(ends_at, bookmark_at) if options.bookmarks else ends_at
        await subscription.wait(max(next_at - time.monotonic(), 0.001))


def _subscribe(store: ObjectStore, watch: WatchRequest) -> WatchSubscription:
    """Start with the present objects unless a version is given.

    With `sendInitialEvents`, the version is only the oldest acceptable one, so the present objects
    are sent. With `sendInitialEvents=false` and no version, the watch starts now.
    """
    options = watch.options
    since = options.version or None
    if options.initial_events is True:
        since = None
    elif options.initial_events is False and since is None:
        since = store.version
    return store.subscribe(watch.resource, watch.selection, since)


async def _send_events(
    response: web.StreamResponse, subscription: WatchSubscription, watch: WatchRequest
) -> None:
    events = subscription.poll()
    if events:
        view = watch.view
        lines = [_line(event.type.encode(), view.one(event.record)) for event in events]
        await response.write(b"".join(lines))
    else:
        await asyncio.sleep(0)


def _bookmark(view: ObjectView, meta: Json) -> bytes:
    return _line(b"BOOKMARK", view.bookmark(meta))


def _line(kind: bytes, obj: bytes) -> bytes:
    return b'{"type":"%b","object":%b}\n' % (kind, obj)
