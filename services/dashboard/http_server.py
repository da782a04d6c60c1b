"""The dashboard's doors: the page, its files, /api/v1, and signing in with a token.

Errors of /api/v1 are JSON `{"error": ...}`. Nothing here changes anything but the viewer's cookie.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol
from urllib.parse import quote

from aiohttp import web

from services.dashboard import static_page
from services.dashboard.api_responses import (
    Shape,
    Sight,
    device_shape,
    lease_shape,
    namespace_shape,
    state_shape,
    verdict_shape,
)
from services.dashboard.budget_history import burn_down
from services.dashboard.event_stream import encode, sight_of, stream
from services.dashboard.service import Dashboard
from shared.credentials.authorization import Authenticator, Viewer, is_loopback
from shared.model.budget import Account, ChargeEntry
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid, Namespace, PodUid
from shared.runtime.telemetry import trace_id_of

COOKIE = "leasehold_token"
ENTRIES_A_PAGE = 1000
PAGES_OF_ENTRIES = 5
"""A picture of a budget is drawn from so many charges at the most."""
FILES = {
    "icon.svg": "image/svg+xml",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "grid.js": "text/javascript",
    "block.js": "text/javascript",
    "drawer.js": "text/javascript",
    "panels.js": "text/javascript",
    "words.js": "text/javascript",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Store(Protocol):
    """What is read of the budgets; `shared.ledger.budgets.Budgets` is it."""

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Load accounts with their open windows."""
        ...

    async def entries(
        self, namespace: Namespace, *, after: str = "", most: int = ENTRIES_A_PAGE
    ) -> list[ChargeEntry]:
        """Return entries after the one named, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """Who looks, and what of."""

    viewer: Viewer
    sight: Sight


class Pages:
    """The handlers of all paths."""

    def __init__(
        self, board: Dashboard, door: Authenticator, store: Store, *, trace_url: str = ""
    ) -> None:
        self.board = board
        self.door = door
        self.store = store
        self.trace_url = trace_url
        self.files = {name: _file(name) for name in FILES}

    def application(self) -> web.Application:
        """Return the application."""
        pages = web.Application(middlewares=[self.guard])
        add = pages.router.add_get
        add("/", self.page)
        add("/static/{name}", self.static)
        add("/login", self.login)
        pages.router.add_post("/login", self.sign_in)
        pages.router.add_post("/logout", self.sign_out)
        add("/api/v1/state", self.state)
        add("/api/v1/events", self.events)
        add("/api/v1/devices/{uuid}", self.device)
        add("/api/v1/leases/{pod}", self.lease)
        add("/api/v1/namespaces/{namespace}", self.namespace)
        return pages

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse names that are not this machine's where no token is wanted; harden answers."""
        if self.door.is_anonymous and not is_loopback(request.host):
            return _error(403, f"{request.host} is not this machine, and no token is wanted here")
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            answer = _error(error.status, error.reason)
        except UnavailableError as error:
            answer = _error(503, str(error))
        except LeaseholdError as error:
            answer = _error(400, str(error))
        if not answer.prepared:
            answer.headers.update(HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    # The page

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Show everything as tables; with scripts they become the live page."""
        look = await self._look(request)
        if look is None:
            return web.Response(status=303, headers={"Location": "/login"})
        if self.board.missing():
            return _html(static_page.waiting_page(str(self.board.missing())), status=503)
        text = static_page.page(
            self.board.projection,
            self.board.silent,
            look.sight,
            number=_number(request.query.get("page", "")),
            only_table=request.query.get("view") == "table",
            signed_in=not self.door.is_anonymous,
            now=self.board.clock.now(),
        )
        return _html(text, compress=True)

    async def static(self, request: web.Request) -> web.StreamResponse:
        """Return one of the page's files."""
        name = request.match_info["name"]
        if name not in self.files:
            return _error(404, "there is no such file")
        body, tag = self.files[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        answer = web.Response(body=body, content_type=FILES[name], charset="utf-8", headers=headers)
        answer.enable_compression()
        return answer

    async def login(self, _: web.Request) -> web.StreamResponse:
        """Ask for a token."""
        if self.door.is_anonymous:
            return web.Response(status=303, headers={"Location": "/"})
        return _html(static_page.login_page(""))

    async def sign_in(self, request: web.Request) -> web.StreamResponse:
        """Keep a token in a cookie that scripts and other sites cannot use, if it is known."""
        token = str((await request.post()).get("token", "")).strip()
        if await self.door.authenticate(token) is None:
            return _html(static_page.login_page("This token is not known here."), status=401)
        answer = web.Response(status=303, headers={"Location": "/"})
        is_https = request.headers.get("X-Forwarded-Proto", request.scheme) == "https"
        answer.set_cookie(
            COOKIE, token, httponly=True, samesite="Strict", secure=is_https, path="/"
        )
        return answer

    async def sign_out(self, _: web.Request) -> web.StreamResponse:
        """Forget the token."""
        answer = web.Response(status=303, headers={"Location": "/login"})
        answer.del_cookie(COOKIE, path="/")
        return answer

    # /api/v1

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Return everything, and the place from which to go on in /api/v1/events."""
        look = await self._must_look(request)
        if self.board.missing():
            raise UnavailableError(f"{self.board.missing()}; ask again in a second")
        shape = state_shape(
            self.board.projection,
            self.board.silent,
            look.sight,
            id_=self.board.hub.place,
            now=self.board.clock.now(),
        )
        return _json(shape)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream what changes after the header Last-Event-ID, or else `?after=`."""
        await self._must_look(request)
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        answer = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        await answer.prepare(request)
        token = _token(request)
        try:
            async for data in stream(self.board, lambda: self.door.authenticate(token), after):
                await answer.write(data)
        except (ConnectionResetError, UnavailableError):
            pass  # the page comes again, with the place it has reached
        return answer

    async def device(self, request: web.Request) -> web.StreamResponse:
        """Return one device and its shares."""
        look = await self._must_look(request)
        shown = self.board.projection.devices.get(DeviceUuid(request.match_info["uuid"]))
        if shown is None:
            return _error(404, "no node reports such a device")
        return _json(device_shape(shown, look.sight))

    async def lease(self, request: web.Request) -> web.StreamResponse:
        """Return one pod's lease, or why it waits, and where its trace is."""
        look = await self._must_look(request)
        pod = PodUid(request.match_info["pod"])
        projection = self.board.projection
        lease, waiting = projection.lease_of(pod), projection.waiting.get(pod)
        namespace = lease.namespace if lease else waiting.queued.namespace if waiting else None
        if namespace is None or not look.sight(namespace):
            return _error(404, "no pod of a namespace that you may see holds or awaits this lease")
        shape: Shape = {"lease": lease_shape(lease) if lease else None, "trace": self._trace(pod)}
        if waiting is not None:
            place = 1 + [one.queued.pod for one in projection.queue()].index(pod)
            shape["waiting"] = verdict_shape(waiting, place)
        return _json(shape)

    async def namespace(self, request: web.Request) -> web.StreamResponse:
        """Return what a namespace holds, and how its budget went down in the open window."""
        look = await self._must_look(request)
        name = Namespace(request.match_info["namespace"])
        found = [one for one in self.board.projection.namespaces() if one.namespace == name]
        if not found or not look.sight(name):
            return _error(404, "no namespace of this name that you may see holds or awaits leases")
        return _json(namespace_shape(found[0]) | {"burn": await self._burn(name)})

    async def _burn(self, namespace: Namespace) -> Shape | None:
        (account,) = await self.store.load({namespace: None})
        if not account.windows:
            return None
        window = account.windows[-1]
        entries: list[ChargeEntry] = []
        after = f"{window.start_ms}-0"
        for _ in range(PAGES_OF_ENTRIES):
            page = await self.store.entries(namespace, after=after, most=ENTRIES_A_PAGE)
            entries += page
            if len(page) < ENTRIES_A_PAGE:
                break
            after = page[-1].id
        now = self.board.clock.now()
        return {
            "window": window.id,
            "start": window.start_ms / 1000,
            "end": None if window.end_ms is None else window.end_ms / 1000,
            "has_limit": window.allowed_units is not None,
            "points": burn_down(window, entries, at_ms=round(now * 1000)),
        }

    def _trace(self, pod: PodUid) -> Shape:
        id_ = trace_id_of(pod)
        return {"id": id_, "url": self.trace_url.replace("{trace}", quote(id_, safe=""))}

    # Who looks

    async def _look(self, request: web.Request) -> Look | None:
        viewer = await self.door.authenticate(_token(request))
        if viewer is None:
            return None
        visible = await viewer.visible(self.board.projection.known_namespaces())
        return Look(viewer, sight_of(visible))

    async def _must_look(self, request: web.Request) -> Look:
        look = await self._look(request)
        if look is None:
            raise web.HTTPUnauthorized(reason="a known token is wanted: Authorization: Bearer ...")
        return look


def _token(request: web.Request) -> str:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")


def _file(name: str) -> tuple[bytes, str]:
    body = (resources.files("services.dashboard") / "static" / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def _number(text: str) -> int:
    return max(int(text), 1) if text.isdecimal() and len(text) < 6 else 1


def _json(shape: Any) -> web.Response:
    answer = web.Response(body=encode(shape), content_type="application/json")
    answer.enable_compression()
    return answer


def _html(text: str, *, status: int = 200, compress: bool = False) -> web.Response:
    answer = web.Response(text=text, content_type="text/html", status=status)
    if compress:
        answer.enable_compression()
    return answer


def _error(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
