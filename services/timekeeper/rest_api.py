"""The REST interface: the paths of GPUSharing that are safe.

No request of a tenant's pod changes a balance.
"""

import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from services.timekeeper.metrics import IGNORED_REPORTS
from services.timekeeper.report.budget_reports import optional
from services.timekeeper.service import Timekeeper
from shared.credentials.authorization import (
    AccessDeniedError,
    Authenticator,
    Viewer,
    bearer_token,
)
from shared.credentials.turns import TooManyRequestsError, Turns
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.paths import pod_path
from shared.kubernetes.types import ApiPod
from shared.model.bounds import LONGEST_FIELD, NAME, SHORT, check_text
from shared.model.budgets.balance import OUT_OF_BUDGET
from shared.model.budgets.budget import UNITS_PER_GPU_MINUTE, Balance
from shared.model.clock import ExpiringMap, Rate
from shared.model.errors import (
    UNDECODABLE,
    ConflictError,
    LeaseholdError,
    RequestError,
    UnavailableError,
)
from shared.model.names import Namespace
from shared.model.quantity import timestamp
from shared.runtime.bodies import BODY
from shared.runtime.connections import PortBounds
from shared.runtime.listener import BOUNDS

Json = dict[str, object]


def proof_of_concept_json(balance: Balance) -> Json:
    return {
        "budget_available": balance.state not in OUT_OF_BUDGET,
        "budget": optional(lambda units: units / UNITS_PER_GPU_MINUTE, balance.allowed_units),
        "budget_remaining": optional(
            lambda units: max(0, units) / UNITS_PER_GPU_MINUTE, balance.remaining_units
        ),
        "state": str(balance.state),
        "window": balance.window.id,
        "resetAt": optional(lambda at_ms: timestamp(at_ms // 1000), balance.window.end_ms),
        "currentRateMilliGPU": balance.current_rate_milli_gpu,
    }


GONE = (
    "GPU time is counted from leases, and usage reports are ignored. Remove the container "
    "gpu-sidecar from the pod's template"
)
SIDECAR = "gpu-sidecar"
AT_ONCE = 32
AT_ONCE_OF_ONE = 4
MOST_WAITING = 50
PORT_BOUNDS = PortBounds(connections=256, free_body_bytes=16 * 1024)
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
READ_S = 5.0
"""How long it is remembered whether a pod has ended."""
MOST_READS = 20
"""Per second."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BudgetApi:
    def __init__(
        self,
        timekeeper: Timekeeper,
        authenticator: Authenticator,
        *,
        client: KubernetesClient | None,
        old_reports: str,
    ) -> None:
        if old_reports not in {"answer", "gone"}:
            raise RequestError(f"--old-reports {old_reports!r} is neither answer nor gone")
        self.timekeeper = timekeeper
        self.authenticator = authenticator
        self.client = client
        self.answers_reports = old_reports == "answer" and client is not None
        self._turns = Turns(AT_ONCE, of_one=AT_ONCE_OF_ONE, most_waiting=MOST_WAITING)
        ticks = timekeeper.clock.ticks
        self._terminated = ExpiringMap[tuple[str, str], bool](ticks, expires_s=READ_S, most=1_000)
        self._reads = Rate(ticks, most=MOST_READS)

    def application(self) -> web.Application:
        routes = web.Application(middlewares=[_with_json_errors])
        routes[BOUNDS] = PORT_BOUNDS
        routes.router.add_get("/budget/{namespace}", self._in_turn(self.old_budget))
        routes.router.add_post("/budget/{namespace}/report", self._in_turn(self.old_report))
        routes.router.add_post("/budget/{namespace}/increase", self._in_turn(self.old_increase))
        return routes

    def reports(self) -> web.Application:
        routes = web.Application(middlewares=[_with_json_errors])
        routes[BOUNDS] = PORT_BOUNDS
        routes.router.add_post("/budget/{namespace}/report", self._in_turn(self.old_report))
        return routes

    def _in_turn(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            async with self._turns.turn(request.remote or ""):
                return await handler(request)

        return handle

    async def old_budget(self, request: web.Request) -> web.Response:
        namespace = _namespace(request)
        viewer = await self._viewer(request)
        seen = await viewer.visible([namespace])
        if seen is not None and namespace not in seen:
            text = f"{viewer.name} may not read namespace {namespace}"
            raise AccessDeniedError(text, authenticated=True)
        return web.json_response(proof_of_concept_json(self.timekeeper.balance_of(namespace)))

    async def old_report(self, request: web.Request) -> web.Response:
        """Charge nothing."""
        IGNORED_REPORTS.inc()
        if not self.answers_reports:
            return _error(410, GONE)
        body = _body(request)
        name = body.get("pod_name")
        if not isinstance(name, str) or not name:
            raise RequestError("pod_name is required")
        terminate = await self._may_terminate(_namespace(request), name, request.remote or "")
        return web.json_response({"terminate": terminate})

    async def old_increase(self, request: web.Request) -> web.Response:
        namespace = _namespace(request)
        actor = await self._granter(request, namespace)
        body = _body(request)
        minutes = body.get("minutes")
        units = self.timekeeper.parse_grant(namespace, minutes)
        reason = str(body.get("reason", ""))
        key = request.headers.get("Idempotency-Key", "")
        check_text("reason", reason, LONGEST_FIELD)
        check_text("Idempotency-Key", key, SHORT)
        balance = await self.timekeeper.add_grant(
            namespace, units, actor=actor[:NAME], reason=reason, key=key
        )
        return web.json_response(proof_of_concept_json(balance))

    async def _viewer(self, request: web.Request) -> Viewer:
        token = bearer_token(request.headers.get("Authorization", ""))
        viewer = await self.authenticator.authenticate(token, request.remote or "")
        if viewer is None:
            raise AccessDeniedError(
                "a known token is required: Authorization: Bearer ...", authenticated=False
            )
        return viewer

    async def _granter(self, request: web.Request, namespace: Namespace) -> str:
        viewer = await self._viewer(request)
        if self.authenticator.is_anonymous:
            text = "granting needs a token; start the timekeeper with --auth tokens or --auth kube"
            raise AccessDeniedError(text, authenticated=False)
        if not await viewer.may_grant(namespace):
            text = (
                f"{viewer.name} may not grant to namespace {namespace}: use a token for *, or in a "
                "cluster the right to create gpubudgets/grants in leasehold.dev"
            )
            raise AccessDeniedError(text, authenticated=True)
        return viewer.name

    async def _may_terminate(self, namespace: Namespace, name: str, address: str) -> bool:
        """Anyone may ask, so that each pod is read once in `READ_S`, and few in a second."""
        if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
            raise RequestError("namespace and pod_name must be names of Kubernetes")
        is_terminated = self._terminated.get((namespace, name))
        if is_terminated is None and self._reads.allows(address):
            is_terminated = await self._is_terminated(namespace, name)
            self._terminated.set((namespace, name), is_terminated)
        return bool(is_terminated)

    async def _is_terminated(self, namespace: Namespace, name: str) -> bool:
        if self.client is None:
            raise AssertionError("reports are answered only with a Kubernetes client")
        path = pod_path(namespace, name)
        try:
            pod = await self.client.read(path, ApiPod)
        except NotFoundError:
            return True
        others = {container.name for container in pod.spec.containers}.difference({SIDECAR})
        ended = {status.name for status in pod.status.container_statuses if status.state.terminated}
        return others <= ended


@web.middleware
async def _with_json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AccessDeniedError as error:
        return _error(403 if error.authenticated else 401, str(error))
    except TooManyRequestsError as error:
        return _error(429, str(error))
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


def _body(request: web.Request) -> Mapping[str, object]:
    try:
        body = msgspec.json.decode(request[BODY])
    except UNDECODABLE as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body
