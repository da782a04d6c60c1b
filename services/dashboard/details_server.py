"""The parts of `/api/v1` about one device, lease or namespace, and a pod to try."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from services.dashboard.api_responses import all_namespaces, device_json, namespace_json
from services.dashboard.details_json import (
    budget_history_json,
    ended_pod_json,
    first_pod,
    history_json,
    lease_details_json,
    steps_json,
    waiting_details_json,
)
from services.dashboard.event_stream import encode
from services.dashboard.history import (
    device_point,
    history_of,
    measured_by_namespace,
    namespace_point,
)
from services.dashboard.projection import NamespaceView
from services.dashboard.service import Dashboard
from services.dashboard.viewers import Viewers
from shared.ledger.budgets import Budgets
from shared.model.budget import ChargeEntry
from shared.model.cluster_view import Json
from shared.model.names import DeviceUuid, Namespace, PodUid
from shared.runtime.span_files import TraceSpan, spans_json
from shared.runtime.telemetry import trace_id_of

ENTRIES_PER_PAGE = 1000
MAX_ENTRY_PAGES = 5
"""Upper limit of the charges that a budget's chart is made from."""
TraceReader = Callable[[str], Awaitable[Sequence[TraceSpan]]]
"""Returns the spans of a trace by its ID."""


def json_response(body: Any) -> web.Response:
    """Return a body as compressed JSON."""
    response = web.Response(body=encode(body), content_type="application/json")
    response.enable_compression()
    return response


class DetailsServer:
    """Handlers. What a viewer may not see is not found."""

    def __init__(
        self,
        dashboard: Dashboard,
        viewers: Viewers,
        budgets: Budgets,
        *,
        trace_url: str,
        read_trace: TraceReader | None,
    ) -> None:
        self.dashboard = dashboard
        self.viewers = viewers
        self.budgets = budgets
        self.trace_url = trace_url
        self.read_trace = read_trace

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""
        router.add_get("/api/v1/devices/{uuid}", self.device)
        router.add_get("/api/v1/devices/{uuid}/history", self.device_history)
        router.add_get("/api/v1/leases/{pod}", self.lease)
        router.add_get("/api/v1/namespaces/{namespace}", self.namespace)
        router.add_get("/api/v1/namespaces/{namespace}/history", self.namespace_history)
        router.add_get("/api/v1/first-pod", self.first_pod)

    async def device(self, request: web.Request) -> web.StreamResponse:
        """Return one device and its shares."""
        scope = await self.viewers.require(request)
        view = self.dashboard.projection.devices.get(DeviceUuid(request.match_info["uuid"]))
        if view is None:
            raise web.HTTPNotFound(reason="no node reports this device")
        return json_response(device_json(view, scope.visible))

    async def device_history(self, request: web.Request) -> web.StreamResponse:
        """Return the last day of a device, percent of it; measured for viewers of everything."""
        scope = await self.viewers.require(request)
        uuid = DeviceUuid(request.match_info["uuid"])
        view = self.dashboard.projection.devices.get(uuid)
        if view is None:
            raise web.HTTPNotFound(reason="no node reports this device")
        samples, now = self.dashboard.history.devices, self.dashboard.clock.now()
        points = history_of(samples, uuid, device_point(view), now)
        return json_response(history_json(points, measured=scope.visible is all_namespaces))

    async def lease(self, request: web.Request) -> web.StreamResponse:
        """Return one pod's lease, or why it is waiting, and its trace."""
        scope = await self.viewers.require(request)
        pod = PodUid(request.match_info["pod"])
        projection = self.dashboard.projection
        lease, waiting = projection.lease_of(pod), projection.waiting.get(pod)
        latest = projection.events.latest_of(pod)
        known = lease or (waiting and waiting.queued) or latest
        if known is None or not scope.visible(known.namespace):
            reason = "no lease, waiting pod or recent event that you may see has this UID"
            raise web.HTTPNotFound(reason=reason)
        body: Json = {
            "lease": lease_details_json(lease, projection) if lease else None,
            "trace": await self._trace(lease.pod if lease else pod),
        }
        if waiting is not None:
            position = 1 + [each.queued.pod for each in projection.queue()].index(pod)
            body["waiting"] = waiting_details_json(waiting, position)
        elif lease is None and latest is not None:
            body["ended"] = ended_pod_json(latest)
        return json_response(body)

    async def namespace(self, request: web.Request) -> web.StreamResponse:
        """Return a namespace, and the history of its budget in the open window."""
        view = await self._namespace_view(request)
        return json_response(
            namespace_json(view) | {"budget_history": await self._budget_history(view)}
        )

    async def namespace_history(self, request: web.Request) -> web.StreamResponse:
        """Return the last day of a namespace, MiB and percent of one device."""
        view = await self._namespace_view(request)
        used = measured_by_namespace(self.dashboard.projection.devices.values())
        samples, now = self.dashboard.history.namespaces, self.dashboard.clock.now()
        points = history_of(samples, view.namespace, namespace_point(view, used), now)
        return json_response(history_json(points))

    async def _namespace_view(self, request: web.Request) -> NamespaceView:
        scope = await self.viewers.require(request)
        name = Namespace(request.match_info["namespace"])
        views = [each for each in self.dashboard.projection.namespaces() if each.namespace == name]
        if not views or not scope.visible(name):
            reason = "no such namespace that you may see has leases or waiting pods"
            raise web.HTTPNotFound(reason=reason)
        return views[0]

    async def first_pod(self, request: web.Request) -> web.StreamResponse:
        """Return the manifest of a pod to try on these nodes; null if none serves a resource."""
        await self.viewers.require(request)
        nodes = self.dashboard.projection.nodes.values()
        return json_response(
            {"manifest": first_pod(name for node in nodes for name in node.served)}
        )

    async def _budget_history(self, view: NamespaceView) -> Json | None:
        (account,) = await self.budgets.load({view.namespace: None})
        if not account.windows:
            return None
        window = account.windows[-1]
        entries: list[ChargeEntry] = []
        after = f"{window.start_ms}-0"
        for _ in range(MAX_ENTRY_PAGES):
            page = await self.budgets.entries(view.namespace, after=after, most=ENTRIES_PER_PAGE)
            entries += page
            if len(page) < ENTRIES_PER_PAGE:
                break
            after = page[-1].id
        known = view.budget
        is_reported = known is not None and known.window == window.id
        at = known.reported_at if known and is_reported else self.dashboard.clock.now()
        return budget_history_json(account, window, entries, at_ms=round(at * 1000))

    async def _trace(self, pod: PodUid) -> Json:
        """Return the spans that can be read here, or else the times of the pod's steps."""
        id_ = trace_id_of(pod)
        found = await self.read_trace(id_) if self.read_trace else ()
        steps = self.dashboard.projection.events.steps_of(pod)
        return {
            "id": id_,
            "url": self.trace_url.replace("{trace}", quote(id_, safe="")),
            "spans": spans_json(found)["spans"] if found else steps_json(steps),
        }
