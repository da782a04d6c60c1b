"""One viewer's stream of server-sent events: merged changes, with a position to resume from.

Every value is absolute, so that duplicates are harmless. A reader that is too far behind, or whose
permissions have changed, receives `reset` and must start again.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from services.dashboard.api_responses import NamespaceFilter, all_namespaces, delta_json
from services.dashboard.service import Dashboard
from shared.credentials.authorization import Viewer
from shared.model.names import Namespace

HEARTBEAT_S = 10.0
"""After this time without a change, a comment is sent, and permissions are checked again."""

encode = msgspec.json.Encoder().encode


def namespace_filter(visible: frozenset[Namespace] | None) -> NamespaceFilter:
    """Return the filter of a viewer of these namespaces; None: all."""
    return all_namespaces if visible is None else visible.__contains__


async def stream(
    dashboard: Dashboard, authenticate: Callable[[], Awaitable[Viewer | None]], after: str
) -> AsyncIterator[bytes]:
    """Yield the changes after a position, until the viewer is no longer authenticated."""
    position = after
    last_event = 0
    known: frozenset[Namespace] = frozenset()
    before: frozenset[Namespace] | None = None
    yield b"retry: 1000\n\n"
    while (viewer := await authenticate()) is not None:
        namespaces = dashboard.projection.known_namespaces()
        visible = await viewer.visible(namespaces)
        keys = dashboard.feed.since(position)
        if keys is None or _permissions_changed(before, visible, known):
            yield event("reset", b"{}", "")
            return
        known, before = namespaces, visible
        if keys:
            position = dashboard.feed.position
            delta = delta_json(
                dashboard.projection,
                dashboard.missing,
                keys,
                namespace_filter(visible),
                after_event=last_event,
            )
            last_event = max(
                (each["number"] for each in delta.get("events", ())), default=last_event
            )
            yield event("delta", encode(delta | {"now": dashboard.clock.now()}), position)
        if not await dashboard.feed.wait_after(position, limit_s=HEARTBEAT_S):
            yield b": heartbeat\n\n"


def event(name: str, data: bytes, id_: str) -> bytes:
    """Encode one event; JSON contains no line feeds."""
    head = f"event: {name}\n" + (f"id: {id_}\n" if id_ else "")
    return head.encode() + b"data: " + data + b"\n\n"


def _permissions_changed(
    before: frozenset[Namespace] | None,
    now: frozenset[Namespace] | None,
    known: frozenset[Namespace],
) -> bool:
    """Whether the permissions for namespaces that were already known have changed."""
    if not known:
        return False
    visible_before = known if before is None else before & known
    return visible_before != (known if now is None else now & known)
