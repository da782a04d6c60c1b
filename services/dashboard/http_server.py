"""The dashboard's HTTP server: the page, its files, /api/v1, and login with a token.

Errors of /api/v1 are JSON `{"error": ...}`. The server is read-only but for the viewer's cookie.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import quote

from aiohttp import web

from services.dashboard import static_page
from services.dashboard.api_responses import (
    NamespaceFilter,
    budget_history,
    device_json,
    lease_details_json,
    namespace_json,
    state_json,
    waiting_details_json,
)
from services.dashboard.event_stream import encode, namespace_filter, stream
from services.dashboard.service import Dashboard
from services.dashboard.visible_cluster import visible_cluster
from shared.credentials.authorization import Authenticator, Viewer, is_loopback
from shared.credentials.tokens import VIEWER_COOKIE
from shared.ledger.budgets import Budgets
from shared.model.budget import ChargeEntry
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.lease_json import Json
from shared.model.names import DeviceUuid, Namespace, PodUid
from shared.runtime.telemetry import trace_id_of

ENTRIES_PER_PAGE = 1000
MAX_ENTRY_PAGES = 5
"""Upper limit of the charges that a budget's chart is made from."""
FILES = {
    "icon.svg": "image/svg+xml",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "grid.js": "text/javascript",
    "block.js": "text/javascript",
    "drawer.js": "text/javascript",
    "panels.js": "text/javascript",
    "dom.js": "text/javascript",
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


@dataclass(frozen=True, slots=True)
class ViewerScope:
    """A viewer, and the namespaces that it may see."""

    viewer: Viewer
    visible: NamespaceFilter


class DashboardServer:
    """The handlers of all paths."""

    def __init__(
        self,
        dashboard: Dashboard,
        authenticator: Authenticator,
        budgets: Budgets,
        *,
        trace_url: str = "",
    ) -> None:
        self.dashboard = dashboard
        self.authenticator = authenticator
        self.budgets = budgets
        self.trace_url = trace_url
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
        add("/api/v1/devices/{uuid}", self.device)
        add("/api/v1/leases/{pod}", self.lease)
        add("/api/v1/namespaces/{namespace}", self.namespace)
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
        scope = await self._scope(request)
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
        scope = await self._require_ready_scope(request)
        projection, now = self.dashboard.projection, self.dashboard.clock.now()
        return _json(visible_cluster(projection, self.dashboard.missing, scope.visible, now=now))

    async def accounts(self, request: web.Request) -> web.StreamResponse:
        """Return the budget accounts of visible namespaces as the `Accounts` of the commands."""
        scope = await self._require_scope(request)
        names = filter(scope.visible, sorted(await self.budgets.revisions()))
        return _json(await self.budgets.all_accounts(list(names)))

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Return everything, and the position from which /api/v1/events continues."""
        scope = await self._require_ready_scope(request)
        state = state_json(
            self.dashboard.projection,
            self.dashboard.missing,
            scope.visible,
            position=self.dashboard.feed.position,
            now=self.dashboard.clock.now(),
        )
        return _json(state)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream changes after the header Last-Event-ID, or else `?after=`."""
        await self._require_scope(request)
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
        token = _token(request)

        async def authenticate() -> Viewer | None:
            return await self.authenticator.authenticate(token)

        try:
            async for data in stream(self.dashboard, authenticate, after):
                await response.write(data)
        except (ConnectionResetError, UnavailableError):
            pass  # the page reconnects with its position
        return response

    async def device(self, request: web.Request) -> web.StreamResponse:
        """Return one device and its shares."""
        scope = await self._require_scope(request)
        view = self.dashboard.projection.devices.get(DeviceUuid(request.match_info["uuid"]))
        if view is None:
            return _error(404, "no node reports this device")
        return _json(device_json(view, scope.visible))

    async def lease(self, request: web.Request) -> web.StreamResponse:
        """Return one pod's lease, or why it is waiting, and the URL of its trace."""
        scope = await self._require_scope(request)
        pod = PodUid(request.match_info["pod"])
        projection = self.dashboard.projection
        lease, waiting = projection.lease_of(pod), projection.waiting.get(pod)
        namespace = lease.namespace if lease else waiting.queued.namespace if waiting else None
        if namespace is None or not scope.visible(namespace):
            return _error(404, "no lease or waiting pod that you may see has this UID")
        body: Json = {
            "lease": lease_details_json(lease, projection) if lease else None,
            "trace": self._trace(pod),
        }
        if waiting is not None:
            position = 1 + [each.queued.pod for each in projection.queue()].index(pod)
            body["waiting"] = waiting_details_json(waiting, position)
        return _json(body)

    async def namespace(self, request: web.Request) -> web.StreamResponse:
        """Return a namespace, and the history of its budget in the open window."""
        scope = await self._require_scope(request)
        name = Namespace(request.match_info["namespace"])
        views = [each for each in self.dashboard.projection.namespaces() if each.namespace == name]
        if not views or not scope.visible(name):
            return _error(404, "no such namespace that you may see has leases or waiting pods")
        return _json(
            namespace_json(views[0]) | {"budget_history": await self._budget_history(name)}
        )

    async def _budget_history(self, namespace: Namespace) -> Json | None:
        (account,) = await self.budgets.load({namespace: None})
        if not account.windows:
            return None
        window = account.windows[-1]
        entries: list[ChargeEntry] = []
        after = f"{window.start_ms}-0"
        for _ in range(MAX_ENTRY_PAGES):
            page = await self.budgets.entries(namespace, after=after, most=ENTRIES_PER_PAGE)
            entries += page
            if len(page) < ENTRIES_PER_PAGE:
                break
            after = page[-1].id
        now = self.dashboard.clock.now()
        return {
            "window": window.id,
            "start": window.start_ms / 1000,
            "end": None if window.end_ms is None else window.end_ms / 1000,
            "has_limit": window.allowed_units is not None,
            "points": budget_history(window, entries, at_ms=round(now * 1000)),
        }

    def _trace(self, pod: PodUid) -> Json:
        id_ = trace_id_of(pod)
        return {"id": id_, "url": self.trace_url.replace("{trace}", quote(id_, safe=""))}

    # Viewers

    async def _scope(self, request: web.Request) -> ViewerScope | None:
        viewer = await self.authenticator.authenticate(_token(request))
        if viewer is None:
            return None
        visible = await viewer.visible(self.dashboard.projection.known_namespaces())
        return ViewerScope(viewer, namespace_filter(visible))

    async def _require_ready_scope(self, request: web.Request) -> ViewerScope:
        scope = await self._require_scope(request)
        if reason := self.dashboard.unready_reason():
            raise UnavailableError(f"{reason}; retry in a second")
        return scope

    async def _require_scope(self, request: web.Request) -> ViewerScope:
        scope = await self._scope(request)
        if scope is None:
            raise web.HTTPUnauthorized(reason="send a valid token: Authorization: Bearer ...")
        return scope


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.cookies.get(VIEWER_COOKIE, "")


def _load_file(name: str) -> tuple[bytes, str]:
    body = (resources.files("services.dashboard") / "static" / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def _page_number(text: str) -> int:
    return max(int(text), 1) if text.isdecimal() and len(text) < 6 else 1


def _json(body: Any) -> web.Response:
    response = web.Response(body=encode(body), content_type="application/json")
    response.enable_compression()
    return response


def _html(text: str, *, status: int = 200, compress: bool = False) -> web.Response:
    response = web.Response(text=text, content_type="text/html", status=status)
    if compress:
        response.enable_compression()
    return response


def _error(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
