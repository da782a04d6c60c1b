"""The group visibility.leasehold.dev, which the API server passes on to us: kubectl's view.

The API server has authenticated and authorized the request, and nothing else can connect: no second
review is made. `views/...` are the paths of /api/v1, for the commands.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import structs

from services.api.aggregated.front_proxy import FrontProxy
from services.api.aggregated.objects import (
    API_VERSION,
    BASE,
    CATEGORY,
    GROUP,
    KINDS,
    VERBS,
    VERSION,
    Kind,
    Metadata,
    Selection,
    VisibleObject,
    parse_fields,
    parse_labels,
    table,
)
from services.api.aggregated.versions import REMEMBERED_S, Objects, Versions
from services.api.api_call import Route
from services.api.http.http_server import (
    PORT_BOUNDS,
    Handler,
    HttpServer,
    error_response,
    refusal,
)
from services.api.http.read_api import ROUTES
from shared.credentials.authorization import KubernetesAuthenticator, KubernetesViewer
from shared.kubernetes.tokens import TokenUser
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.quantity import parse_decimal
from shared.runtime.listener import BOUNDS

REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
           405: "MethodNotAllowed", 410: "Expired", 422: "Invalid", 429: "TooManyRequests",
           503: "ServiceUnavailable"}  # fmt: skip
USER = web.RequestKey("user", TokenUser)
COMPARE_S = 1.0
"""Pause between two comparisons of the objects with what a watch has sent."""
GONE_S = 10.0
"""A watch ends this long after its client has gone, if it has nothing to send."""
UNREADY_S = 0.2
"""Pause between two looks whether the ledger was read."""
WATCH_S = 1800.0
"""The time limit of a watch."""
REF = "#/components/schemas/{name}"
encode = msgspec.json.Encoder().encode


class AggregatedApi:
    def __init__(self, server: HttpServer, reviews: KubernetesAuthenticator) -> None:
        self.server = server
        self.service = server.service
        self.reviews = reviews
        self.proxy: FrontProxy | None = None
        self.served = asyncio.Event()
        self.versions = {kind.plural: Versions(kind) for kind in KINDS}

    def application(self) -> web.Application:
        pages = web.Application(middlewares=[self.authenticate])
        pages[BOUNDS] = PORT_BOUNDS
        add = pages.router.add_get
        for path, document in documents().items():
            add(path, partial(self.document, encode(document)))
        for kind in KINDS:
            for path in (kind.plural, f"namespaces/{{namespace}}/{kind.plural}")[
                : 1 + kind.namespaced
            ]:
                add(f"{BASE}/{path}", partial(self.list, kind))
                add(f"{BASE}/{path}/{{name}}", partial(self.get, kind))
        for route in ROUTES:
            view = (
                route.path.removeprefix("/api/v1")
                .lstrip("/")
                .replace("/", ":")
                .replace("}", ":[^:/]+}")
            )
            pages.router.add_route(route.method, f"{BASE}/views/{view}", partial(self.view, route))
        return pages

    @web.middleware
    async def authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        user = self.proxy.user_of(request) if self.proxy else None
        if user is None:
            return _refused(401, "only the API server, with the name of its front proxy, is served")
        request[USER] = user
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed:
            return _refused(405, f"{GROUP} is read-only: it shows what Leasehold has decided")
        except (web.HTTPException, LeaseholdError) as error:
            return _refused(*refusal(error))

    async def remember(self) -> None:
        """Clients of other replicas continue from these versions."""
        sleep = self.service.clock.sleep
        while True:
            while self.service.unready_reason():
                await sleep(UNREADY_S)
            for versions in self.versions.values():
                versions.record(self.service)
            await sleep(REMEMBERED_S)

    async def document(self, body: bytes, _: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async def get(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        version, objects = self._selected(kind, request)
        if not objects:
            name = json.dumps(request.match_info["name"])
            raise web.HTTPNotFound(reason=f"{kind.plural}.{GROUP} {name} not found")
        return _json(self._encodable(kind, objects.values(), version, request))

    async def list(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        version, objects = self._selected(kind, request)
        if request.query.get("watch") in {"1", "true"}:
            return await self.watch(kind, request)
        if request.query.get("continue"):
            raise RequestError("there is no next page: lists are returned whole, whatever `limit`")
        ordered = [objects[key] for key in sorted(objects)]
        if _as_table(request):
            return _json(self._encodable(kind, ordered, version, request))
        head = {"kind": f"{kind.kind}List", "apiVersion": API_VERSION}
        items = [_versioned(item, version) for item in ordered]
        return _json({**head, "metadata": {"resourceVersion": str(version)}, "items": items})

    async def watch(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """An unknown version is an event, as in Kubernetes."""
        query = request.query
        if "sendInitialEvents" in query:
            raise web.HTTPUnprocessableEntity(reason="sendInitialEvents is not served: list first")
        limit_s = min(parse_decimal(query.get("timeoutSeconds", "")) or WATCH_S, WATCH_S)
        sent = self.versions[kind.plural].at(query.get("resourceVersion", ""), self.service)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        viewer = KubernetesViewer(self.reviews, request[USER])
        with suppress(TimeoutError, ConnectionResetError):  # the client watches again
            async with self.server.staying_open(viewer), asyncio.timeout(limit_s):
                await response.prepare(request)
                if sent is None:
                    expired = _status(410, f"too old resource version: {query['resourceVersion']}")
                    await response.write(encode({"type": "ERROR", "object": expired}) + b"\n")
                    return response
                async for change, item, version in self._changes(kind, request, sent):
                    shown = self._encodable(kind, [item], version, request)
                    await response.write(encode({"type": change, "object": shown}) + b"\n")
        return response

    async def _changes(
        self, kind: Kind, request: web.Request, sent: Objects
    ) -> AsyncIterator[tuple[str, VisibleObject, int]]:
        selection = _selection(kind, request)
        while True:
            position = self.service.feed.position
            version, objects = self._latest(kind)
            # An object that has not changed is the same one in both versions.
            before, after = (
                selection.of(_beyond(sent, objects)),
                selection.of(_beyond(objects, sent)),
            )
            for key in before.keys() - after.keys():
                yield "DELETED", before[key], version
            for key, item in after.items():
                yield "MODIFIED" if key in before else "ADDED", item, version
            sent = objects
            await self.service.feed.wait_after(position, limit_s=GONE_S)
            if request.transport is None or request.transport.is_closing():
                return
            await asyncio.sleep(COMPARE_S)

    def _selected(self, kind: Kind, request: web.Request) -> tuple[int, Objects]:
        version, objects = self._latest(kind)
        return version, _selection(kind, request).of(objects)

    def _latest(self, kind: Kind) -> tuple[int, Objects]:
        if reason := self.service.unready_reason():
            raise UnavailableError(f"{reason}; retry in a second")
        return self.versions[kind.plural].update(self.service)

    def _encodable(
        self, kind: Kind, objects: Iterable[VisibleObject], version: int, request: web.Request
    ) -> object:
        shown = [_versioned(item, version) for item in objects]
        if not _as_table(request):
            return shown[0]
        include = request.query.get("includeObject", "")
        now = self.service.clock.now()
        return table(kind, shown, now, include) | {"metadata": {"resourceVersion": str(version)}}

    async def view(self, route: Route, request: web.Request) -> web.StreamResponse:
        call = await self.server.call_of(request, KubernetesViewer(self.reviews, request[USER]))
        try:
            return await self.server.respond_to(call, route, request)
        except (web.HTTPException, LeaseholdError) as error:
            return error_response(*refusal(error))


def _beyond(objects: Objects, others: Objects) -> Objects:
    return {key: item for key, item in objects.items() if others.get(key) is not item}


def _versioned(item: VisibleObject, version: int) -> VisibleObject:
    metadata = structs.replace(item.metadata, resource_version=str(version))
    return structs.replace(item, metadata=metadata)


def _json(body: object) -> web.Response:
    return web.Response(body=encode(body), content_type="application/json")


def _status(code: int, message: str) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(code, ""),
        "code": code,
    }


def _refused(code: int, message: str) -> web.Response:
    return web.json_response(_status(code, message), status=code)


def _as_table(request: web.Request) -> bool:
    return "as=Table" in request.headers.get("Accept", "").partition(",")[0]


def _selection(kind: Kind, request: web.Request) -> Selection:
    return Selection(
        namespace=request.match_info.get("namespace", ""),
        name=request.match_info.get("name", ""),
        labels=parse_labels(request.query.get("labelSelector", "")),
        fields=parse_fields(request.query.get("fieldSelector", ""), kind),
    )


def documents() -> dict[str, dict[str, Any]]:
    """Return discovery and the types for `kubectl explain`, by path."""
    served = {"groupVersion": API_VERSION, "version": VERSION}
    group = {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "versions": [served],
        "preferredVersion": served,
    }
    resources = [
        {
            "name": kind.plural,
            "singularName": kind.kind.lower(),
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": VERBS,
            "shortNames": kind.short_names,
            "categories": [CATEGORY],
        }
        for kind in KINDS
    ]
    listing = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": API_VERSION}
    index = {"paths": {BASE[1:]: {"serverRelativeURL": f"/openapi/v3{BASE}"}}}
    return {
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        f"/apis/{GROUP}": group,
        BASE: {**listing, "resources": resources},
        "/openapi/v2": {
            "swagger": "2.0",
            "info": {"title": GROUP, "version": VERSION},
            "paths": {},
        },
        "/openapi/v3": index,
        f"/openapi/v3{BASE}": _openapi(),
    }


def _openapi() -> dict[str, Any]:
    types = [Metadata, *(kind.status for kind in KINDS)]
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    text = {"type": "string"}
    paths = {}
    for kind in KINDS:
        gvk = {"group": GROUP, "version": VERSION, "kind": kind.kind}
        schemas[kind.kind] = {
            "description": kind.status.__doc__,
            "type": "object",
            "properties": {
                "apiVersion": text,
                "kind": text,
                "metadata": {"$ref": REF.format(name="Metadata")},
                "status": {"$ref": REF.format(name=kind.status.__name__)},
            },
            "x-kubernetes-group-version-kind": [gvk],
        }
        place = "namespaces/{namespace}/" if kind.namespaced else ""
        action = {"x-kubernetes-action": "list", "x-kubernetes-group-version-kind": gvk}
        paths[f"{BASE}/{place}{kind.plural}"] = {"get": {**action, "responses": {}}}
    return {
        "openapi": "3.0.0",
        "info": {"title": GROUP, "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas},
    }
