"""The API server: TLS, authentication, routing of requests, and their responses."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from simcluster.apimachinery.conversions import to_version
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, JsonValue, encode, name_of, namespace_of
from simcluster.apimachinery.resources import Kinds
from simcluster.apimachinery.selectors import parse_selection
from simcluster.apiserver.admission.chain import AdmissionChain
from simcluster.apiserver.crd.definition_controller import DefinitionController
from simcluster.apiserver.http import discovery, openapi
from simcluster.apiserver.http.aggregation import FRONT_PROXY, Aggregator
from simcluster.apiserver.http.debug_endpoints import (
    ApiServerMetrics,
    DebugEndpoints,
    FaultInjector,
)
from simcluster.apiserver.http.exec_socket import exec_options, serve_exec
from simcluster.apiserver.http.messages import (
    MAX_BODY_BYTES,
    error_response,
    json_response,
    read_body,
)
from simcluster.apiserver.http.pod_access import serve_log
from simcluster.apiserver.http.representations import ObjectView, negotiate_view
from simcluster.apiserver.http.resource_metrics import read_metrics
from simcluster.apiserver.http.service_proxy import parse_proxied, serve_proxied
from simcluster.apiserver.http.watches import WatchRequest, serve_watch
from simcluster.apiserver.kinds.binding import bind
from simcluster.apiserver.kinds.builtin_resources import BINDINGS, METRICS
from simcluster.apiserver.kinds.disruption_budgets import DisruptionController
from simcluster.apiserver.kinds.garbage_collection import GarbageCollector
from simcluster.apiserver.kinds.namespaces import NamespaceController, create_system_objects
from simcluster.apiserver.kinds.resource_quotas import QuotaController
from simcluster.apiserver.kinds.scale import scale_of
from simcluster.apiserver.kinds.service_account_tokens import ServiceAccountTokens, TokenError
from simcluster.apiserver.rbac import RoleIndex
from simcluster.apiserver.rbac_rules import ResourceAttributes
from simcluster.apiserver.requests.authorization import (
    attributes_of,
    authorize,
    authorize_url,
    check_local_review,
    impersonated,
    review_access,
)
from simcluster.apiserver.requests.object_writes import (
    ObjectWriter,
    WriteRequest,
    method_not_allowed,
)
from simcluster.apiserver.requests.paged_lists import list_page
from simcluster.apiserver.requests.patches import APPLY_PATCH
from simcluster.apiserver.requests.query_parameters import ListOptions, is_set
from simcluster.apiserver.requests.request_target import PATH_NOT_FOUND, RequestTarget, parse_target
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.credentials import WEBHOOK_CLIENT, CertificateFiles, load_certificates
from simcluster.ports import ContainerRuntime, Outage

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
    document = _discovery(request, path, kinds)
    if document is not None and request.method != "GET":
        raise method_not_allowed(request.method)
    return document


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


log = logging.getLogger(__name__)
_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_CREATE_REVIEW = ResourceAttributes("create", "authentication.k8s.io", "tokenreviews")
_SCHEDULER: Json = {"username": "system:kube-scheduler", "groups": ["system:authenticated"]}
_SUBJECT_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_SELF_REVIEWS = frozenset({
    "/apis/authentication.k8s.io/v1/selfsubjectreviews",
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
})  # fmt: skip
_LOCAL_REVIEWS = re.compile(
    r"/apis/authorization\.k8s\.io/v1/namespaces/([^/]+)/localsubjectaccessreviews"
)
_CREATE_ACCESS_REVIEW = ResourceAttributes("create", "authorization.k8s.io", "subjectaccessreviews")
_UNAUTHORIZED = ApiError(401, "Unauthorized", "Unauthorized")
_NOT_SIMULATED = {
    "portforward": "kubectl port-forward is not supported: simulated containers have no network. "
    "Run the client in the pod (kubectl exec); pods of --gpus local use this machine's network, "
    "and `leasehold status` shows the address of Leasehold's page",
}
_STOP_S = 1.0
_READ = frozenset({"", "status", "ephemeralcontainers", "resize"})
"""The subresources that are read as the object itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The address and the token of the server; port 0 selects a free port."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str
    bookmark_s: float = 60.0


@dataclass(slots=True)
class _RequestLabels:
    """The labels of a request in the metrics."""

    verb: str
    resource: str = ""
    subresource: str = ""
    key: str = ""


class ApiServer:
    """Serves a store over HTTP, and the containers of a `ContainerRuntime`."""

    def __init__(
        self,
        store: ObjectStore,
        settings: ApiSettings,
        *,
        runtime: ContainerRuntime | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.runtime = runtime
        self.faults = FaultInjector()
        self.metrics = ApiServerMetrics()
        self._debug = DebugEndpoints(store, self.faults, self.metrics, self.begin_outage)
        self._watch_tasks: set[asyncio.Task[Any] | None] = set()
        self._definitions = DefinitionController(store)
        self._namespaces = NamespaceController(store)
        self._quotas = QuotaController(store)
        self._roles = RoleIndex(store)
        self._admission = AdmissionChain(store, self._roles)
        self._tokens = ServiceAccountTokens(store, settings.token)
        self.aggregator = Aggregator(store, self._roles)
        self._writer = ObjectWriter(
            store,
            DisruptionController(store),
            GarbageCollector(store),
            self._admission,
            self._tokens,
            roles=self._roles,
        )
        create_system_objects(store)

    def end_watches(self) -> None:
        """End all open watches, so that a stop need not wait for them."""
        for task in self._watch_tasks:
            if task is not None:
                task.cancel()

    def begin_outage(self, outage: Outage) -> None:
        """Answer no request for a while, neither of clients nor of the kubelets."""
        self.faults.away_until = time.monotonic() + outage.for_s
        if self.runtime is not None:
            self.runtime.miss_api_server(outage)
        self.end_watches()

    async def close(self) -> None:
        """Close the connections to webhooks."""
        await self._admission.client.close()

    def present_to_webhooks(self, files: CertificateFiles) -> None:
        """Call webhooks with this client certificate."""
        self._admission.client.present(files)

    async def create(self, table: str, obj: Json, user: Json) -> Json:
        """Create an object with admission, as a controller in this process; `ApiError` if not."""
        target = RequestTarget(self.store.kinds[table], namespace_of(obj))
        created = await self._writer.write("POST", WriteRequest(target, {}, "", obj, user))
        return created.obj

    async def write_status(self, table: str, obj: Json) -> Json:
        """Write the status of an object with admission, as kube-scheduler; `ApiError` if not."""
        target = RequestTarget(self.store.kinds[table], namespace_of(obj), name_of(obj), "status")
        written = await self._writer.write("PUT", WriteRequest(target, {}, "", obj, _SCHEDULER))
        return written.obj

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Bind a pod, as a scheduler in this process; `ApiError` if not."""
        bind(self.store, namespace, name, {"target": {"kind": "Node", "name": node}}, dry_run=False)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Respond to one request."""
        started = time.perf_counter()
        labels = _RequestLabels(request.method)
        try:
            self.faults.reset_in_outage(request)
            user = {} if request.path in OPEN_PATHS else self._authenticate(request)
            if self.faults.pending:
                await self.faults.inject(request)
            response = await self._route(request, labels, user)
        except ApiError as error:
            response = error_response(error)
            if labels.verb in {"POST", "PUT", "PATCH", "DELETE"} and labels.key:
                verb = f"{request.method} {labels.subresource}".strip()
                self.store.writes.count(labels.resource, labels.key, f"{verb} refused {error.code}")
        took_s = time.perf_counter() - started
        self.metrics.count(
            labels.verb, labels.resource, labels.subresource, code=response.status, took_s=took_s
        )
        return response

    def _authenticate(self, request: web.BaseRequest) -> Json:
        """Return the user of the bearer token."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer":
            raise _UNAUTHORIZED
        try:
            user = self._tokens.authenticate(token)[0]
        except TokenError as error:
            raise _UNAUTHORIZED from error
        name = request.headers.get("Impersonate-User")
        groups = request.headers.getall("Impersonate-Group", [])
        return impersonated(self._roles, user, name, groups) if name else user

    async def _route(
        self, request: web.BaseRequest, labels: _RequestLabels, user: Json
    ) -> web.StreamResponse:
        path = request.path
        if path.startswith("/debug/") or path == "/metrics":
            authorize_url(self._roles, user, request.method, path)
            return await self._debug.respond(request)
        response = await self._respond_without_object(request, user)
        if response is not None:
            return response
        target = parse_target(path, self.store.kinds)
        labels.resource = target.kind.table
        labels.subresource = target.subresource
        watch = is_set(request.query, "watch")
        fields = request.query.get("fieldSelector", "")
        attributes = attributes_of(request.method, target, watch=watch, fields=fields)
        authorize(self._roles, user, attributes)
        if self._creates_by_apply(request, target):
            authorize(self._roles, user, replace(attributes, verb="create"))
        if target.kind.group == METRICS:
            if request.method != "GET" or watch:
                raise method_not_allowed(request.method)
            body = read_metrics(self.store, self.runtime, target, request.query)
            return json_response(encode(body))
        if target.subresource in {"exec", "attach", "portforward", "log"}:
            return await self._access_pod(request, target, user)
        if request.method == "GET":
            return await self._read(request, target, labels)
        labels.key = target.key if target.name else ""
        return await self._write(request, target, user)

    def _creates_by_apply(self, request: web.BaseRequest, target: RequestTarget) -> bool:
        is_apply = request.method == "PATCH" and request.content_type == APPLY_PATCH
        return (
            is_apply and self.store.find(target.kind.table, target.namespace, target.name) is None
        )

    async def _respond_without_object(
        self, request: web.BaseRequest, user: Json
    ) -> web.StreamResponse | None:
        """Respond to discovery, reviews and proxied requests; None for all others."""
        path = request.path
        if aggregated := self.aggregator.service_of(path):
            return await self.aggregator.serve(request, aggregated, user)
        kinds = self.store.kinds
        if path.startswith(("/apis", "/openapi/v3")) and (
            more := await self.aggregator.kinds(path)
        ):
            kinds = Kinds([*kinds, *more])
        static = static_response(request, kinds)
        if static is not None:
            return static
        if path == _REVIEWS and request.method == "POST":
            authorize(self._roles, user, _CREATE_REVIEW)
            return json_response(encode(self._tokens.review(await read_body(request) or {})), 201)
        local = _LOCAL_REVIEWS.fullmatch(path)
        if (local or path in {_SUBJECT_REVIEWS, *_SELF_REVIEWS}) and request.method == "POST":
            body = await read_body(request) or {}
            if path == _SUBJECT_REVIEWS:
                authorize(self._roles, user, _CREATE_ACCESS_REVIEW)
            if local:
                resource = f"local{_CREATE_ACCESS_REVIEW.resource}"
                wanted = replace(_CREATE_ACCESS_REVIEW, resource=resource, namespace=local[1])
                authorize(self._roles, user, wanted)
                check_local_review(body, local[1])
            review = review_access(self._roles, user, body, now=self.store.now())
            return json_response(encode(review), 201)
        if proxied := parse_proxied(path):
            authorize(self._roles, user, proxied.attributes(request.method))
            return await serve_proxied(request, self.store, proxied)
        return None

    async def _access_pod(
        self, request: web.BaseRequest, target: RequestTarget, user: Json
    ) -> web.StreamResponse:
        pod = self.store.read("pods", target.namespace, target.name)
        if target.subresource == "log":
            if request.method != "GET":
                raise method_not_allowed(request.method)
            return await serve_log(request, self.runtime, pod)
        if target.subresource not in {"exec", "attach"}:
            raise ApiError(
                501,
                "NotImplemented",
                _NOT_SIMULATED[target.subresource],
            )
        await self._writer.admit_connect(target, exec_options(request), user)
        attach = target.subresource == "attach"
        return await serve_exec(request, self.runtime, pod, attach=attach)

    async def _read(
        self, request: web.BaseRequest, target: RequestTarget, labels: _RequestLabels
    ) -> web.StreamResponse:
        query = request.query
        object_view = self._view(request, target)
        if target.subresource == "scale":
            workload = self.store.read(target.kind.table, target.namespace, target.name)
            return json_response(encode(scale_of(workload)))
        if target.kind is BINDINGS or target.subresource not in _READ:
            raise method_not_allowed("GET")
        options = ListOptions.parse(query)
        fields = options.fields
        if target.name and not options.watch:
            record = self.store.record(target.kind.table, target.namespace, target.name)
            return json_response(object_view.one(record))
        if target.name:
            fields = ",".join(filter(None, (fields, f"metadata.name={target.name}")))
        selection = parse_selection(target.kind, target.namespace, options.labels, fields)
        if not options.watch:
            page = list_page(self.store, target.kind.table, selection, options)
            return json_response(object_view.many(page.records, page.meta))
        labels.verb = "WATCH"
        watch = WatchRequest(target.kind.table, selection, object_view, options)
        return await self._watch(request, watch)

    async def _watch(self, request: web.BaseRequest, watch: WatchRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        self._watch_tasks.add(task)
        try:
            with self.metrics.watches.labels(watch.resource).track_inprogress():
                return await serve_watch(
                    request, self.store, watch, bookmark_s=self.settings.bookmark_s
                )
        finally:
            self._watch_tasks.discard(task)

    def _view(self, request: web.BaseRequest, target: RequestTarget) -> ObjectView:
        accept = request.headers.get("Accept", "")
        include = request.query.get("includeObject", "")
        return negotiate_view(target.kind, accept, include, self.store.clock())

    async def _write(
        self, request: web.BaseRequest, target: RequestTarget, user: Json
    ) -> web.StreamResponse:
        object_view = self._view(request, target)
        body = await read_body(request)
        content_type = request.content_type
        agent = request.headers.get("User-Agent", "").partition("/")[0]
        write = WriteRequest(target, request.query, content_type, body, user, agent)
        try:
            result = await self._writer.write(request.method, write)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("unexpected object shape in a request to %s", request.path, exc_info=True)
            raise ApiError.bad_request(f"the object has an unexpected shape: {error!r}") from error
        response = json_response(self._encode_result(object_view, target, result.obj), result.code)
        for warning in result.warnings:
            quoted = warning.replace("\\", "\\\\").replace('"', '\\"')
            response.headers.add("Warning", f'299 - "{quoted}"')
        return response

    def _encode_result(self, object_view: ObjectView, target: RequestTarget, obj: Json) -> bytes:
        """Encode the result of a write; reuses the bytes of a stored object."""
        if obj.get("kind") == target.kind.kind:
            name = obj["metadata"]["name"]
            record = self.store.find(target.kind.table, target.namespace, name)
            if record is not None and record.obj is obj:
                return object_view.one(record)
            obj = to_version(target.kind, obj)
        return encode(obj)


@asynccontextmanager
async def start_server(server: ApiServer, certificates: CertificateFiles) -> AsyncIterator[str]:
    """Listen while the context is open; yields the URL."""
    front_proxy = certificates.ca.with_name(FRONT_PROXY)
    server.aggregator.present(load_certificates(front_proxy, FRONT_PROXY))
    webhook_client = certificates.ca.with_name(WEBHOOK_CLIENT)
    server.present_to_webhooks(load_certificates(webhook_client, WEBHOOK_CLIENT))
    runner = web.ServerRunner(_web_server(server.handle), shutdown_timeout=_STOP_S)
    await runner.setup()
    settings = server.settings
    context = certificates.server_context()
    site = web.TCPSite(runner, settings.host, settings.port, ssl_context=context, backlog=1024)
    try:
        await site.start()
        port = runner.addresses[0][1]
        yield f"https://{settings.host}:{port}"
    finally:
        server.end_watches()
        await runner.cleanup()
        await server.close()


def _web_server(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> web.Server:
    def made(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES
        )

    return web.Server(
        handle,
        request_factory=made,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=600,
    )
