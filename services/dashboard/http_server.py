"""The dashboard's HTTP server: the page, its files, /api/v1, and login with a token.

Errors of /api/v1 are JSON `{"error": ...}`. The server is read-only but for the viewer's cookie.
"""

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from aiohttp import web

from services.dashboard import static_page
from services.dashboard.api_responses import state_json
from services.dashboard.details_server import DetailsServer, TraceReader, json_response
from services.dashboard.event_stream import stream
from services.dashboard.service import Dashboard
from services.dashboard.viewers import Viewers, token_of
from services.dashboard.visible_cluster import visible_cluster
from shared.credentials.authorization import Authenticator, Viewer, is_loopback
from shared.credentials.tokens import VIEWER_COOKIE
from shared.ledger.budgets import Budgets
from shared.model.errors import LeaseholdError, UnavailableError

FILES = {
    "icon.svg": "image/svg+xml",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "grid.js": "text/javascript",
    "block.js": "text/javascript",
    "drawer.js": "text/javascript",
    "panels.js": "text/javascript",
    "dom.js": "text/javascript",
    "chart.js": "text/javascript",
    "first_page.js": "text/javascript",
    "trace.js": "text/javascript",
    "uplot.js": "text/javascript",
    "uplot.css": "text/css",
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


class DashboardServer:
    """The handlers of all paths."""

    def __init__(
        self,
        dashboard: Dashboard,
        authenticator: Authenticator,
        budgets: Budgets,
        *,
        trace_url: str = "",
        read_trace: TraceReader | None = None,
    ) -> None:
        self.dashboard = dashboard
        self.authenticator = authenticator
        self.budgets = budgets
        self.viewers = Viewers(dashboard, authenticator)
        self.details = DetailsServer(
            dashboard, self.viewers, budgets, trace_url=trace_url, read_trace=read_trace
        )
        self.files = {name: _load_file(name) for name in FILES}

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
        add("/api/v1/cluster", self.cluster)
        add("/api/v1/budgets", self.accounts)
        self.details.add_to(pages.router)
        return pages

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Without authentication, refuse other hosts than loopback; set security headers."""
        if self.authenticator.is_anonymous and not is_loopback(request.host):
            return _error(403, f"authentication is off, and {request.host} is not loopback")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, error.reason)
        except UnavailableError as error:
            response = _error(503, str(error))
        except LeaseholdError as error:
            response = _error(400, str(error))
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    # The page

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Return the page as tables; its scripts replace them with the live view."""
        scope = await self.viewers.scope(request)
        if scope is None:
            return web.Response(status=303, headers={"Location": "/login"})
        if reason := self.dashboard.unready_reason():
            return _html(static_page.unready_page(reason), status=503)
        text = static_page.page(
            self.dashboard.projection,
            self.dashboard.missing,
            scope.visible,
            number=_page_number(request.query.get("page", "")),
            only_table=request.query.get("view") == "table",
            signed_in=not self.authenticator.is_anonymous,
            now=self.dashboard.clock.now(),
        )
        return _html(text, compress=True)

    async def static(self, request: web.Request) -> web.StreamResponse:
        """Return one of the page's files."""
        name = request.match_info["name"]
        if name not in self.files:
            return _error(404, "no such file")
        body, tag = self.files[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        response = web.Response(
            body=body, content_type=FILES[name], charset="utf-8", headers=headers
        )
        response.enable_compression()
        return response

    async def login(self, _: web.Request) -> web.StreamResponse:
        """Return the login form."""
        if self.authenticator.is_anonymous:
            return web.Response(status=303, headers={"Location": "/"})
        return _html(static_page.login_page(""))

    async def sign_in(self, request: web.Request) -> web.StreamResponse:
        """Store a valid token in a cookie that scripts and other sites cannot use."""
        token = str((await request.post()).get("token", "")).strip()
        if await self.authenticator.authenticate(token) is None:
            return _html(static_page.login_page("This token is not valid."), status=401)
        response = web.Response(status=303, headers={"Location": "/"})
        is_https = request.headers.get("X-Forwarded-Proto", request.scheme) == "https"
        response.set_cookie(
            VIEWER_COOKIE, token, httponly=True, samesite="Strict", secure=is_https, path="/"
        )
        return response

    async def sign_out(self, _: web.Request) -> web.StreamResponse:
        """Delete the cookie."""
        response = web.Response(status=303, headers={"Location": "/login"})
        response.del_cookie(VIEWER_COOKIE, path="/")
        return response

    # /api/v1

    async def cluster(self, request: web.Request) -> web.StreamResponse:
        """Return everything as the `ClusterView` of the commands."""
        scope = await self.viewers.require_ready(request)
        projection, now = self.dashboard.projection, self.dashboard.clock.now()
        return json_response(
            visible_cluster(projection, self.dashboard.missing, scope.visible, now=now)
        )

    async def accounts(self, request: web.Request) -> web.StreamResponse:
        """Return the budget accounts of visible namespaces as the `Accounts` of the commands."""
        scope = await self.viewers.require(request)
        names = filter(scope.visible, sorted(await self.budgets.revisions()))
        return json_response(await self.budgets.all_accounts(list(names)))

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Return everything, and the position from which /api/v1/events continues."""
        scope = await self.viewers.require_ready(request)
        state = state_json(
            self.dashboard.projection,
            self.dashboard.missing,
            scope.visible,
            position=self.dashboard.feed.position,
            now=self.dashboard.clock.now(),
        )
        return json_response(state)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream changes after the header Last-Event-ID, or else `?after=`."""
        await self.viewers.require(request)
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        response = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(request)
        token = token_of(request)

        async def authenticate() -> Viewer | None:
            return await self.authenticator.authenticate(token)

        try:
            async for data in stream(self.dashboard, authenticate, after):
                await response.write(data)
        except (ConnectionResetError, UnavailableError):
            pass  # the page reconnects with its position
        return response


def _load_file(name: str) -> tuple[bytes, str]:
    body = (resources.files("services.dashboard") / "static" / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def _page_number(text: str) -> int:
    return max(int(text), 1) if text.isdecimal() and len(text) < 6 else 1


def _html(text: str, *, status: int = 200, compress: bool = False) -> web.Response:
    response = web.Response(text=text, content_type="text/html", status=status)
    if compress:
        response.enable_compression()
    return response


def _error(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
