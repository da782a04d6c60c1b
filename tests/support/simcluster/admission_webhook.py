"""A webhook server for tests: real TLS with a CA of its own, answers by script."""

import base64
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from simcluster.apimachinery.objects import Json, encode
from simcluster.credentials import CertificateFiles, load_certificates

Answer = Callable[[Json], Json | Awaitable[Json] | web.Response]
_MADE: list[tuple[tempfile.TemporaryDirectory[str], CertificateFiles]] = []
"""Made once for all tests of a process, and removed when it ends."""


def allow(_request: Json) -> Json:
    """Allow the request."""
    return {"allowed": True}


def deny(message: str = "", **status: Any) -> Answer:
    """Deny the request."""
    full_status = {**status, **({"message": message} if message else {})}
    return lambda _request: {"allowed": False, "status": full_status}


def patch(*operations: Json) -> Answer:
    """Allow the request and patch the object."""
    encoded = base64.b64encode(encode(list(operations))).decode()
    return lambda _request: {"allowed": True, "patchType": "JSONPatch", "patch": encoded}


def label(key: str, value: str) -> Answer:
    """Allow the request and set one label."""

    def answer(request: Json) -> Json:
        meta = request["object"]["metadata"]
        operation = {"op": "add", "path": f"/metadata/labels/{key}", "value": value}
        first = [] if "labels" in meta else [{"op": "add", "path": "/metadata/labels", "value": {}}]
        made: Any = patch(*first, operation)(request)
        return dict(made)

    return answer


@dataclass(slots=True)
class WebhookUnderTest:
    """The address of the server, its requests, and its reply for each path."""

    port: int
    certificates: CertificateFiles
    answers: dict[str, Answer] = field(default_factory=dict)
    received: list[tuple[str, Json]] = field(default_factory=list)

    @property
    def bundle(self) -> str:
        """The CA, as a configuration carries it."""
        return base64.b64encode(self.certificates.ca.read_bytes()).decode()

    def requests(self, path: str) -> list[Json]:
        """Return the requests of one path, in order."""
        return [request for called, request in self.received if called == path]

    def hook(self, name: str, answer: Answer, **more: Any) -> Json:
        """Describe a webhook about pods, served here; `more` overrides its fields."""
        path = f"/{name}"
        self.answers[path] = answer
        rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"],
                "resources": ["pods"]}  # fmt: skip
        return {
            "name": f"{name}.leasehold.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{self.port}{path}",
                             "caBundle": self.bundle},
            "rules": [rule],
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            **more,
        }  # fmt: skip

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        request_body = body["request"]
        self.received.append((request.path, request_body))
        answered = self.answers[request.path](request_body)
        if isinstance(answered, Awaitable) and not isinstance(answered, web.Response):
            answered = await answered
        if isinstance(answered, web.Response):
            return answered
        response = {"uid": request_body["uid"], **answered}
        return web.json_response({**body, "request": None, "response": response})


def configuration(kind: str, name: str, *hooks: Json) -> Json:
    """Describe a `Mutating` or `Validating` configuration."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": f"{kind}WebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": list(hooks),
    }


@asynccontextmanager
async def webhook_server() -> AsyncIterator[WebhookUnderTest]:
    """Serve on a free port; the certificate is good for 127.0.0.1 and hook.default.svc."""
    if not _MADE:
        directory = tempfile.TemporaryDirectory(prefix="lh-hook-")
        _MADE.append((directory, load_certificates(Path(directory.name), "hook.default.svc")))
    _, certificate = _MADE[0]
    webhook = WebhookUnderTest(0, certificate)
    app = web.Application()
    app.router.add_post("/{name}", webhook.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    context: ssl.SSLContext = certificate.server_context()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    try:
        await site.start()
        webhook.port = runner.addresses[0][1]
        yield webhook
    finally:
        await runner.cleanup()
