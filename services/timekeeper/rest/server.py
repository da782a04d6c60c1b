"""The HTTP interface: the proof of concept's paths as far as they are safe, and /v1.

Errors are JSON `{"error": ...}`. Nothing that a tenant's pod can send changes a balance.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from aiohttp import web

from services.timekeeper.accounts.budget import OUT, consequence
from services.timekeeper.report.showback import GROUPS, Range, add_up, as_csv, entry_shape, shape
from services.timekeeper.report.status_publisher import REPORTS
from services.timekeeper.report.statuses import minutes, stamp
from services.timekeeper.rest.grants import Store as GrantStore
from services.timekeeper.rest.grants import grant, units_of
from services.timekeeper.service import Configuration, Timekeeper
from shared.credentials.authorization import Authenticator, Viewer
from shared.credentials.tokens import EVERYTHING, AccessDeniedError
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import NotFoundError
from shared.model.budget import UNITS_PER_GPU_MINUTE, Balance, ChargeEntry
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.names import Namespace

PAGE_MAX = 1000
GONE = (
    "GPU time is counted from leases; nothing has to be reported. Take the container gpu-sidecar "
    "out of the pod's template"
)
SIDECAR = "gpu-sidecar"
_CURSOR = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")
"""A place in a ledger, as the store names it."""
_MILLISECONDS = re.compile(r"[0-9]{1,18}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Store(GrantStore, Protocol):
    """What is read of the store."""

    async def revisions(self) -> dict[Namespace, int]:
        """Return every account's revision."""
        ...

    async def entries(
        self, namespace: Namespace, *, after: str = "", most: int = PAGE_MAX
    ) -> list[ChargeEntry]:
        """Return entries after the one named."""
        ...


class Pages:
    """The handlers of all paths."""

    def __init__(
        self,
        keeper: Timekeeper,
        store: Store,
        configuration: Configuration,
        door: Authenticator,
        *,
        kube: KubernetesClient | None,
        old_reports: str,
    ) -> None:
        if old_reports not in {"answer", "gone"}:
            raise RequestError(f"--old-reports {old_reports!r} is neither answer nor gone")
        self.keeper = keeper
        self.store = store
        self.configuration = configuration
        self.door = door
        self.kube = kube
        self.answers_reports = old_reports == "answer" and kube is not None

    def application(self) -> web.Application:
        """Return the application."""
        pages = web.Application(middlewares=[_told])
        pages.router.add_get("/budget/{namespace}", self.old_budget)
        pages.router.add_post("/budget/{namespace}/report", self.old_report)
        pages.router.add_post("/budget/{namespace}/increase", self.old_increase)
        pages.router.add_get("/v1/budgets", self.budgets)
        pages.router.add_get("/v1/budgets/{namespace}", self.budget)
        pages.router.add_post("/v1/budgets/{namespace}/grants", self.grants)
        pages.router.add_get("/v1/budgets/{namespace}/ledger", self.ledger)
        pages.router.add_get("/v1/reports/showback", self.showback)
        return pages

    def reports(self) -> web.Application:
        """Return what GPUSharing's sidecars call: they know neither TLS nor tokens."""
        pages = web.Application(middlewares=[_told])
        pages.router.add_post("/budget/{namespace}/report", self.old_report)
        return pages

    async def old_budget(self, request: web.Request) -> web.Response:
        """Answer the proof of concept's question, with more fields than it had."""
        return web.json_response(self._old_shape(await self._balance(request)))

    async def old_report(self, request: web.Request) -> web.Response:
        """Charge nothing. Tell a sidecar that is still there when it may end."""
        REPORTS.inc()
        if not self.answers_reports:
            return _error(410, GONE)
        body = await _body(request)
        name = body.get("pod_name")
        if not isinstance(name, str) or not name:
            raise RequestError("pod_name is wanted")
        return web.json_response({"terminate": await self._is_over(_namespace(request), name)})

    async def old_increase(self, request: web.Request) -> web.Response:
        """Grant, for those who may."""
        seen = await self._grant(request)
        return web.json_response(self._old_shape(seen))

    async def budgets(self, request: web.Request) -> web.Response:
        """List those namespaces with a budget or with use that the caller may see."""
        names = {*await self.store.revisions(), *self.configuration.namespaces()}
        seen = [self.keeper.balance_of(name) for name in await self._visible(request, names)]
        return web.json_response({"budgets": [self._shape(each) for each in seen]})

    async def budget(self, request: web.Request) -> web.Response:
        """Show one namespace's budget."""
        return web.json_response(self._shape(await self._balance(request)))

    async def grants(self, request: web.Request) -> web.Response:
        """Add GPU-minutes; the header Idempotency-Key makes a repetition harmless."""
        return web.json_response(self._shape(await self._grant(request)), status=201)

    async def ledger(self, request: web.Request) -> web.Response:
        """Show ledger entries, oldest first; `cursor` is where the page before ended."""
        namespace = _namespace(request)
        await self._check(request, namespace)
        query = request.query
        begin, end = _instant(query, "from"), _instant(query, "to")
        cursor = query.get("cursor", "")
        if cursor and not _CURSOR.fullmatch(cursor):
            raise RequestError(f"cursor={cursor!r} is none that was given out")
        after = cursor or (f"{begin - 1}-{(1 << 64) - 1}" if begin else "")
        page = await self.store.entries(namespace, after=after, most=PAGE_MAX)
        shown = [each for each in page if end is None or each.ts_ms < end]
        more = len(page) == PAGE_MAX and len(shown) == len(page)
        return web.json_response(
            {
                "entries": [entry_shape(each, namespace) for each in shown],
                "cursor": page[-1].id if more else None,
            }
        )

    async def showback(self, request: web.Request) -> web.Response:
        """Add up who used what."""
        query = request.query
        wanted = query.get("namespace", EVERYTHING)
        if wanted == EVERYTHING:
            names = await self._visible(request, await self.store.revisions())
        else:
            await self._check(request, Namespace(wanted))
            names = [Namespace(wanted)]
        within = Range(
            window=query.get("window", ""),
            from_ms=_instant(query, "from"),
            to_ms=_instant(query, "to"),
        )
        group_by = [part for part in query.get("groupBy", "").split(",") if part] or GROUPS
        rows = await add_up(self.store, names, within, group_by)
        if query.get("format", "json") == "csv":
            return web.Response(text=as_csv(rows), content_type="text/csv")
        return web.json_response({"rows": [shape(row) for row in rows]})

    async def _balance(self, request: web.Request) -> Balance:
        namespace = _namespace(request)
        await self._check(request, namespace)
        return self.keeper.balance_of(namespace)

    async def _viewer(self, request: web.Request) -> Viewer:
        """Return who asks. Raises ForbiddenError if nobody knows."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        viewer = await self.door.authenticate(token.strip() if kind.lower() == "bearer" else "")
        if viewer is None:
            raise AccessDeniedError(
                "a known token is wanted: Authorization: Bearer ...", known=False
            )
        return viewer

    async def _visible(
        self, request: web.Request, names: Iterable[Namespace]
    ) -> Sequence[Namespace]:
        """Return those of the namespaces that the caller may see, sorted."""
        names = tuple(names)
        seen = await (await self._viewer(request)).visible(names)
        return sorted(names if seen is None else seen)

    async def _check(self, request: web.Request, namespace: Namespace) -> None:
        """Raise ForbiddenError unless the caller may see the namespace."""
        viewer = await self._viewer(request)
        seen = await viewer.visible([namespace])
        if seen is not None and namespace not in seen:
            text = f"{viewer.name} has no right to see namespace {namespace}"
            raise AccessDeniedError(text, known=True)

    async def _granter(self, request: web.Request, namespace: Namespace) -> str:
        """Return who asks. Raises ForbiddenError unless they may grant."""
        viewer = await self._viewer(request)
        if self.door.is_anonymous:
            text = "granting needs a token; start with --auth tokens or --auth kube"
            raise AccessDeniedError(text, known=False)
        if not await viewer.may_grant(namespace):
            text = (
                f"{viewer.name} has no right to grant to namespace {namespace}: that takes a token "
                "for *, or in a cluster the right to create gpubudgets/grants in leasehold.dev"
            )
            raise AccessDeniedError(text, known=True)
        return viewer.name

    async def _grant(self, request: web.Request) -> Balance:
        namespace = _namespace(request)
        actor = await self._granter(request, namespace)
        body = await _body(request)
        await grant(
            self.store,
            namespace,
            units_of(body.get("minutes")),
            actor=actor,
            reason=str(body.get("reason", "")),
            key=request.headers.get("Idempotency-Key", ""),
        )
        (account,) = await self.store.load({namespace: None})
        self.keeper.accounts[namespace] = account
        return self.keeper.balance_of(namespace)

    async def _is_over(self, namespace: Namespace, name: str) -> bool:
        """Return whether every other container of the pod has terminated; so has a pod gone."""
        if self.kube is None:
            raise AssertionError("reports are answered only where the API server is known")
        path = pod_path(quote(namespace, safe=""), quote(name, safe=""))
        try:
            pod = await self.kube.read(path, _Pod)
        except NotFoundError:
            return True
        others = {each.name for each in pod.spec.containers}.difference({SIDECAR})
        ended = {each.name for each in pod.status.container_statuses if each.state.terminated}
        return others <= ended

    def _shape(self, seen: Balance) -> dict[str, Any]:
        budget = self.configuration.budget_of(seen.namespace)
        follows = consequence(budget, seen.state)
        return {
            "namespace": seen.namespace,
            "state": str(seen.state),
            "leaseClass": str(follows.lease_class),
            "newPods": follows.new_pods,
            "window": {
                "id": seen.window.id,
                "start": seen.window.start_ms,
                "end": seen.window.end_ms,
            },
            "usedUnits": str(seen.used_units),
            "usedGPUMinutes": minutes(seen.used_units),
            "allowedGPUMinutes": _minutes(seen.allowed_units),
            "remainingGPUMinutes": _minutes(seen.remaining_units),
            "burnMilliGPU": seen.current_rate_milli_gpu,
            "leases": seen.leases,
            "projectedExhaustion": _stamp(seen.exhausted_at_ms),
            "asOf": stamp(seen.at_ms),
        }

    def _old_shape(self, seen: Balance) -> dict[str, Any]:
        return {
            "budget_available": seen.state not in OUT,
            "budget": _number(seen.allowed_units),
            "budget_remaining": _number(
                None if seen.remaining_units is None else max(0, seen.remaining_units)
            ),
            "state": str(seen.state),
            "window": seen.window.id,
            "resetAt": _stamp(seen.window.end_ms),
            "burn": seen.current_rate_milli_gpu,
        }


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _Running(msgspec.Struct, frozen=True):
    terminated: dict[str, Any] | None = None


class _ContainerStatus(msgspec.Struct, frozen=True):
    name: str = ""
    state: _Running = _Running()


class _Spec(msgspec.Struct, frozen=True):
    containers: tuple[_Named, ...] = ()


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    container_statuses: tuple[_ContainerStatus, ...] = ()


class _Pod(msgspec.Struct, frozen=True):
    spec: _Spec = _Spec()
    status: _Status = _Status()


@web.middleware
async def _told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn our errors into answers."""
    try:
        return await handler(request)
    except AccessDeniedError as error:
        return _error(403 if error.known else 401, str(error))
    except RequestError as error:
        return _error(400, str(error))
    except (ConflictError, UnavailableError) as error:
        return _error(503, str(error))
    except LeaseholdError as error:
        return _error(500, str(error))


def _error(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)


def _namespace(request: web.Request) -> Namespace:
    return Namespace(request.match_info["namespace"])


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _instant(query: Mapping[str, str], name: str) -> int | None:
    """Read an instant: milliseconds, or RFC 3339. What was before 1970 was at its beginning."""
    text = query.get(name, "")
    if not text:
        return None
    if _MILLISECONDS.fullmatch(text):
        return int(text)
    try:
        return max(0, round(datetime.fromisoformat(text).timestamp() * 1000))
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{name}={text!r} is neither milliseconds nor RFC 3339") from error


def _minutes(units: int | None) -> str | None:
    return None if units is None else minutes(units)


def _number(units: int | None) -> float | None:
    return None if units is None else units / UNITS_PER_GPU_MINUTE


def _stamp(at_ms: int | None) -> str | None:
    return None if at_ms is None else stamp(at_ms)
