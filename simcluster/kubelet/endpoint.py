"""The kubelet's HTTPS endpoint with token: `/pods`, `/configz`, `/healthz`, `/debug/restart`."""

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web

from simcluster.apimachinery.objects import Json, encode
from simcluster.credentials import CertificateFiles
from simcluster.kubelet.api_link import ApiLink

Restart = Callable[[], Awaitable[None]]


class KubeletEndpoint:
    """Serves the pods and a setting of one kubelet; tests restart it."""

    def __init__(
        self,
        token: str,
        pods: Callable[[], list[Json]],
        restart: Restart,
        *,
        topology_policy: str,
        api: ApiLink,
    ) -> None:
        self._token = token
        self._pods = pods
        self._restart = restart
        self._topology_policy = topology_policy
        self._api = api
        self.allowed_resources = {"nodes/pods", "nodes/configz", "nodes/proxy"}
        """The subresources that the token's account may `get`; the last one allows all paths."""

    def application(self) -> web.Application:
        """Return the routes; all paths require the token."""
        app = web.Application(middlewares=[self._authenticated])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/pods", self._list_pods)
        app.router.add_get("/pods/", self._list_pods)
        app.router.add_get("/configz", self._show_settings)
        app.router.add_post("/debug/restart", self._restart_now)
        return app

    @web.middleware
    async def _authenticated(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="Unauthorized")
        return await handler(request)

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _list_pods(self, _request: web.Request) -> web.Response:
        self._check_allowed("pods")
        body = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self._pods()}
        return web.Response(body=encode(body), content_type="application/json")

    async def _show_settings(self, _request: web.Request) -> web.Response:
        self._check_allowed("configz")
        body = {"kubeletconfig": {"topologyManagerPolicy": self._topology_policy}}
        return web.Response(body=encode(body), content_type="application/json")

    def _check_allowed(self, subresource: str) -> None:
        if self._api.code == web.HTTPInternalServerError.status_code:
            raise web.HTTPInternalServerError(
                text=f"Authorization error (verb=get, resource=nodes, subresource={subresource})"
            )
        is_denied = self._api.code == web.HTTPForbidden.status_code
        if is_denied or not self.allowed_resources & {f"nodes/{subresource}", "nodes/proxy"}:
            raise web.HTTPForbidden(
                text=f"Forbidden (verb=get, resource=nodes, subresource={subresource})"
            )

    async def _restart_now(self, _request: web.Request) -> web.Response:
        await self._restart()
        return web.Response(text="restarted")


async def serve_https(
    application: web.Application, certificates: CertificateFiles, host: str, port: int
) -> tuple[web.AppRunner, int]:
    """Listen; return the runner and the port, which is another one if `port` is in use."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
    await runner.setup()
    context = certificates.server_context()
    site = web.TCPSite(runner, host, port, ssl_context=context)
    try:
        await site.start()
    except OSError:
        if not port:
            raise
        site = web.TCPSite(runner, host, 0, ssl_context=context)
        await site.start()
    return runner, int(runner.addresses[0][1])
