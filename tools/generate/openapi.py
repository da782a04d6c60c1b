"""`docs/openapi.json`: the API's paths and types, from its routes and Structs."""

import inspect
import json
import re
from typing import Any

import msgspec

from services.api.api_call import Route
from services.api.http.read_api import ROUTES
from services.api.projection.visible_cluster import DeltaView
from tools.generate.pages import ROOT

PAGE = ROOT / "docs" / "openapi.json"
REF = "#/components/schemas/{name}"
ERROR = {
    "description": "The request is refused, or (503) cannot be done now.",
    "content": {"application/json": {"schema": {"$ref": REF.format(name="Error")}}},
}


class Error(msgspec.Struct):
    """Why a request is refused."""

    error: str


def generated() -> str:
    """Return the document."""
    kinds = [
        *(kind for route in ROUTES for kind in (route.returns, route.body) if kind),
        DeltaView,
        Error,
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    paths: dict[str, Any] = {}
    by_kind = dict(zip(kinds, schemas, strict=True))
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Leasehold",
            "version": "v1",
            "description": "Amounts are MiB, percent of one device and Unix seconds. "
            "`/api/v1/events?after=ID` streams a DeltaView as server-sent event for every change "
            "after the `id` of a StateView.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return json.dumps(document, indent=1) + "\n"


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    in_path = re.findall(r"{(\w+)}", route.path)
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": inspect.getdoc(route.handler),
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in in_path
            ),
            *(
                {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
                for name, text in route.query.items()
            ),
        ],
        "responses": {
            "200": {
                "description": "OK",
                "content": {"application/json": {"schema": schemas[route.returns]}},
            },
            "default": ERROR,
        },
    }
    if route.body:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
