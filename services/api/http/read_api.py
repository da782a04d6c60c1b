"""`/api/v1`: what the page and the commands read. What a viewer may not see is not found."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from msgspec import structs

from services.api.api_call import ApiCall, RouteTable
from services.api.http.first_pod import first_pod
from services.api.http.histories import PERIOD, RANGE, HistorySource, history_view
from services.api.http.pod_objects import PodObjects
from services.api.http.trials import Trials
from services.api.http.tried_pods import tried_pods
from services.api.projection.hinted_changes import hinted_changes
from services.api.projection.lease_views import (
    balances,
    budget_summary,
    budget_view,
    uncharged_minutes,
)
from services.api.projection.page_views import (
    BudgetHistory,
    FinishedView,
    HistoryView,
    LedgerPage,
    ManifestView,
    NamespaceDetails,
    NamespaceView,
    NodeView,
)
from services.api.projection.pod_object import PodObjectView
from services.api.projection.visible_cluster import (
    StateView,
    VisibleCluster,
    all_namespaces,
    preemptions_view,
)
from services.api.reports.costs import ALLOCATION, AllocationReply, allocation_report, cost_report
from services.api.reports.history import (
    CLUSTER,
    DEVICE,
    NAMESPACE,
    NODE,
    POD,
    Subject,
    budget_history,
)
from services.api.reports.pod_costs import cost_of_finished, cost_of_lease
from services.api.reports.showback import GROUPS, EntryRange, add_up, entry_json, showback_view
from services.api.service import ApiService
from shared.credentials.authorization import AccessDeniedError
from shared.dialects.dialect import Rules
from shared.kubernetes.kinds.gpu_prices import PriceFile
from shared.ledger.budgets import Budgets
from shared.model.bounds import check_bounds
from shared.model.budgets.budget import Accounts, ChargeEntry
from shared.model.budgets.cost_records import CostView
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.request_reply import (
    DryRunReply,
    DryRunRequest,
    GrantReply,
    GrantRequest,
    ResizeReply,
    ResizeRequest,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import DAY_S
from shared.model.views.budgets import BudgetsView, IdleView, ReportView
from shared.model.views.gpus import DeviceDetails, DeviceView, GpusView, NodeDevices
from shared.model.views.leases import LeasesView, LeaseView
from shared.model.views.orders import GrantOrder, GrantView, ResizeOrder, ResizeView, VersionView
from shared.model.views.pods import PodCost, PodView, SpanView, TraceView, WaitingDetails
from shared.model.views.preemptions import DryRunView, PlacingView, PreemptionsView
from shared.model.views.promises import PromisesView
from shared.nats.bus import Bus
from shared.placing.starts import start_without_plan, waiting_units, with_claims
from shared.placing.what_if import Forecast, WhatIfOrder, forecast
from shared.runtime.span_files import TraceSpan, read_spans, read_trace, span_views
from shared.runtime.telemetry import trace_id_of

_UID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
_CURSOR = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")
RESIZE_S = 20.0
"""A binder sends two requests to the node and writes to the pod before it replies."""
GRANT_S = 10.0
"""The timekeeper writes a grant before it replies."""
PLAN_S = 20.0
"""A planner reads all pods before it plans."""
MAX_ACTOR = 253
OF_FINISHED = ("namespace", "node", "name")
MOST_FINISHED = 500
ENTRIES_PER_PAGE = 1000
IDLE = {"idle_after_s": "shares that have not been used for this long are marked as idle"}
ROUTES = RouteTable()
MOST_CHARGES = 5000


class ReadApi:
    def __init__(
        self,
        service: ApiService,
        budgets: Budgets,
        bus: Bus,
        *,
        rules: Rules | None = None,
        histories: HistorySource | None = None,
        trace_url: str = "",
        spans: Path | None = None,
        prices: PriceFile | None = None,
        pods: PodObjects | None = None,
    ) -> None:
        self.service = service
        self.budgets = budgets
        self.bus = bus
        self.rules = rules or Rules()
        self.histories = histories or service.history
        self._trials = Trials()
        self.trace_url = trace_url
        self.spans = spans
        self.prices = prices or PriceFile()
        self.pods = pods or PodObjects(None)

    def cluster(self, call: ApiCall) -> VisibleCluster:
        return self.service.cluster(call.visible, call.number("idle_after_s"))

    @ROUTES.at("/api/v1/state", needs_sync=True)
    async def state(self, call: ApiCall) -> StateView:
        """Return everything that the page shows; /api/v1/events continues from its `id`."""
        return self.cluster(call).state(self.service.feed.position)

    @ROUTES.at("/api/v1/version")
    async def version(self, call: ApiCall) -> VersionView:
        """Return the versions that run, and who asks."""
        service = self.service
        versions = service.components.running(service.clock.now())
        user = "" if call.anonymous else call.viewer.name
        return VersionView(version=version("leasehold"), services=versions, user=user)

    @ROUTES.at("/api/v1/gpus", IDLE, needs_sync=True)
    async def gpus(self, call: ApiCall) -> GpusView:
        """Return every device and its shares."""
        return self.cluster(call).gpus()

    @ROUTES.at(
        "/api/v1/leases",
        {"namespace": "of this namespace only", "name": "of this pod only", **IDLE},
        needs_sync=True,
    )
    async def leases(self, call: ApiCall) -> LeasesView:
        """Return the leases and the waiting pods."""
        query = call.query
        return self.cluster(call).leases(query.get("namespace", ""), query.get("name", ""))

    @ROUTES.at(
        "/api/v1/leases/{pod}",
        {"changes": "true: also the changes that the hint of a waiting pod names", **IDLE},
        needs_sync=True,
    )
    async def lease(self, call: ApiCall) -> PodView:
        """Return one pod's lease, or why it is waiting, and its trace."""
        view = await self._pod(call)
        if view.waiting and call.query.get("changes") == "true":
            view = structs.replace(view, waiting=await self._with_changes(view.waiting, call))
        return structs.replace(view, has_object=self.pods.is_available)

    async def _with_changes(self, waiting: WaitingDetails, call: ApiCall) -> WaitingDetails:
        projection = self.service.projection
        stored = projection.waiting.get(waiting.pod)
        if stored is None:
            return waiting
        nodes = [totals.node for totals in projection.totals.values()]
        trial = partial(hinted_changes, stored.queued.request, waiting.hint, nodes)
        return structs.replace(waiting, changes=await self._trials.soon(call, trial) or ())

    async def _pod(self, call: ApiCall) -> PodView:
        pod = PodUid(call.path["pod"])
        lease = self.service.projection.lease_of(pod)
        trace = await self._trace(lease.pod if lease else pod)
        view = self.cluster(call).pod(pod, trace)
        if view is not None and view.waiting and not view.waiting.start:
            waiting = structs.replace(view.waiting, no_end=await self._no_end(pod, call))
            return structs.replace(view, waiting=waiting)
        if view is not None and view.lease:
            return structs.replace(view, cost=self._cost_of(view.lease))
        if view is not None and view.waiting:
            return view
        now = self.service.clock.now()
        finished = self.service.history.finished_pod(pod, now)
        if finished is not None and call.visible(finished.namespace):
            return PodView(
                read_at=now,
                pod=pod,
                namespace=finished.namespace,
                name=finished.name,
                finished=finished,
                cost=cost_of_finished(
                    finished, self.service.projection.devices, self.prices.read()
                ),
                trace=trace,
            )
        if view is None:
            reason = "no lease, waiting, recent or finished pod that you may see has this UID"
            raise web.HTTPNotFound(reason=reason)
        return view

    def _cost_of(self, lease: LeaseView) -> PodCost:
        projection = self.service.projection
        now = self.service.clock.now()
        prices = self.prices.read()
        return cost_of_lease(lease, projection.devices, projection.hardware, prices, now)

    async def _no_end(self, pod: PodUid, call: ApiCall) -> str:
        now = self.service.clock.now()
        projection = self.service.projection
        totals = list(projection.totals.values())
        end_of = partial(projection.end_of, now=now)
        try:  # after the nodes, so that a start that claims devices of these is among them
            starts = (await self.service.preemptions.state(now=now, past_s=0)).starts
        except UnavailableError:
            return ""
        if any(pod in start.pods for start in starts):
            return ""
        nodes = with_claims(totals, starts, ())
        for unit in waiting_units(projection.waiting.values(), nodes, now=now, after_s=0):
            if any(waiting.queued.pod == pod for waiting in unit.pods):
                trial = partial(
                    start_without_plan, unit, nodes, end_of, now=now, visible=call.visible
                )
                return await self._trials.soon(call, trial) or ""
        return ""

    @ROUTES.at("/api/v1/pods/{namespace}/{pod}")
    async def pod_object(self, call: ApiCall) -> PodObjectView:
        """Return a pod as the API server has it, and its Events; variables have no values."""
        return await self.pods.read(call, Namespace(call.path["namespace"]), call.path["pod"])

    @ROUTES.at("/api/v1/traces/{namespace}/{pod}", needs_sync=True)
    async def trace(self, call: ApiCall) -> TraceView:
        """Return the trace of a pod by its name, also of one that is gone."""
        namespace, name = Namespace(call.path["namespace"]), call.path["pod"]
        sees_all = call.visible is all_namespaces
        spans: Sequence[TraceSpan] = ()
        if self.spans and call.visible(namespace) and (sees_all or not _UID.fullmatch(name)):
            read = partial(read_spans, self.spans, namespace=namespace, name=name)
            spans = await asyncio.to_thread(read)
        if spans:
            return self._trace_view(spans[-1].trace, span_views(spans))
        uid = self.service.projection.uid_of(namespace, name)
        if uid is None or not call.visible(namespace):
            raise web.HTTPNotFound(reason="no pod that you may see and of which a step is known")
        return await self._trace(uid)

    @ROUTES.at("/api/v1/devices/{uuid}")
    async def device(self, call: ApiCall) -> DeviceDetails:
        """Return one device, its shares, and what its sensors read."""
        return self.cluster(call).details(self._device(call))

    @ROUTES.at("/api/v1/nodes/{node}")
    async def node(self, call: ApiCall) -> NodeDevices:
        """Return one node with its devices."""
        return self.cluster(call).node(self._node(call))

    @ROUTES.at("/api/v1/history", RANGE)
    async def cluster_history(self, call: ApiCall) -> HistoryView:
        """Return the amounts of the cluster over time, and how many pods waited for what reason."""
        views = list(self.service.projection.devices.values())
        return await self._history(call, Subject(kind=CLUSTER), views)

    @ROUTES.at("/api/v1/nodes/{node}/history", RANGE)
    async def node_history(self, call: ApiCall) -> HistoryView:
        """Return the amounts of a node over time."""
        name = self._node(call).node
        views = [view for view in self.service.projection.devices.values() if view.node == name]
        return await self._history(call, Subject(kind=NODE, name=name), views)

    @ROUTES.at("/api/v1/devices/{uuid}/history", RANGE)
    async def device_history(self, call: ApiCall) -> HistoryView:
        """Return the amounts of a device over time."""
        view = self._device(call)
        return await self._history(call, Subject(kind=DEVICE, name=view.uuid), [view])

    @ROUTES.at("/api/v1/leases/{pod}/history", RANGE)
    async def pod_history(self, call: ApiCall) -> HistoryView:
        """Return the amounts over time of a pod that has a lease, or finished within a day."""
        pod = PodUid(call.path["pod"])
        lease = self.service.projection.lease_of(pod)
        holder = lease or self.service.history.finished_pod(pod, self.service.clock.now())
        if holder is None or not call.visible(holder.namespace):
            raise web.HTTPNotFound(reason="no lease or finished pod that you may see has this UID")
        subject = Subject(kind=POD, name=pod, namespace=holder.namespace, pod=holder.name)
        return await self._history(call, subject)

    async def _history(
        self, call: ApiCall, subject: Subject, devices: Sequence[DeviceView] = ()
    ) -> HistoryView:
        now = self.service.clock.now()
        return await history_view(call, self.histories, subject, now=now, devices=devices)

    def _node(self, call: ApiCall) -> NodeView:
        view = self.service.projection.nodes.get(NodeName(call.path["node"]))
        if view is None:
            raise web.HTTPNotFound(reason="there is no such node with GPUs")
        return view

    def _device(self, call: ApiCall) -> DeviceView:
        view = self.service.projection.devices.get(DeviceUuid(call.path["uuid"]))
        if view is None:
            raise web.HTTPNotFound(reason="no node reports this device")
        return view

    @ROUTES.at("/api/v1/namespaces/{namespace}")
    async def namespace(self, call: ApiCall) -> NamespaceDetails:
        """Return a namespace, its budget as of now, and the budget's history in the open window."""
        view = self._namespace(call)
        accounts = await self.budgets.all_accounts([view.namespace])
        current = balances(accounts)
        if not current:
            return NamespaceDetails.from_attributes(view)
        budget = budget_summary(current[0], view.budget)
        history = await self._budget_history(accounts)
        return NamespaceDetails.from_attributes(view, budget=budget, budget_history=history)

    @ROUTES.at("/api/v1/namespaces/{namespace}/history", RANGE)
    async def namespace_history(self, call: ApiCall) -> HistoryView:
        """Return the amounts of a namespace over time."""
        name = self._namespace(call).namespace
        return await self._history(call, Subject(kind=NAMESPACE, name=name, namespace=name))

    @ROUTES.at(
        "/api/v1/reports/idle", {"limit": "so many pods; all by default", **IDLE}, needs_sync=True
    )
    async def idle(self, call: ApiCall) -> IdleView:
        """Return what idle shares hold, by pod."""
        limit = call.number("limit")
        return self.cluster(call).idle(None if limit is None else int(limit))

    @ROUTES.at("/api/v1/finished", {name: f"of this {name} only" for name in OF_FINISHED})
    async def finished(self, call: ApiCall) -> FinishedView:
        """Return the pods that finished within a day; at most 500, the latest first."""
        now = self.service.clock.now()
        leases = self.service.projection.totals.values()
        live = {lease.pod for totals in leases for lease in totals.leases}
        asked = {name: value for name in OF_FINISHED if (value := call.query.get(name))}
        pods = [
            finished
            for finished in self.service.history.finished(now)
            if call.visible(finished.namespace)
            and finished.pod not in live
            and all(getattr(finished, name) == value for name, value in asked.items())
        ]
        return FinishedView(
            read_at=now, since=now - DAY_S, total=len(pods), pods=tuple(pods[:MOST_FINISHED])
        )

    def _namespace(self, call: ApiCall) -> NamespaceView:
        name = call.path["namespace"]
        views = [view for view in self.cluster(call).namespaces() if view.namespace == name]
        if not views:
            reason = "no such namespace that you may see has leases or waiting pods"
            raise web.HTTPNotFound(reason=reason)
        return views[0]

    @ROUTES.at("/api/v1/first-pod")
    async def first_pod(self, call: ApiCall) -> ManifestView:
        """Return the manifest of a pod to try on these nodes."""
        totals = self.service.projection.totals.values()
        return ManifestView(
            manifest=first_pod(name for node in totals for name in node.node.served)
        )

    @ROUTES.at("/api/v1/budgets")
    async def budgets_of(self, call: ApiCall) -> BudgetsView:
        """Return the budgets of the namespaces that the viewer may see."""
        accounts = await self.budgets.all_accounts(await self._charged_namespaces(call))
        views = tuple(map(budget_view, balances(accounts)))
        return BudgetsView(read_at=accounts.now_ms / 1000, budgets=views)

    @ROUTES.at(
        "/api/v1/reports/showback",
        {
            "window": "the id of one window",
            **PERIOD,
            "groupBy": "of namespace, model, class, with commas",
        },
    )
    async def showback(self, call: ApiCall) -> ReportView:
        """Sum up the GPU time of the namespaces that the viewer may see."""
        start, end = call.period_ms()
        within = EntryRange(window=call.query.get("window", ""), from_ms=start, to_ms=end)
        names = await self._charged_namespaces(call)
        group_by = [part for part in call.query.get("groupBy", "").split(",") if part] or GROUPS
        rows = showback_view(await add_up(self.budgets, names, within, group_by)).rows
        if within.to_ms is not None:
            return ReportView(rows=rows, not_charged={})
        now = balances(await self.budgets.all_accounts(names))
        return ReportView(rows=rows, not_charged=uncharged_minutes(now, within.window))

    @ROUTES.at(
        "/api/v1/budgets/{namespace}/ledger",
        {"from": "RFC 3339", "cursor": "of the page before"},
    )
    async def ledger(self, call: ApiCall) -> LedgerPage:
        """Return the entries of a namespace's budget, oldest first, 1000 at a time."""
        namespace = Namespace(call.path["namespace"])
        cursor = call.query.get("cursor", "")
        if namespace not in await self._charged_namespaces(call):
            raise web.HTTPNotFound(reason="no such namespace that you may see has used a GPU")
        if cursor and not _CURSOR.fullmatch(cursor):
            raise RequestError(f"cursor={cursor} is not the id of an entry")
        begin = max(call.instant_ms("from") or 0, 0)
        after = cursor or (f"{begin - 1}-{(1 << 64) - 1}" if begin else "")
        page = await self.budgets.entries(namespace, after=after, most=ENTRIES_PER_PAGE)
        last = page[-1].id if len(page) == ENTRIES_PER_PAGE else None
        return LedgerPage(
            entries=tuple(entry_json(entry, namespace) for entry in page), cursor=last
        )

    @ROUTES.at("/api/v1/reports/costs", {**PERIOD, "step": "hour or day"})
    async def costs(self, call: ApiCall) -> CostView:
        """Report what all GPUs were used for, and what that cost: by default of 30 days."""
        return await cost_report(call, self.budgets, self.prices)

    @ROUTES.at("/api/v1/reports/starts", PERIOD)
    async def starts(self, call: ApiCall) -> PromisesView:
        """Report how many promised starts were kept, and how early: by default of 30 days."""
        start, end = (None if ms is None else ms / 1000 for ms in call.period_ms())
        return self.service.promises.view(call.visible, self.service.clock.now(), start, end)

    @ROUTES.at("/allocation", ALLOCATION)
    @ROUTES.at("/allocation/compute", ALLOCATION)  # of OpenCost's exporter
    async def allocation(self, call: ApiCall) -> AllocationReply:
        """Report the GPU time and costs of namespaces in the form of OpenCost's API."""
        now = self.service.clock.now()
        return await allocation_report(call, self.budgets, self.prices, now)

    async def _charged_namespaces(self, call: ApiCall) -> list[Namespace]:
        names = await self.budgets.revisions()
        seen = await call.viewer.visible(names)
        return sorted(names if seen is None else seen)

    @ROUTES.at("/api/v1/preemptions")
    async def preemptions(self, call: ApiCall) -> PreemptionsView:
        """Return the preemptions in progress, and the evictions of the last day."""
        now = self.service.clock.now()
        state = await self.service.preemptions.state(now=now, past_s=DAY_S)
        return preemptions_view(state, call.visible)

    @ROUTES.at(
        "/api/v1/preemptions/{pod}",
        {"min_runtime_s": "leases are safe for this long, instead of the binder's setting"},
        needs_sync=True,
    )
    async def preemption_plan(self, call: ApiCall) -> DryRunView:
        """Return the preemption of a waiting pod, or what a planner would plan for it."""
        self._require_all(call)
        pod = PodUid(call.path["pod"])
        now = self.service.clock.now()
        state = await self.service.preemptions.state(now=now, past_s=0)
        own = state.preemption_for(pod)
        if own is not None:
            [preemptor] = (preemptor for preemptor in own.preemptors if preemptor.pod == pod)
            name = f"{preemptor.namespace}/{preemptor.name}"
            views = preemptions_view(state, call.visible).in_progress
            [in_progress] = (preemption for preemption in views if preemption.id == own.id)
            reason = "a preemption for it is in progress"
            return DryRunView(pod=name, reason=reason, in_progress=in_progress)
        waiting = self.service.projection.waiting.get(pod)
        if waiting is None:
            raise web.HTTPNotFound(reason="no waiting pod has this UID")
        name = f"{waiting.queued.namespace}/{waiting.queued.name}"
        request = DryRunRequest(pod=pod, min_runtime_s=call.number("min_runtime_s"))
        check_bounds(request, "min_runtime_s")
        reply = await self.bus.request(request, DryRunReply, timeout_s=PLAN_S)
        if not reply.waits:
            raise web.HTTPNotFound(reason="the pod does not wait any more")
        return DryRunView.from_attributes(reply, pod=name)

    def _require_all(self, call: ApiCall) -> None:
        if call.visible is not all_namespaces:
            raise AccessDeniedError(
                f"{call.viewer.name} may not see all namespaces, on whose pods it depends",
                authenticated=True,
            )

    @ROUTES.at("/api/v1/placing", needs_sync=True)
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

    @ROUTES.at("/api/v1/what-if", body=WhatIfOrder, needs_sync=True)
    async def what_if(self, call: ApiCall) -> Forecast:
        """Return whether the pods of a manifest would fit now, where, and what is missing."""
        order = call.decode(WhatIfOrder)
        now = self.service.clock.now()
        starts = (await self.service.preemptions.state(now=now, past_s=0)).starts
        nodes = with_claims(self.service.projection.totals.values(), starts, ())
        end_of = partial(self.service.projection.end_of, now=now) if order.when else None
        async with self._trials.turn(call):
            pods = await asyncio.to_thread(tried_pods, order.manifest, self.rules)
            trial = partial(forecast, nodes=nodes, now=now, visible=call.visible, end_of=end_of)
            return await asyncio.to_thread(trial, pods)

    # Requests with an effect

    @ROUTES.at("/api/v1/leases/{pod}/resize", body=ResizeOrder, needs_sync=True)
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
        actor = call.viewer.name[:MAX_ACTOR]
        request = ResizeRequest(pod=pod, actor=actor, **structs.asdict(order))
        try:
            reply = await self.bus.request(request, ResizeReply, timeout_s=RESIZE_S)
        except UnavailableError as error:
            raise UnavailableError(
                f"no reply from a binder ({error}); the outcome is unknown: see `leasehold ps`, or "
                "send the request again, the same size is never granted twice"
            ) from error
        return ResizeView.from_attributes(reply, lease, pod=pod)

    @ROUTES.at("/api/v1/budgets/{namespace}/grants", body=GrantOrder)
    async def grant(self, call: ApiCall) -> GrantView:
        """Have the timekeeper grant GPU time to a namespace."""
        namespace = Namespace(call.path["namespace"])
        may = await call.viewer.may_grant(namespace)
        self._require(call, "create gpubudgets/grants of leasehold.dev", namespace, may=may)
        order = call.decode(GrantOrder)
        actor = call.viewer.name[:MAX_ACTOR]
        request = GrantRequest(namespace=namespace, actor=actor, **structs.asdict(order))
        check_bounds(request, f"the grant to {namespace}")
        reply = await self.bus.request(request, GrantReply, timeout_s=GRANT_S)
        if reply.refusal:
            raise RequestError(reply.refusal)
        return GrantView(
            namespace=namespace,
            granted_minutes=reply.granted,
            remaining_minutes=reply.remaining or None,
            missing_minutes=reply.missing or None,
        )

    def _require(self, call: ApiCall, right: str, namespace: Namespace, *, may: bool) -> None:
        """Raises AccessDeniedError; anonymous viewers must log in."""
        if not may:
            text = f"{call.viewer.name} may not {right} in namespace {namespace}"
            raise AccessDeniedError(text, authenticated=not call.anonymous)

    async def _budget_history(self, accounts: Accounts) -> BudgetHistory:
        (account,) = accounts.accounts
        window = account.windows[-1]
        entries: list[ChargeEntry] = []
        async for entry in self.budgets.all_entries(
            account.namespace, after=f"{window.start_ms}-0"
        ):
            entries.append(entry)
            if len(entries) == MOST_CHARGES:
                break
        return budget_history(account, window, entries, at_ms=accounts.now_ms)

    async def _trace(self, pod: PodUid) -> TraceView:
        id_ = trace_id_of(pod)
        spans = await asyncio.to_thread(read_trace, self.spans, id_) if self.spans else ()
        if spans:
            return self._trace_view(id_, span_views(spans))
        return self._trace_view(id_, self.service.projection.events.spans_of(pod))

    def _trace_view(self, id_: str, spans: tuple[SpanView, ...]) -> TraceView:
        url = self.trace_url.replace("{trace}", quote(id_, safe=""))
        return TraceView(trace=id_, url=url, spans=spans)
