"""services/proxy: GET and POST requests to an endpoint of a Service, without our credentials.

As in Kubernetes, certificates of services are not verified. In contrast to it, responses are not
streamed, and other methods are not served.
"""

import re
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from simcluster.apimachinery.errors import ApiError
from simcluster.apiserver.admission.service_address import endpoint_of_port
from simcluster.apiserver.rbac_rules import ResourceAttributes
from simcluster.apiserver.requests.object_writes import method_not_allowed
from simcluster.apiserver.storage.store import ObjectStore

_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/services/([^/]+)/proxy(/.*)?")
_REMOVED = frozenset({"authorization", "host", "connection", "accept-encoding"})
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ProxiedService:
    """The target of a request: a Service by `SCHEME:NAME:PORT`, `NAME:PORT` or `NAME`."""

    namespace: str
    segment: str
    path: str

    def attributes(self, method: str) -> ResourceAttributes:
        """Return what a role must allow."""
        verb = "create" if method == "POST" else "get"
        return ResourceAttributes(verb, "", "services/proxy", self.namespace, self.segment)

    @property
    def scheme(self) -> str:
        """`https` if it is in front of the name, else `http`."""
        return "https" if self.segment.startswith("https:") else "http"

    @property
    def name_and_port(self) -> tuple[str, str]:
        """The name of the Service, and the name or number of its port; empty: its only one."""
        parts = self.segment.split(":")
        if len(parts) == 3:
            return parts[1], parts[2]
        return parts[0], "".join(parts[1:])


def parse_proxied(path: str) -> ProxiedService | None:
    """Return the Service that a path is proxied to; None: it is no such path."""
    match = _PATH.fullmatch(path)
    return None if match is None else ProxiedService(match[1], match[2], match[3] or "/")


async def serve_proxied(
    request: web.BaseRequest, store: ObjectStore, service: ProxiedService
) -> web.Response:
    """Return the response of the endpoint; 503 if there is none, or if it does not respond."""
    if request.method not in {"GET", "POST"}:
        raise method_not_allowed(request.method)
    name, port = service.name_and_port
    record = store.read("services", service.namespace, name)
    headers = {key: text for key, text in request.headers.items() if key.lower() not in _REMOVED}
    try:
        address = endpoint_of_port(store, record, port)
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.request(
                request.method,
                f"{service.scheme}://{address}{service.path}",
                params=request.query,
                headers=headers,
                data=await request.read() or None,
                ssl=False,
            ) as response,
        ):
            body = await response.read()
            kind = response.headers.get("Content-Type", "application/octet-stream")
            return web.Response(body=body, status=response.status, headers={"Content-Type": kind})
    except LookupError as error:
        raise ApiError(503, "ServiceUnavailable", str(error)) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"error trying to reach service: {error}"
        raise ApiError(503, "ServiceUnavailable", text) from error
