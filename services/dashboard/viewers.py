"""Who sends a request, and which namespaces they may see."""

from dataclasses import dataclass

from aiohttp import web

from services.dashboard.api_responses import NamespaceFilter
from services.dashboard.event_stream import namespace_filter
from services.dashboard.service import Dashboard
from shared.credentials.authorization import Authenticator, Viewer
from shared.credentials.tokens import VIEWER_COOKIE
from shared.model.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class ViewerScope:
    """A viewer, and the namespaces that it may see."""

    viewer: Viewer
    visible: NamespaceFilter


class Viewers:
    """The viewers of a dashboard, by the token of their requests."""

    def __init__(self, dashboard: Dashboard, authenticator: Authenticator) -> None:
        self.dashboard = dashboard
        self.authenticator = authenticator

    async def scope(self, request: web.Request) -> ViewerScope | None:
        """Return the sender's scope; None: its token is not valid."""
        viewer = await self.authenticator.authenticate(token_of(request))
        if viewer is None:
            return None
        visible = await viewer.visible(self.dashboard.projection.known_namespaces())
        return ViewerScope(viewer, namespace_filter(visible))

    async def require(self, request: web.Request) -> ViewerScope:
        """Return the sender's scope. Raises HTTPUnauthorized."""
        scope = await self.scope(request)
        if scope is None:
            raise web.HTTPUnauthorized(reason="send a valid token: Authorization: Bearer ...")
        return scope

    async def require_ready(self, request: web.Request) -> ViewerScope:
        """Return the sender's scope. Raises also UnavailableError before the first reading."""
        scope = await self.require(request)
        if reason := self.dashboard.unready_reason():
            raise UnavailableError(f"{reason}; retry in a second")
        return scope


def token_of(request: web.Request) -> str:
    """Return the token of a request: of its header, or else of the page's cookie."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.cookies.get(VIEWER_COOKIE, "")
