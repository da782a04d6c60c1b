"""`/api/v1`: what the page and the commands read. What a viewer may not see is not found."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from urllib.parse import quote

import msgspec
from aiohttp import web
from msgspec import structs

from services.api.first_pod import first_pod
from services.api.history import (
    HistoryPoint,
    budget_history,
    device_point,
    history_of,
    measured_by_namespace,
    namespace_point,
)
from services.api.service import ApiService
from services.api.visible_cluster import (
    NamespaceFilter,
    VisibleCluster,
    all_namespaces,
    preemptions_view,
    steps_as_spans,
)
from shared.credentials.authorization import Viewer
from shared.credentials.tokens import AccessDeniedError
from shared.ledger.budgets import Budgets
from shared.ledger.showback import GROUPS, EntryRange, add_up, showback_view
from shared.model.balance import balance
from shared.model.budget import (
    Accounts,
    Balance,
    Budget,
    BudgetsView,
    BudgetView,
    ChargeEntry,
    ReportView,
    minutes,
)
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.request_reply import (
    DryRunReply,
    DryRunRequest,
    GrantReply,
    GrantRequest,
    ResizeReply,
    ResizeRequest,
)
from shared.model.names import DeviceUuid, Namespace, PodUid
from shared.model.preemption import PlacingView
from shared.model.views import (
    BudgetHistory,
    DeviceView,
    DryRunView,
    GpusView,
    GrantOrder,
    GrantView,
    HistoryView,
    LeasesView,
    ManifestView,
    NamespaceDetails,
    NamespaceView,
    PodView,
    PreemptionsView,
    ResizeOrder,
    ResizeView,
    StateView,
    TraceView,
    View,
)
from shared.nats.bus import Bus
from shared.runtime.span_files import TraceSpan, read_spans, read_trace, span_views
from shared.runtime.telemetry import trace_id_of


def balances(found: Accounts) -> list[Balance]:
    """Return the balance of each account that has a window."""
    return [
        balance(each, each.budget or Budget(namespace=each.namespace), found.now_ms)
        for each in found.accounts
        if each.windows
    ]


def budget_view(found: Balance) -> BudgetView:
    """Return a balance."""
    allowed, remaining = found.allowed_units, found.remaining_units
    return BudgetView(
        namespace=found.namespace,
        state=found.state,
        window=found.window.id,
        window_start_ms=found.window.start_ms,
        window_end_ms=found.window.end_ms,
        used_units=str(found.used_units),
        allowed_units=None if allowed is None else str(allowed),
        remaining_units=None if remaining is None else str(remaining),
        used_gpu_minutes=minutes(found.used_units),
        current_rate_milli_gpu=found.current_rate_milli_gpu,
        leases=found.leases,
        problem=found.problem,
        exhausted_at=None if found.exhausted_at_ms is None else found.exhausted_at_ms / 1000,
    )


def uncharged_minutes(found: Iterable[Balance], window: str) -> dict[Namespace, str]:
    """Return the GPU-minutes of running leases that reports do not contain yet, by namespace.

    Only of open windows, and of those only `window` unless it is empty.
    """
    uncharged = {
        each.namespace: each.window_used_units - each.window.used_units
        for each in found
        if window in {"", each.window.id}
    }
    return {name: minutes(units) for name, units in uncharged.items() if units}


_UID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
T = TypeVar("T")
DAY_S = 24 * 3600.0
RESIZE_S = 20.0
"""A binder sends two requests to the node and writes to the pod before it replies."""
GRANT_S = 10.0
PLAN_S = 20.0
"""A binder reads all pods before it plans."""
MAX_ACTOR = 253
_OF_RESIZE_REPLY = (
    *("outcome", "container", "node", "devices", "before", "after", "pending", "notes"),
    *("reason", "hint"),
)
ENTRIES_PER_PAGE = 1000
MAX_ENTRY_PAGES = 5
"""Upper limit of the charges that a budget's chart is made from."""


@dataclass(frozen=True, slots=True)
class SpanDirectory:
    """A directory to which all services write their spans."""

    path: Path

    async def trace(self, id_: str) -> Sequence[TraceSpan]:
        """Return the spans of a trace by its ID."""
        return await asyncio.to_thread(read_trace, self.path, id_)

    async def of_pod(self, namespace: str, name: str) -> Sequence[TraceSpan]:
        """Return the spans of the newest trace of a pod, which may be gone."""
        return await asyncio.to_thread(read_spans, self.path, namespace=namespace, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One request of an authenticated viewer."""

    viewer: Viewer
    visible: NamespaceFilter
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    anonymous: bool = False
    """The viewer has sent no token, and needs none to read."""

    def decode(self, kind: type[T]) -> T:
        """Return the body. Raises RequestError with what is wrong with it."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid: {error}") from error

    def number(self, name: str) -> float | None:
        """Return a parameter. Raises RequestError if it is not a number of 0 or more."""
        text = self.query.get(name, "")
        if not text:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise RequestError(f"{name}={text} is not a number of 0 or more")
        return seconds

    def instant_ms(self, name: str) -> int | None:
        """Return a parameter that is an instant, RFC 3339. Raises RequestError for other text."""
        text = self.query.get(name, "")
        try:
            return round(datetime.fromisoformat(text).timestamp() * 1000) if text else None
        except (ValueError, OverflowError) as error:
            raise RequestError(
                f"{name}={text} is not a time such as 2031-05-01T00:00:00Z"
            ) from error


class ReadApi:
    """The handlers; each returns what is sent as JSON."""

    def __init__(
        self,
        service: ApiService,
        budgets: Budgets,
        bus: Bus,
        *,
        trace_url: str = "",
        spans: SpanDirectory | None = None,
    ) -> None:
        self.service = service
        self.budgets = budgets
        self.bus = bus
        self.trace_url = trace_url
        self.spans = spans

    def cluster(self, call: ApiCall) -> VisibleCluster:
        """Return the cluster as the viewer may see it."""
        return self.service.cluster(call.visible, call.number("idle_after_s"))

    async def state(self, call: ApiCall) -> StateView:
        """Return everything that the page shows; /api/v1/events continues from its `id`."""
        return self.cluster(call).state(self.service.feed.position)

    async def gpus(self, call: ApiCall) -> GpusView:
        """Return every device and its shares."""
        return self.cluster(call).gpus()

    async def leases(self, call: ApiCall) -> LeasesView:
        """Return the leases and the waiting pods."""
        query = call.query
        return self.cluster(call).leases(query.get("namespace", ""), query.get("name", ""))

    async def lease(self, call: ApiCall) -> PodView:
        """Return one pod's lease, or why it is waiting, and its trace."""
        pod = PodUid(call.path["pod"])
        lease = self.service.projection.lease_of(pod)
        found = self.cluster(call).pod(pod, await self._trace(lease.pod if lease else pod))
        if found is None:
            reason = "no lease, waiting pod or recent event that you may see has this UID"
            raise web.HTTPNotFound(reason=reason)
        return found

    async def trace(self, call: ApiCall) -> TraceView:
        """Return the trace of a pod by its name, also of one that is gone."""
        namespace, name = Namespace(call.path["namespace"]), call.path["pod"]
        sees_all = call.visible is all_namespaces
        found: Sequence[TraceSpan] = ()
        if self.spans and call.visible(namespace) and (sees_all or not _UID.fullmatch(name)):
            found = await self.spans.of_pod(namespace, name)
        if found:
            return self._trace_view(found[-1].trace, found)
        uid = self.service.projection.uid_of(namespace, name)
        if uid is None or not call.visible(namespace):
            raise web.HTTPNotFound(reason="no pod that you may see and of which a step is known")
        return await self._trace(uid)

    async def device(self, call: ApiCall) -> DeviceView:
        """Return one device and its shares."""
        return self.cluster(call).device(self._device(call))

    async def device_history(self, call: ApiCall) -> HistoryView:
        """Return the last day of a device, percent of it; measured for viewers of everything."""
        view, samples = self._device(call), self.service.history.devices
        points = history_of(samples, view.uuid, device_point(view), self.service.clock.now())
        return _history(points, measured=call.visible is all_namespaces)

    def _device(self, call: ApiCall) -> DeviceView:
        view = self.service.projection.devices.get(DeviceUuid(call.path["uuid"]))
        if view is None:
            raise web.HTTPNotFound(reason="no node reports this device")
        return view

    async def namespace(self, call: ApiCall) -> NamespaceDetails:
        """Return a namespace, and the history of its budget in the open window."""
        view = self._namespace(call)
        history = await self._budget_history(view)
        return NamespaceDetails(**structs.asdict(view), budget_history=history)

    async def namespace_history(self, call: ApiCall) -> HistoryView:
        """Return the last day of a namespace, MiB and percent of one device."""
        view = self._namespace(call)
        used = measured_by_namespace(self.service.projection.devices.values())
        samples, now = self.service.history.namespaces, self.service.clock.now()
        return _history(history_of(samples, view.namespace, namespace_point(view, used), now))

    def _namespace(self, call: ApiCall) -> NamespaceView:
        name = call.path["namespace"]
        found = [each for each in self.cluster(call).namespaces() if each.namespace == name]
        if not found:
            reason = "no such namespace that you may see has leases or waiting pods"
            raise web.HTTPNotFound(reason=reason)
        return found[0]

    async def first_pod(self, call: ApiCall) -> ManifestView:
        """Return the manifest of a pod to try on these nodes."""
        totals = self.service.projection.totals.values()
        return ManifestView(manifest=first_pod(name for one in totals for name in one.node.served))

    async def budgets_of(self, call: ApiCall) -> BudgetsView:
        """Return the budgets of the namespaces that the viewer may see."""
        accounts = await self.budgets.all_accounts(await self._charged_namespaces(call))
        found = tuple(map(budget_view, balances(accounts)))
        return BudgetsView(read_at=accounts.now_ms / 1000, budgets=found)

    async def showback(self, call: ApiCall) -> ReportView:
        """Sum up the GPU time of the namespaces that the viewer may see."""
        within = EntryRange(
            window=call.query.get("window", ""),
            from_ms=call.instant_ms("from"),
            to_ms=call.instant_ms("to"),
        )
        names = await self._charged_namespaces(call)
        group_by = [part for part in call.query.get("groupBy", "").split(",") if part] or GROUPS
        rows = showback_view(await add_up(self.budgets, names, within, group_by)).rows
        if within.to_ms is not None:
            return ReportView(rows=rows, not_charged={})
        now = balances(await self.budgets.all_accounts(names))
        return ReportView(rows=rows, not_charged=uncharged_minutes(now, within.window))

    async def _charged_namespaces(self, call: ApiCall) -> list[Namespace]:
        names = await self.budgets.revisions()
        seen = await call.viewer.visible(names)
        return sorted(names if seen is None else seen)

    async def preemptions(self, call: ApiCall) -> PreemptionsView:
        """Return the preemptions in progress, and the evictions of the last day."""
        now = self.service.clock.now()
        state = await self.service.preemptions.state(now=now, past_s=DAY_S)
        return preemptions_view(state, call.visible)

    async def preemption_plan(self, call: ApiCall) -> DryRunView:
        """Return the preemption of a waiting pod, or what a binder would plan for it."""
        self._require_all(call)
        pod, waiting = PodUid(call.path["pod"]), self.service.projection.waiting
        if pod not in waiting:
            raise web.HTTPNotFound(reason="no waiting pod has this UID")
        shown = await self.preemptions(call)
        in_progress = next((each for each in shown.in_progress if each.id == pod), None)
        name = f"{waiting[pod].queued.namespace}/{waiting[pod].queued.name}"
        if in_progress is not None:
            reason = "a preemption for it is in progress"
            return DryRunView(pod=name, reason=reason, in_progress=in_progress)
        request = DryRunRequest(pod=pod, min_runtime_s=call.number("min_runtime_s"))
        reply = await self.bus.request(request, DryRunReply, timeout_s=PLAN_S)
        if not reply.waits:
            raise web.HTTPNotFound(reason="the pod does not wait any more")
        return DryRunView(
            pod=name,
            plan=reply.plan,
            reason=reply.reason,
            protected=reply.protected,
            protected_left_out=reply.protected_left_out,
        )

    def _require_all(self, call: ApiCall) -> None:
        if call.visible is not all_namespaces:
            raise AccessDeniedError(
                f"{call.viewer.name} may not see all namespaces, on whose pods it depends",
                known=True,
            )

    async def placing(self, call: ApiCall) -> PlacingView:
        """Return all that placing and preemption decide on, to viewers of all namespaces."""
        self._require_all(call)
        now = self.service.clock.now()
        projection = self.service.projection
        return PlacingView(
            nodes=tuple(projection.totals[name] for name in sorted(projection.totals)),
            waiting=tuple(projection.queue()),
            preemptions=await self.service.preemptions.state(now=now, past_s=DAY_S),
        )

    # Requests with an effect

    async def resize(self, call: ApiCall) -> ResizeView:
        """Have a binder change the size of a running container."""
        pod = PodUid(call.path["pod"])
        lease = self.service.projection.lease_of(pod)
        if lease is None or not call.visible(lease.namespace):
            raise web.HTTPNotFound(reason="no lease that you may see has this UID")
        name = "" if lease.claim else lease.name
        may = await call.viewer.may_resize(lease.namespace, name)
        self._require(call, "patch pods/resize", lease.namespace, may=may)
        order = call.decode(ResizeOrder)
        try:
            reply = await self.bus.request(
                ResizeRequest(
                    pod=pod,
                    container=order.container,
                    memory_mib=order.memory_mib,
                    cores_percent=order.cores_percent,
                ),
                ResizeReply,
                timeout_s=RESIZE_S,
            )
        except UnavailableError as error:
            raise UnavailableError(
                f"no reply from a binder ({error}); the outcome is unknown: see `leasehold ps`, or "
                "send the request again, the same size is never granted twice"
            ) from error
        found = {name: getattr(reply, name) for name in _OF_RESIZE_REPLY}
        return ResizeView(pod=pod, namespace=lease.namespace, name=lease.name, **found)

    async def grant(self, call: ApiCall) -> GrantView:
        """Have the timekeeper grant GPU time to a namespace."""
        namespace = Namespace(call.path["namespace"])
        may = await call.viewer.may_grant(namespace)
        self._require(call, "create gpubudgets/grants of leasehold.dev", namespace, may=may)
        order = call.decode(GrantOrder)
        reply = await self.bus.request(
            GrantRequest(
                namespace=namespace,
                minutes=order.minutes,
                actor=call.viewer.name[:MAX_ACTOR],
                reason=order.reason,
                key=order.key,
            ),
            GrantReply,
            timeout_s=GRANT_S,
        )
        if reply.refusal:
            raise RequestError(reply.refusal)
        return GrantView(
            namespace=namespace,
            granted_minutes=reply.granted,
            remaining_minutes=reply.remaining or None,
        )

    def _require(self, call: ApiCall, right: str, namespace: Namespace, *, may: bool) -> None:
        """Raise AccessDeniedError unless the viewer may do it; anonymous viewers must log in."""
        if not may:
            text = f"{call.viewer.name} may not {right} in namespace {namespace}"
            raise AccessDeniedError(text, known=not call.anonymous)

    async def _budget_history(self, view: NamespaceView) -> BudgetHistory | None:
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
        is_reported = view.budget is not None and view.budget.window == window.id
        at = view.budget.at if view.budget and is_reported else self.service.clock.now()
        return budget_history(account, window, entries, at_ms=round(at * 1000))

    async def _trace(self, pod: PodUid) -> TraceView:
        """Return the spans that can be read here, or else the times of the pod's steps."""
        id_ = trace_id_of(pod)
        found = await self.spans.trace(id_) if self.spans else ()
        if found:
            return self._trace_view(id_, found)
        steps = self.service.projection.events.steps_of(pod)
        return TraceView(trace=id_, url=self._url_of(id_), spans=tuple(steps_as_spans(steps)))

    def _trace_view(self, id_: str, spans: Sequence[TraceSpan]) -> TraceView:
        return TraceView(trace=id_, url=self._url_of(id_), spans=span_views(spans))

    def _url_of(self, id_: str) -> str:
        return self.trace_url.replace("{trace}", quote(id_, safe=""))


def _history(
    points: Sequence[tuple[float, HistoryPoint | None]], *, measured: bool = True
) -> HistoryView:
    def column(name: str) -> Any:
        return tuple(None if point is None else getattr(point, name) for _, point in points)

    used = {name: column(name) for name in ("used_memory", "used_cores") if measured}
    at = tuple(at for at, _ in points)
    return HistoryView(at=at, memory=column("memory"), cores=column("cores"), **used)


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
ROUTES = (
    Route(path="/api/v1/state", handler=ReadApi.state, needs_sync=True),
    Route(path="/api/v1/gpus", handler=ReadApi.gpus, query=IDLE, needs_sync=True),
    Route(
        path="/api/v1/leases",
        handler=ReadApi.leases,
        query={"namespace": "of this namespace only", "name": "of this pod only", **IDLE},
        needs_sync=True,
    ),
    Route(path="/api/v1/leases/{pod}", handler=ReadApi.lease, query=IDLE, needs_sync=True),
    Route(path="/api/v1/traces/{namespace}/{pod}", handler=ReadApi.trace, needs_sync=True),
    Route(path="/api/v1/devices/{uuid}", handler=ReadApi.device),
    Route(path="/api/v1/devices/{uuid}/history", handler=ReadApi.device_history),
    Route(path="/api/v1/namespaces/{namespace}", handler=ReadApi.namespace),
    Route(path="/api/v1/namespaces/{namespace}/history", handler=ReadApi.namespace_history),
    Route(path="/api/v1/first-pod", handler=ReadApi.first_pod),
    Route(path="/api/v1/budgets", handler=ReadApi.budgets_of),
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
    Route(path="/api/v1/budgets/{namespace}/grants", handler=ReadApi.grant, body=GrantOrder),
    Route(path="/api/v1/placing", handler=ReadApi.placing, needs_sync=True),
)
