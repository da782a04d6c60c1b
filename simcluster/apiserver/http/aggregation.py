"""The aggregation layer: APIServices, whose groups another server serves behind this one."""

import base64
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, decode
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.admission.service_address import resolve_address
from simcluster.apiserver.rbac import RoleIndex
from simcluster.apiserver.requests.authorization import attributes_of, authorize
from simcluster.apiserver.requests.query_parameters import is_set
from simcluster.apiserver.requests.request_target import RequestTarget
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.credentials import CertificateFiles

FRONT_PROXY = "front-proxy"
_SYSTEM: Json = {"username": "system:kube-aggregator", "groups": ["system:masters"]}
_PASSED = ("Accept", "Content-Type")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_PATH = re.compile(r"/apis/[^/]+/[^/]+/(?:namespaces/([^/]+)/)?([^/]+)(?:/([^/]+))?(?:/([^/]+))?")


class Aggregator:
    """Passes requests on with the front proxy's certificate, and the user in headers."""

    def __init__(self, store: ObjectStore, roles: RoleIndex) -> None:
        self._store = store
        self._roles = roles
        self._files: CertificateFiles | None = None

    def present(self, files: CertificateFiles) -> None:
        """Use this certificate, and publish its authority as API servers do."""
        self._files = files
        name, namespace = "extension-apiserver-authentication", "kube-system"
        data = {
            "requestheader-allowed-names": f'["{FRONT_PROXY}"]',
            "requestheader-client-ca-file": files.ca.read_text(),
            "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
            "requestheader-group-headers": '["X-Remote-Group"]',
            "requestheader-username-headers": '["X-Remote-User"]',
        }
        if self._store.find("configmaps", namespace, name) is None:
            metadata = {"name": name, "namespace": namespace}
            self._store.create("configmaps", {"metadata": metadata, "data": data})

    def service_of(self, path: str) -> Json | None:
        """Return the specification of the APIService that serves a path, or None."""
        return next(
            (
                spec
                for spec in self._served()
                for below in (f"/apis/{spec['group']}/{spec['version']}",)
                if path.removeprefix("/openapi/v3").startswith(f"{below}/")
                or path == f"/openapi/v3{below}"
            ),
            None,
        )

    def _served(self) -> Iterator[Json]:
        for api_service in self._store.list("apiservices"):
            if at_path(api_service, "spec.service"):
                yield api_service["spec"]

    async def kinds(self, path: str) -> list[Resource]:
        """Return the kinds of groups whose servers respond, if the path is one of discovery."""
        resources: list[Resource] = []
        for spec in self._served() if path.rstrip("/").count("/") < 4 else ():
            group = spec["group"]
            version = spec["version"]
            try:
                async with self._sent("GET", spec, f"/apis/{group}/{version}", _SYSTEM) as response:
                    listed = decode(await response.read()) if response.status == 200 else {}
            except (LookupError, aiohttp.ClientError, TimeoutError):
                continue
            resources += [
                Resource(
                    plural=resource["name"],
                    kind=resource["kind"],
                    group=group,
                    version=version,
                    namespaced=resource["namespaced"],
                    short_names=tuple(resource.get("shortNames", ())),
                    categories=tuple(resource.get("categories", ())),
                    verbs=tuple(resource["verbs"]),
                )
                for resource in listed.get("resources", ())
            ]
        return resources

    async def serve(self, request: web.BaseRequest, spec: Json, user: Json) -> web.StreamResponse:
        """Authorize a request and pass it on; 503 if the server does not respond."""
        if match := _PATH.fullmatch(request.path):
            namespace, plural, name, below = (part or "" for part in match.groups())
            kind = Resource(plural=plural, kind="", group=spec["group"], version=spec["version"])
            watch = is_set(request.query, "watch")
            fields = request.query.get("fieldSelector", "")
            target = RequestTarget(kind, namespace, name, below)
            attributes = attributes_of(request.method, target, watch=watch, fields=fields)
            authorize(self._roles, user, attributes)
        headers = {key: request.headers[key] for key in _PASSED if key in request.headers}
        body = await request.read() or None
        try:
            async with self._sent(
                request.method, spec, request.path_qs, user, headers=headers, data=body
            ) as found:
                response = web.StreamResponse(status=found.status)
                response.headers["Content-Type"] = found.headers.get("Content-Type", "text/plain")
                await response.prepare(request)
                async for part in found.content.iter_any():
                    await response.write(part)
                return response
        except (LookupError, aiohttp.ClientConnectorError) as error:
            text = f"error trying to reach service: {error}"
            raise ApiError(503, "ServiceUnavailable", text) from error

    @asynccontextmanager
    async def _sent(
        self, method: str, spec: Json, path: str, user: Json, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._files is None:
            raise LookupError("there is no certificate of the front proxy")
        address = resolve_address({"service": spec["service"]}, self._store)
        bundle = base64.b64decode(spec.get("caBundle") or "").decode()
        context = ssl.create_default_context(cadata=bundle or None)
        # Like Go, accept certificates without the extensions that strict mode requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(self._files.certificate, self._files.key)
        groups = [("X-Remote-Group", group) for group in user.get("groups", ())]
        async with (
            aiohttp.ClientSession(
                headers=[("X-Remote-User", user["username"]), *groups], timeout=_TIMEOUT
            ) as session,
            session.request(
                method,
                f"{address.dial_url.rstrip('/')}{path}",
                ssl=context,
                server_hostname=address.server_name,
                **more,
            ) as response,
        ):
            yield response
