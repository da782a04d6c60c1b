"""The HTTP server: the page, its files, /api/v1, and login with a token."""

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from importlib import resources
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec
from aiohttp import web

from services.api.api_call import ApiCall, Route
from services.api.http import static_page
from services.api.http.page_script import bundle
from services.api.http.read_api import ROUTES, ReadApi
from services.api.projection.visible_cluster import NamespaceFilter, all_namespaces
from services.api.service import ApiService
from shared.credentials.authorization import (
    VIEWER_COOKIE,
    AccessDeniedError,
    Authenticator,
    Viewer,
    bearer_token,
    is_loopback,
)
from shared.credentials.shares import OpenResponses, owner_of
from shared.credentials.turns import TooManyRequestsError, Turns
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import Namespace
from shared.runtime.bodies import BODY
from shared.runtime.connections import PortBounds
from shared.runtime.listener import BOUNDS

MEDIA_TYPES = {".svg": "image/svg+xml", ".css": "text/css", ".js": "text/javascript"}
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
HEARTBEAT_S = 10.0
"""After this time without a change, a comment is sent, and permissions are checked again."""
MOST_OPEN = 1_000
MOST_OPEN_OF_ONE = 50
MOST_OPEN_RESERVED = 50
"""Responses that stay open cost a comparison for every change."""
AT_ONCE = 64
AT_ONCE_OF_ONE = 8
MOST_WAITING = 200
PORT_BOUNDS = PortBounds(
    connections=2_000,
    body_bytes=256 * 1024,
    free_body_bytes=16 * 1024,
    larger_bodies=16,
)
"""More connections than responses that stay open; a body is read before its sender is known."""
MOST_FIELDS = 16
LARGE_BYTES = 256 * 1024
"""Larger documents are compressed beside the event loop, and quickly: a viewer would wait longer
for a better compression than for the bytes that it saves."""
QUICKLY = 1
encode = msgspec.json.Encoder().encode


class StaticFile(NamedTuple):
    body: bytes
    packed: bytes
    """With gzip."""
    tag: str

    @classmethod
    def load(cls, body: bytes) -> "StaticFile":
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        return cls(body, gzip.compress(body, mtime=0), tag)


def token_of(request: web.Request) -> str:
    token = bearer_token(request.headers.get("Authorization", ""))
    return token or request.cookies.get(VIEWER_COOKIE, "")


class HttpServer:
    def __init__(self, api: ReadApi, authenticator: Authenticator) -> None:
        self.api = api
        self.service = api.service
        self.authenticator = authenticator
        folder = resources.files("services.api") / "static"
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        contents["all.js"] = page_script(contents)
        self.files = {name: StaticFile.load(body) for name, body in contents.items()}
        self._open = OpenResponses(MOST_OPEN, MOST_OPEN_OF_ONE, MOST_OPEN_RESERVED)
        self._turns = Turns(AT_ONCE, of_one=AT_ONCE_OF_ONE, most_waiting=MOST_WAITING)

    def application(self) -> web.Application:
        pages = web.Application(middlewares=[self.guard])
        pages[BOUNDS] = PORT_BOUNDS
        add = pages.router.add_get
        add("/", self.page)
        add("/static/{name}", self.static)
        add("/login", self.login)
        pages.router.add_post("/login", self.sign_in)
        pages.router.add_post("/logout", self.sign_out)
        add("/api/v1/events", self.events)
        for route in ROUTES:
            pages.router.add_route(route.method, route.path, partial(self.respond, route))
        return pages

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Without authentication, refuse other hosts than loopback; set security headers."""
        if self.authenticator.is_anonymous and not is_loopback(request.host):
            return error_response(403, f"authentication is off, and {request.host} is not loopback")
        try:
            response = await handler(request)
        except (web.HTTPException, LeaseholdError) as error:
            response = error_response(*refusal(error))
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    # The page

    async def page(self, request: web.Request) -> web.StreamResponse:
        if await self._call(request) is None:
            return web.Response(status=303, headers={"Location": "/login"})
        if reason := self.service.unready_reason():
            return _html(static_page.unready_page(reason), status=503)
        is_signed_in = not self.authenticator.is_anonymous
        return _html(static_page.page(signed_in=is_signed_in), compress=True)

    async def static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self.files:
            return error_response(404, "no such file")
        file = self.files[name]
        headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        body = file.body
        if _accepts_gzip(request):
            body = file.packed
            headers["Content-Encoding"] = "gzip"
        media_type = MEDIA_TYPES[f".{name.rpartition('.')[2]}"]
        return web.Response(body=body, content_type=media_type, charset="utf-8", headers=headers)

    async def login(self, _: web.Request) -> web.StreamResponse:
        if self.authenticator.is_anonymous:
            return web.Response(status=303, headers={"Location": "/"})
        return _html(static_page.login_page(""))

    async def sign_in(self, request: web.Request) -> web.StreamResponse:
        """Store a valid token in a cookie that scripts and other sites cannot use."""
        try:
            form = parse_qs(request[BODY].decode(), max_num_fields=MOST_FIELDS)
        except ValueError as error:  # UnicodeDecodeError is one
            raise RequestError("the body is not the form of the login page") from error
        token = form.get("token", [""])[0].strip()
        if await self.authenticator.authenticate(token, request.remote or "") is None:
            return _html(static_page.login_page("This token is not valid."), status=401)
        response = web.Response(status=303, headers={"Location": "/"})
        is_https = request.headers.get("X-Forwarded-Proto", request.scheme) == "https"
        response.set_cookie(
            VIEWER_COOKIE, token, httponly=True, samesite="Strict", secure=is_https, path="/"
        )
        return response

    async def sign_out(self, _: web.Request) -> web.StreamResponse:
        response = web.Response(status=303, headers={"Location": "/login"})
        response.del_cookie(VIEWER_COOKIE, path="/")
        return response

    # /api/v1

    async def _call(self, request: web.Request) -> ApiCall | None:
        """Return None for an invalid token."""
        token = token_of(request)
        viewer = await self.authenticator.authenticate(token, request.remote or "")
        if viewer is None:
            return None
        anonymous = self.authenticator.is_anonymous and not token
        return await self.call_of(request, viewer, anonymous=anonymous)

    async def call_of(
        self, request: web.Request, viewer: Viewer, *, anonymous: bool = False
    ) -> ApiCall:
        visible = await viewer.visible(self.service.projection.known_namespaces())
        return ApiCall(
            viewer=viewer,
            visible=namespace_filter(visible),
            path=request.match_info,
            query=request.query,
            body=request[BODY],
            anonymous=anonymous,
        )

    async def _required_call(self, request: web.Request) -> ApiCall:
        call = await self._call(request)
        if call is None:
            raise web.HTTPUnauthorized(reason="send a valid token: Authorization: Bearer ...")
        return call

    async def respond(self, route: Route, request: web.Request) -> web.StreamResponse:
        return await self.respond_to(await self._required_call(request), route, request)

    async def respond_to(
        self, call: ApiCall, route: Route, request: web.Request
    ) -> web.StreamResponse:
        reason = self.service.unready_reason() if route.needs_sync else None
        if reason:
            raise UnavailableError(f"{reason}; retry in a second")
        if route.body and request.content_type != "application/json":
            # Without this, a page of another site could send the request: a browser asks first.
            raise web.HTTPUnsupportedMediaType(reason="send Content-Type: application/json")
        async with self._turns.turn(owner_of(call.viewer.name)):
            body = encode(await route.handler(self.api, call))
        headers = {}
        if len(body) > LARGE_BYTES and _accepts_gzip(request):
            body = await asyncio.to_thread(gzip.compress, body, QUICKLY)
            headers["Content-Encoding"] = "gzip"
        response = web.Response(body=body, content_type="application/json", headers=headers)
        if not headers:
            response.enable_compression()
        return response

    def staying_open(self, viewer: Viewer) -> AbstractAsyncContextManager[None]:
        """Hold a place for a response; TimeoutError ends it."""

        async def is_administrator() -> bool:
            return await viewer.visible(()) is None

        return self._open.place(owner_of(viewer.name), is_administrator=is_administrator)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream changes after the header Last-Event-ID, or else `?after=`."""
        call = await self._required_call(request)
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        response = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        token = token_of(request)

        async def authenticate() -> Viewer | None:
            return await self.authenticator.authenticate(token, request.remote or "")

        # The page reconnects with its position.
        with suppress(ConnectionResetError, UnavailableError, TimeoutError):
            async with self.staying_open(call.viewer):
                await response.prepare(request)
                async for data in stream(self.service, authenticate, after):
                    await response.write(data)
        return response


def page_script(files: Mapping[str, bytes]) -> bytes:
    modules = {name: body.decode() for name, body in files.items() if name.endswith(".js")}
    return bundle(modules, "page.js").encode()


def _accepts_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "").lower()


def _html(text: str, *, status: int = 200, compress: bool = False) -> web.Response:
    response = web.Response(text=text, content_type="text/html", status=status)
    if compress:
        response.enable_compression()
    return response


def refusal(error: web.HTTPException | LeaseholdError) -> tuple[int, str]:
    if isinstance(error, web.HTTPException):
        return error.status, error.reason
    if isinstance(error, TooManyRequestsError):
        return 429, str(error)
    if isinstance(error, AccessDeniedError):
        return 403 if error.authenticated else 401, str(error)
    return 503 if isinstance(error, UnavailableError) else 400, str(error)


def error_response(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)


def namespace_filter(visible: frozenset[Namespace] | None) -> NamespaceFilter:
    return all_namespaces if visible is None else visible.__contains__


async def stream(
    service: ApiService, authenticate: Callable[[], Awaitable[Viewer | None]], after: str
) -> AsyncIterator[bytes]:
    """Yield the changes after a position as server-sent events, while the viewer is authenticated.

    A reader that is too far behind, or whose permissions have changed, receives `reset` and must
    start again. https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    position = after
    last_event = 0
    seen: frozenset[Namespace] = frozenset()
    before: frozenset[Namespace] | None = None
    yield b"retry: 1000\n\n"
    while (viewer := await authenticate()) is not None:
        namespaces = service.projection.known_namespaces()
        visible = await viewer.visible(namespaces)
        keys = service.feed.since(position)
        if keys is None or _permissions_changed(before, visible, seen):
            yield event("reset", b"{}", "")
            return
        seen = namespaces
        before = visible
        if keys:
            position = service.feed.position
            cluster = service.cluster(namespace_filter(visible))
            delta = cluster.delta(keys, after_event=last_event)
            last_event = max((event.number for event in delta.events), default=last_event)
            yield event("delta", encode(delta), position)
        if not await service.feed.wait_after(position, limit_s=HEARTBEAT_S):
            yield b": heartbeat\n\n"


def event(name: str, data: bytes, id_: str) -> bytes:
    """JSON contains no line feeds."""
    head = f"event: {name}\n" + (f"id: {id_}\n" if id_ else "")
    return head.encode() + b"data: " + data + b"\n\n"


def _permissions_changed(
    before: frozenset[Namespace] | None,
    now: frozenset[Namespace] | None,
    seen: frozenset[Namespace],
) -> bool:
    if not seen:
        return False
    visible_before = seen if before is None else before & seen
    return visible_before != (seen if now is None else now & seen)
