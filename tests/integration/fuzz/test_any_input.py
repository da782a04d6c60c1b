"""No input makes a server respond with 5xx, log a traceback or stop; no message and no object does.

Some hundred inputs; `pytest tests/integration/fuzz --hypothesis-profile=fuzz` tries more than
10,000.
"""

import http.client
import json
import re
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.api.http.read_api import ROUTES as API
from services.api.reports.legacy_metrics import SchedulerMetrics
from services.timekeeper.accounts.accrual import advance, apply_update
from services.timekeeper.config.budget_spec import parse_spec
from services.timekeeper.report.budget_reports import budget_changed
from services.timekeeper.rest_api import BudgetApi
from services.webhook.admission import decide
from services.webhook.pod_admission import AdmissionPolicy, PodAdmission
from services.webhook.registration import webhook_paths
from services.webhook.server import Drain
from services.webhook.server import application as webhook_application
from services.webhook.service import Webhook
from shared.credentials.authorization import AnonymousAuthenticator, Viewer
from shared.dialects import DIALECTS, GPU_RESOURCES, REQUEST_ANNOTATIONS
from shared.dialects.dialect import Rules
from shared.dialects.koordinator.annotation import parse_allocated
from shared.dialects.nvidia.annotations import CORDON, REGISTER, cordoned_devices
from shared.dialects.volcano.device_register import parse_register
from shared.kubernetes.errors import ErrorResponse, NotFoundError
from shared.kubernetes.types import ApiPod
from shared.model.budgets.balance import balance
from shared.model.budgets.budget import Account
from shared.model.budgets.quota import Quota
from shared.model.errors import RequestError
from shared.model.events.event import Event
from shared.model.leases.lease_copy import load_lease
from shared.model.names import Namespace
from shared.nats import wire
from shared.pods.pod_parser import PodParser
from shared.pods.pod_view import decode_view
from shared.runtime import health
from shared.runtime.telemetry import Tracing
from tests.support.api.running import running_api
from tests.support.clock import FakeClock
from tests.support.fuzz.in_thread import running_in_thread, without_tracebacks
from tests.support.fuzz.inputs import as_json, bodies, changed, texts, values
from tests.support.samples import SAMPLES
from tests.support.servers.valkey import valkey_server
from tests.support.timekeeper.accounts import T0, account_ledger, budget
from tests.support.webhook.replica import FakeClaimBinders

POD = {
    "metadata": {"name": "train", "annotations": {"volcano.sh/vgpu-mode": "mig"}, "labels": {}},
    "spec": {
        "containers": [
            {
                "name": "c",
                "image": "nvidia/cuda:12",
                "resources": {"limits": {"volcano.sh/vgpu-number": 1, "cpu": "500m"}},
                "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
                "envFrom": [{"configMapRef": {"name": "a"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/etc"}],
            }
        ],
        "volumes": [{"name": "v", "hostPath": {"path": "/proc"}}],
        "nodeName": "",
        "priority": 0,
    },
}
REVIEW: dict[str, Any] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "u-1",
        "operation": "CREATE",
        "namespace": "team-a",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": POD,
    },
}
UPDATE = REVIEW | {"request": REVIEW["request"] | {"operation": "UPDATE", "oldObject": POD}}
BUDGET = {
    "apiVersion": "leasehold.dev/v1beta1",
    "kind": "GPUBudget",
    "metadata": {"name": "team-a"},
    "spec": {
        "limitGPUMinutes": 60,
        "share": 2,
        "warnAt": [80],
        "onExhausted": "evict",
        "graceMinutes": 5,
        "policy": {"type": "fixed", "window": "day", "timeZone": "UTC", "rollover": {"percent": 5}},
    },
}
ROUTES = {
    "timekeeper": ("/budget/{}", "/budget/{}/report", "/budget/{}/increase"),
    "reports": ("/budget/{}/report",),
    "api": (
        *("/", "/static/{}", "/login", "/logout", "/api/v1/state", "/api/v1/events"),
        *(re.sub(r"{\w+}", "{}", route.path) for route in API),
    ),
    "old-metrics": ("/metrics",),
    "usage": ("/metrics",),
    "http": ("/healthz", "/readyz", "/metrics"),
    "https": tuple(sorted(set(webhook_paths().values()))),
}
"""Paths of each port of the services; {} is any text."""
QUERIES = ("from", "to", "cursor", "namespace", "window", "groupBy", "format", "after", "page")
HEADERS = ("Last-Event-ID", "Idempotency-Key", "Authorization", "If-None-Match", "Cookie")
GRANT = {"minutes": 5, "reason": "deadline", "pod_name": "train"}
TEAM = Namespace("team-a")

any_machine = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None
)


class EveryViewer:
    """May read and grant everything."""

    def __init__(self) -> None:
        self.name = "fuzz"

    async def visible(self, names: Any) -> None:
        return None

    async def may_grant(self, namespace: Namespace) -> bool:
        return True

    async def may_resize(self, namespace: Namespace, pod: str) -> bool:
        return True

    async def may_list_events(self, namespace: Namespace) -> bool:
        return True


class EveryToken(AnonymousAuthenticator):
    """Accepts any token."""

    is_anonymous = False

    async def authenticate(self, token: str, address: str = "") -> Viewer | None:
        return EveryViewer()


class NoPods:
    """A cluster without pods."""

    async def read(self, path: str, kind: object) -> object:
        raise NotFoundError(
            ErrorResponse(method="GET", path=path, code=404, reason="NotFound", message="no pod")
        )


async def no_class() -> str:
    """The default priority class of a cluster that has none."""
    return ""


async def no_quotas() -> Mapping[Namespace, Quota]:
    return {}


async def no_isolation() -> Mapping[Namespace, str]:
    return {}


def webhook() -> Webhook:
    return Webhook(
        policy=AdmissionPolicy(),
        default_priority_class=no_class,
        lease_claim=FakeClaimBinders().lease,
        read_quotas=no_quotas,
        read_isolation=no_isolation,
        rotate_certificate=lambda _: None,  # type: ignore[arg-type,return-value]
        clock=FakeClock(),
        tracing=Tracing("webhook", None),
    )


@asynccontextmanager
async def all_ports() -> AsyncIterator[Mapping[str, str]]:
    """Serve every application, with real stores; yields addresses by port."""
    with valkey_server() as server:
        await server.ready()
        async with (
            account_ledger(server.url, budget(10, TEAM)) as accounts,
            running_api() as board,
        ):
            keeper = accounts.timekeeper()
            await accounts.count(T0, keeper=keeper)
            api = BudgetApi(
                keeper,
                EveryToken(),
                client=NoPods(),  # type: ignore[arg-type]
                old_reports="answer",
            )
            local = "127.0.0.1:0"
            legacy = SchedulerMetrics(board.service.projection)
            reviews = webhook_application(webhook(), Drain(), lambda: ROUTES["https"])
            async with (
                health.served(api.application(), local) as timekeeper,
                health.served(api.reports(), local) as reports,
                health.served(health.application({}), local) as http,
                health.served(health.metrics_application(legacy), local) as old,
                health.served(health.metrics_application(CollectorRegistry()), local) as usage,
                health.served(reviews, local) as https,
            ):
                yield {
                    "timekeeper": timekeeper,
                    "reports": reports,
                    "api": board.url.removeprefix("http://"),
                    "old-metrics": old,
                    "usage": usage,
                    "http": http,
                    "https": https,
                }


@pytest.fixture(scope="module")
def ports() -> Iterator[Mapping[str, str]]:
    health.suppress_bad_request_tracebacks()  # as each service does
    with without_tracebacks(), running_in_thread(all_ports()) as addresses:
        yield addresses


def status_of(
    address: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> int:
    """Send one request and return its status; 0 if the server closed the connection instead."""
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, body, dict(headers or {}))
        return connection.getresponse().status
    except (http.client.BadStatusLine, ConnectionError):
        return 0  # as for a body beyond the limit, while it is sent
    finally:
        connection.close()


@any_machine
@given(body=bodies(REVIEW, UPDATE), path=st.sampled_from(ROUTES["https"]))
def test_any_review_is_answered(ports: Mapping[str, str], body: bytes, path: str) -> None:
    assert status_of(ports["https"], "POST", path, body) in {200, 400}

    good = as_json(REVIEW)
    assert status_of(ports["https"], "POST", "/mutate", good) == 200


def quoted(text: str) -> str:
    return urllib.parse.quote(text.encode("utf-8", "surrogatepass")[:3_000], safe="")


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, str, bytes, dict[str, str]]:
    """A port, and a request to one of its paths."""
    port = draw(st.sampled_from(sorted(ROUTES)))
    method = draw(st.sampled_from(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "ODD")))
    path = draw(st.sampled_from(ROUTES[port])).replace(
        "{}", quoted(draw(texts | st.just("team-a")))
    )
    query = draw(st.dictionaries(st.sampled_from(QUERIES), texts, max_size=3))
    words = "&".join(f"{name}={quoted(value)}" for name, value in query.items())
    printable = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200)
    headers = draw(st.dictionaries(st.sampled_from(HEADERS), printable, max_size=3))
    if method in {"GET", "HEAD"}:
        return port, method, f"{path}?{words}", b"", headers
    return port, method, f"{path}?{words}", draw(bodies(GRANT)), headers


@any_machine
@given(request=requests())
def test_any_request_to_any_port_is_answered_without_5xx(
    ports: Mapping[str, str], request: tuple[str, str, str, bytes, dict[str, str]]
) -> None:
    port, method, path, body, headers = request

    assert status_of(ports[port], method, path, body, headers) < 500
    assert status_of(ports[port], "GET", ROUTES[port][0].format("team-a")) in {200, 405, 404}


@any_machine
@given(spec=changed(BUDGET["spec"]) | values)
@example(spec={"share": 10**30})
@example(spec={"graceMinutes": 10**30, "onExhausted": "evict"})
@example(spec={"limitGPUMinutes": "1e1000000000"})
def test_any_budget_is_refused_or_its_state_is_published(spec: Any) -> None:
    try:
        parsed = parse_spec(Namespace("team-a"), spec)
    except RequestError:
        return
    account = Account(namespace=parsed.namespace)
    update = advance(account, parsed, T0, charge_every_ms=1)
    assert update is not None
    after = apply_update(account, update)
    event = budget_changed(parsed, after, balance(after, parsed, T0), previous=account.state)

    assert wire.decode(wire.encode([event]), type(event)) == [event]


OLD_WORDS = AdmissionPolicy(vendor_messages=frozenset(DIALECTS))


@any_machine
@given(
    notes=st.dictionaries(st.sampled_from(sorted(REQUEST_ANNOTATIONS)), texts, max_size=3),
    amounts=st.dictionaries(st.sampled_from(sorted(GPU_RESOURCES | {"cpu"})), texts, max_size=4),
)
def test_any_annotation_and_amount_of_a_pod_is_read_or_explained(
    notes: dict[str, str], amounts: dict[str, str]
) -> None:
    pod = json.loads(json.dumps(POD))
    pod["metadata"] |= {"uid": "u", "namespace": "team-a", "annotations": notes}
    pod["spec"]["schedulerName"] = "leasehold"
    pod["spec"]["containers"][0]["resources"]["limits"] |= amounts
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # as the API server would refuse it
        read = msgspec.json.decode(as_json(pod), type=ApiPod)
        seen = PodParser(frozenset({"leasehold"}), Rules()).parse(read)
        assert seen.request or seen.request_error
        with suppress(RequestError):
            decision = decide(
                PodAdmission(pod=decode_view(as_json(pod), "team-a"), policy=OLD_WORDS)
            )
            assert decision.allowed or decision.message


@any_machine
@given(text=texts | values.map(lambda value: as_json(value).decode(errors="replace")))
def test_any_text_of_another_program_is_read_or_refused(text: str) -> None:
    cordoned_devices({CORDON: "a", REGISTER: text})
    for parse in (parse_allocated, parse_register):
        with suppress(RequestError):
            parse(text)
    with suppress(RequestError):
        load_lease(text, namespace=TEAM, name="train")


DEEP_MESSAGE = b"\x91" * 100_000


@any_machine
@given(data=st.data(), sample=st.sampled_from(SAMPLES))
def test_any_message_is_read_or_refused(data: st.DataObject, sample: Event) -> None:
    whole = msgpack.unpackb(wire.encode([sample]))
    try:
        message = data.draw(st.binary() | st.just(DEEP_MESSAGE) | changed(whole).map(msgpack.packb))
    except (OverflowError, ValueError, TypeError, UnicodeEncodeError):
        assume(condition=False)  # MessagePack cannot represent the value
        return
    with suppress(RequestError):
        assert all(type(event) is type(sample) for event in wire.decode(message, type(sample)))
