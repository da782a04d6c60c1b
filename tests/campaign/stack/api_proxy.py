"""An HTTPS proxy in front of the API server, which is slow, refuses, or loses answers."""

import asyncio
import functools
import json
import ssl
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from shared.kubernetes.kubeconfig import load_credentials

HOST = "127.0.0.1"
WITHDRAWN = b'"GPUStartWithdrawn"'
"""The reason of such Events."""
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
EVERY = {"api-slow": 1, "api-410": 1}
"""Every how many matching requests a fault works; others on two of three."""
_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "host"})
_REASONS = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
}


def status(code: int) -> web.Response:
    """Return an error as the API server words it."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": _REASONS[code],
        "message": f"injected by the campaign: {_REASONS[code]}",
        "code": code,
    }
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.json_response(body, status=code, headers=headers)


class ApiProxy:
    """One part's way to the API server."""

    def __init__(self, upstream: int, tls: Path, account: Path) -> None:
        self.account = account
        """The kubeconfig of the part's account, which exists once the API server serves."""
        self.url = f"https://{HOST}:{upstream}"
        self.tls = tls
        self.port = 0
        self.fault = ""
        """The kind of fault that is at work: api-slow, api-409, ..., api-after-write."""
        self.delay_s = 0.0
        """Of `api-slow`."""
        self.evicted: dict[str, float] = {}
        """UIDs of pods whose eviction was accepted, and when."""
        self.withdrawn: dict[str, float] = {}
        """UIDs of pods of which an Event has withdrawn the planned start, and when it last did."""
        self.denied = ""
        """A request that the part's account, or what it wrote, was not allowed."""
        self._matched = 0
        self._open = asyncio.Event()
        self._open.set()

    async def start(self) -> None:
        """Listen on a free port with the API server's own certificate."""
        trust = ssl.create_default_context(cafile=str(self.tls / "ca.crt"))
        connector = aiohttp.TCPConnector(limit=0, ssl=trust)
        no_limit = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=no_limit, auto_decompress=False
        )
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.tls / "server.crt", self.tls / "server.key")
        self._runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """End all connections."""
        await self._runner.cleanup()
        await self._session.close()

    def cut(self) -> None:
        """Hold back all requests and answers."""
        self._open.clear()

    def heal(self) -> None:
        """Let them through."""
        self._open.set()

    @functools.cached_property
    def _authorization(self) -> str:
        return f"Bearer {load_credentials(self.account).token}"

    def _hits(self, method: str, query: str) -> bool:
        """Whether the fault works on this request."""
        match self.fault:
            case "":
                return False
            case "api-409" | "api-after-write":
                applies = method in WRITES
            case "api-410":
                applies = method == "GET" and ("resourceVersion=" in query or "continue=" in query)
            case _:
                applies = True
        self._matched += applies
        return applies and (EVERY.get(self.fault) == 1 or self._matched % 3 != 0)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        await self._open.wait()
        hit = self.fault if self._hits(request.method, request.query_string) else ""
        if hit == "api-slow":
            await asyncio.sleep(self.delay_s)
        elif hit and hit != "api-after-write":
            return status(int(hit.removeprefix("api-")))
        return await self._forward(request, lose_answer=hit == "api-after-write")

    async def _forward(self, request: web.BaseRequest, *, lose_answer: bool) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        headers["Authorization"] = self._authorization
        url = f"{self.url}{request.raw_path}"
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers
            ) as answer:
                if request.path.endswith("/eviction") and answer.ok:
                    self._note_eviction(body)
                if request.method == "POST" and WITHDRAWN in body and answer.ok:
                    self.withdrawn[json.loads(body)["involvedObject"]["uid"]] = time.time()
                if answer.status == web.HTTPForbidden.status_code:
                    text = await answer.text()
                    self.denied = f"{request.method} {request.raw_path}: {text}"
                    return web.json_response(text=text, status=answer.status)
                if lose_answer:
                    await answer.read()
                    return status(500)
                return await self._copy(request, answer)
        except (aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None

    def _note_eviction(self, body: bytes) -> None:
        options = json.loads(body)["deleteOptions"]
        if not options.get("dryRun"):
            self.evicted.setdefault(options["preconditions"]["uid"], time.time())

    async def _copy(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
        response = web.StreamResponse(status=answer.status, headers=headers)
        if "Content-Length" in answer.headers:
            response.content_length = int(answer.headers["Content-Length"])
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await self._open.wait()
            await response.write(chunk)
        await response.write_eof()
        return response
