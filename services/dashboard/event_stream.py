"""One viewer's stream of server-sent events: what changed, coalesced, with a place to resume from.

Everything sent is absolute, so that hearing it twice is harmless. A reader that is too far behind,
or whose rights have changed, is told to start anew (`reset`).
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from services.dashboard.api_responses import Sight, delta_shape, everything
from services.dashboard.service import Dashboard
from shared.credentials.authorization import Viewer
from shared.model.names import Namespace

KEEP_ALIVE_S = 10.0
"""So long after the last words a comment is sent; rights are asked for again then, at least."""

encode = msgspec.json.Encoder().encode


def sight_of(visible: frozenset[Namespace] | None) -> Sight:
    """Return the sight of somebody who may see these namespaces; None: all."""
    return everything if visible is None else visible.__contains__


async def stream(
    board: Dashboard, admit: Callable[[], Awaitable[Viewer | None]], after: str
) -> AsyncIterator[bytes]:
    """Yield what to write, from the place `after` on, until the viewer may no longer look."""
    place = after
    last_tick = 0
    known: frozenset[Namespace] = frozenset()
    before: frozenset[Namespace] | None = None
    yield b"retry: 1000\n\n"
    while (viewer := await admit()) is not None:
        names = board.projection.known_namespaces()
        visible = await viewer.visible(names)
        keys = board.hub.since(place)
        if keys is None or _differ(before, visible, known):
            yield event("reset", b"{}", "")
            return
        known, before = names, visible
        if keys:
            place = board.hub.place
            shape = delta_shape(
                board.projection, board.silent, keys, sight_of(visible), after_tick=last_tick
            )
            last_tick = max((tick["number"] for tick in shape.get("ticker", ())), default=last_tick)
            yield event("delta", encode(shape | {"now": board.clock.now()}), place)
        if not await board.hub.later_than(place, limit_s=KEEP_ALIVE_S):
            yield b": still here\n\n"


def event(name: str, data: bytes, id_: str) -> bytes:
    """Write one event; JSON has no line feeds."""
    head = f"event: {name}\n" + (f"id: {id_}\n" if id_ else "")
    return head.encode() + b"data: " + data + b"\n\n"


def _differ(
    before: frozenset[Namespace] | None,
    now: frozenset[Namespace] | None,
    known: frozenset[Namespace],
) -> bool:
    """Say whether rights to namespaces that were known have changed."""
    if not known:
        return False
    seen = known if before is None else before & known
    return seen != (known if now is None else now & known)
