"""Responses that depend on no object: health, version, discovery, OpenAPI."""

import re
from collections.abc import Callable

from aiohttp import web

from simcluster.apimachinery.objects import JsonValue, encode
from simcluster.apimachinery.resources import Kinds
from simcluster.apiserver.http import discovery, openapi
from simcluster.apiserver.http.messages import json_response
from simcluster.apiserver.requests.object_writes import method_not_allowed
from simcluster.apiserver.requests.request_target import PATH_NOT_FOUND

_HEALTH = frozenset({"/healthz", "/readyz", "/livez"})
OPEN_PATHS = _HEALTH | {"/version"}
_AGGREGATED = re.compile(
    r"application/json;(?=[^,]*as=APIGroupDiscoveryList)(?=[^,]*g=apidiscovery\.k8s\.io)"
    r"[^,]*v=(v2beta1|v2)\b"
)


def static_response(request: web.BaseRequest, kinds: Kinds) -> web.Response | None:
    """Respond to a request that needs no store; None for other requests."""
    path = request.path.rstrip("/")
    if path in _HEALTH or path.startswith(("/livez/", "/readyz/", "/healthz/")):
        return web.Response(text="ok")
    if path.startswith("/openapi/"):
        return _openapi(request, path, kinds)
    found = _discovery(request, path, kinds)
    if found is not None and request.method != "GET":
        raise method_not_allowed(request.method)
    return found


def _discovery(request: web.BaseRequest, path: str, kinds: Kinds) -> web.Response | None:
    simple: dict[str, Callable[[], JsonValue]] = {
        "/version": discovery.version,
        "/api": lambda: discovery.core_versions(request.host),
        "/apis": lambda: discovery.group_list(kinds),
        "/api/v1": lambda: discovery.resource_list(kinds, "", "v1"),
        "": lambda: {"paths": ["/api", "/apis", "/healthz", "/openapi/v2", "/version"]},
    }
    if path in {"/api", "/apis"}:
        match = _AGGREGATED.search(request.headers.get("Accept", "").replace(" ", ""))
        if match is not None:
            form = match[1]
            body = discovery.aggregated(kinds, core=path == "/api", form=form)
            content_type = (
                f"application/json;g={discovery.AGGREGATED};v={form};as=APIGroupDiscoveryList"
            )
            return json_response(encode(body), content_type=content_type)
    if path in simple:
        return json_response(encode(simple[path]()))
    parts = path.split("/")
    if len(parts) in {3, 4} and parts[1] == "apis":
        served = discovery.versions(kinds, parts[2])
        if not served or (parts[3:] and parts[3] not in served):
            raise PATH_NOT_FOUND
        if parts[3:]:
            return json_response(encode(discovery.resource_list(kinds, parts[2], parts[3])))
        return json_response(encode(discovery.group(kinds, parts[2])))
    return None


def _openapi(request: web.BaseRequest, path: str, kinds: Kinds) -> web.Response:
    if path == "/openapi/v2":
        if "proto-openapi.spec.v2" in request.headers.get("Accept", ""):
            return json_response(openapi.document_v2_protobuf(), content_type=openapi.PROTOBUF_V2)
        return json_response(encode(openapi.document_v2()))
    if path == "/openapi/v3":
        return json_response(encode(openapi.index_v3(kinds)))
    below = path.removeprefix("/openapi/v3/")
    if below not in discovery.group_versions(kinds):
        raise PATH_NOT_FOUND
    return json_response(encode(openapi.document_v3(kinds, below)))
