"""The paths of /api/v1, their handlers, parameters and bodies."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from services.api.api_call import ApiCall
from services.api.read_api import OF_FINISHED, ReadApi
from shared.model.views import GrantOrder, ResizeOrder, View
from shared.placing.what_if import WhatIfOrder

Handler = Callable[[ReadApi, ApiCall], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path, its handler, and the parameters of its query with their meaning."""

    path: str
    handler: Handler
    query: Mapping[str, str] = field(default_factory=dict)
    needs_sync: bool = False
    """It is unavailable before the ledger was read for the first time."""
    body: type[View] | None = None
    """The type of the body of a POST, or None for a GET."""

    @property
    def method(self) -> str:
        """The method of the request."""
        return "POST" if self.body else "GET"

    @property
    def returns(self) -> Any:
        """The type of the response's body."""
        return get_type_hints(self.handler)["return"]


IDLE = {"idle_after_s": "shares that have not been used for this long are marked as idle"}
RANGE = {"range": "1h, 1d (the default) or 7d"}
ROUTES = (
    Route(path="/api/v1/state", handler=ReadApi.state, needs_sync=True),
    Route(path="/api/v1/version", handler=ReadApi.version),
    Route(path="/api/v1/gpus", handler=ReadApi.gpus, query=IDLE, needs_sync=True),
    Route(
        path="/api/v1/leases",
        handler=ReadApi.leases,
        query={"namespace": "of this namespace only", "name": "of this pod only", **IDLE},
        needs_sync=True,
    ),
    Route(path="/api/v1/leases/{pod}", handler=ReadApi.lease, query=IDLE, needs_sync=True),
    Route(path="/api/v1/traces/{namespace}/{pod}", handler=ReadApi.trace, needs_sync=True),
    Route(path="/api/v1/nodes/{node}", handler=ReadApi.node),
    Route(path="/api/v1/devices/{uuid}", handler=ReadApi.device),
    Route(path="/api/v1/namespaces/{namespace}", handler=ReadApi.namespace),
    Route(path="/api/v1/history", handler=ReadApi.cluster_history, query=RANGE),
    Route(path="/api/v1/nodes/{node}/history", handler=ReadApi.node_history, query=RANGE),
    Route(path="/api/v1/devices/{uuid}/history", handler=ReadApi.device_history, query=RANGE),
    Route(path="/api/v1/leases/{pod}/history", handler=ReadApi.pod_history, query=RANGE),
    Route(
        path="/api/v1/namespaces/{namespace}/history",
        handler=ReadApi.namespace_history,
        query=RANGE,
    ),
    Route(
        path="/api/v1/finished",
        handler=ReadApi.finished,
        query={name: f"of this {name} only" for name in OF_FINISHED},
    ),
    Route(path="/api/v1/first-pod", handler=ReadApi.first_pod),
    Route(path="/api/v1/budgets", handler=ReadApi.budgets_of),
    Route(
        path="/api/v1/reports/idle",
        handler=ReadApi.idle,
        query={"limit": "so many pods; all by default", **IDLE},
        needs_sync=True,
    ),
    Route(
        path="/api/v1/reports/showback",
        handler=ReadApi.showback,
        query={
            "window": "the id of one window",
            "from": "RFC 3339",
            "to": "RFC 3339, exclusive",
            "groupBy": "of namespace, model, class, with commas",
        },
    ),
    Route(
        path="/api/v1/reports/costs",
        handler=ReadApi.costs,
        query={"from": "RFC 3339", "to": "RFC 3339, exclusive", "step": "hour or day"},
    ),
    Route(
        path="/allocation",
        handler=ReadApi.allocation,
        query={
            "window": "today, lastmonth, 7d, or two times with a comma, as for OpenCost",
            "step": "the length of periods; an hour at least",
            "aggregate": "namespace",
            "includeIdle": "true: and what was free",
        },
    ),
    Route(path="/api/v1/preemptions", handler=ReadApi.preemptions),
    Route(
        path="/api/v1/preemptions/{pod}",
        handler=ReadApi.preemption_plan,
        query={"min_runtime_s": "leases are safe for this long, instead of the binder's setting"},
        needs_sync=True,
    ),
    Route(
        path="/api/v1/leases/{pod}/resize",
        handler=ReadApi.resize,
        body=ResizeOrder,
        needs_sync=True,
    ),
    Route(
        path="/api/v1/budgets/{namespace}/ledger",
        handler=ReadApi.ledger,
        query={"from": "RFC 3339", "cursor": "of the page before"},
    ),
    Route(path="/api/v1/budgets/{namespace}/grants", handler=ReadApi.grant, body=GrantOrder),
    Route(path="/api/v1/what-if", handler=ReadApi.what_if, body=WhatIfOrder, needs_sync=True),
    Route(path="/api/v1/placing", handler=ReadApi.placing, needs_sync=True),
)
