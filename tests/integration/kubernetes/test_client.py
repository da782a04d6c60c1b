"""The Kubernetes client against scripted answers on real sockets, with and without TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import (
    EvictionBlockedError,
    ExpiredError,
    ForbiddenError,
    InvalidError,
    KubernetesConflictError,
    KubernetesError,
    NotFoundError,
    OverloadedError,
    RequestRejectedError,
    UnauthorizedError,
    UnexpectedResponseError,
    UnreachableError,
)
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError
from shared.kubernetes.paths import pod_path
from shared.kubernetes.reachability import INTERVAL_S, RETRY_S, ApiServerReachability
from shared.kubernetes.types import ApiPod
from shared.model.clock import end
from shared.model.errors import ConflictError, RequestError, UnavailableError
from tests.support.clock import FakeClock
from tests.support.kubernetes.scripted_apiserver import (
    Exchange,
    ScriptedApiserver,
    Step,
    answers,
    hang,
    lists,
    pod,
    refuses,
    resets,
)
from tests.support.servers.tls import Made
from tests.support.waiting import until


@asynccontextmanager
async def client_and_server(
    *steps: Step, timeout_s: float = 5, token_file: Path | None = None, token: str | None = None
) -> AsyncIterator[tuple[KubernetesClient, ScriptedApiserver]]:
    async with ScriptedApiserver(*steps) as server:
        credentials = ClusterCredentials(server=server.url, token=token, token_file=token_file)
        async with KubernetesClient(credentials, timeout_s=timeout_s) as kube:
            yield kube, server


async def test_binding_is_one_post_with_node_uid_and_annotations() -> None:
    async with client_and_server(answers(201)) as (kube, server):
        await kube.bind_pod("team", "a", "u-1", "n-1", {"x/y": "z"}, traceparent="00-1-2-01")

    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/api/v1/namespaces/team/pods/a/binding")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["traceparent"] == "00-1-2-01"
    assert request.headers["user-agent"].startswith("leasehold/")
    assert request.json() == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": "a",
            "namespace": "team",
            "uid": "u-1",
            "annotations": {"x/y": "z"},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n-1"},
    }


async def test_a_binding_is_never_retried_by_the_client() -> None:
    async with client_and_server(answers(200), resets, answers(201)) as (kube, server):
        await kube.read("/x")
        with pytest.raises(UnreachableError):
            await kube.bind_pod("team", "a", "u-1", "n-1", {})

    assert [request.method for request in server.requests] == ["GET", "POST"]


async def test_bindings_share_a_few_persistent_connections() -> None:
    async with client_and_server(*[answers(201)] * 200) as (kube, server):
        for _ in range(2):
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                for n in range(100):
                    group.create_task(kube.bind_pod("team", f"p{n}", "u", "n", {}))

    assert len(server.requests) == 200
    assert len(server.peers) <= 32


REFUSALS: Mapping[int, tuple[type[KubernetesError], type[Exception]]] = {
    400: (RequestRejectedError, RequestError),
    401: (UnauthorizedError, RequestError),
    403: (ForbiddenError, RequestError),
    404: (NotFoundError, RequestError),
    405: (RequestRejectedError, RequestError),
    409: (KubernetesConflictError, ConflictError),
    410: (ExpiredError, ConflictError),
    422: (InvalidError, RequestError),
    429: (OverloadedError, UnavailableError),
    500: (OverloadedError, UnavailableError),
    503: (OverloadedError, UnavailableError),
    504: (OverloadedError, UnavailableError),
}


@pytest.mark.parametrize("code", REFUSALS)
async def test_each_status_code_is_raised_as_its_error_class(code: int) -> None:
    kind, parent = REFUSALS[code]
    async with client_and_server(refuses(code, "Why", "because")) as (kube, _):
        with pytest.raises(kind, match=f"GET /api/v1/x failed: {code} Why: because") as caught:
            await kube.read("/api/v1/x")

    assert isinstance(caught.value, parent)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (answers(502, b"<html>bad gateway</html>"), OverloadedError, "502: <html>bad gateway"),
        (refuses(403, "Forbidden", "no x"), ForbiddenError, r"no x\. .*Role or ClusterRole"),
        (hang, UnreachableError, "longer than the timeout"),
    ],
    ids=["an error that is not a status", "a missing permission", "no response"],
)
async def test_errors_say_what_happened_and_what_to_do(
    answer: Step, kind: type[KubernetesError], message: str
) -> None:
    async with client_and_server(answer, timeout_s=0.2) as (kube, _):
        with pytest.raises(kind, match=message):
            await kube.read("/x")


async def test_the_retry_after_header_is_passed_on() -> None:
    async with client_and_server(refuses(429, "TooManyRequests", Retry_After="7")) as (kube, _):
        with pytest.raises(OverloadedError) as caught:
            await kube.read("/x")

    assert caught.value.response.retry_after_s == 7


async def test_a_watch_that_is_not_opened_in_time_times_out() -> None:
    async with client_and_server(hang, timeout_s=0.2) as (kube, _):
        with pytest.raises(UnreachableError, match="longer than the timeout"):
            async with kube.watch("/x", query={}, silence_s=30):
                pass


async def test_an_unreachable_server_is_unavailable() -> None:
    async with ScriptedApiserver() as server:
        url = server.url
    async with KubernetesClient(ClusterCredentials(server=url)) as kube:
        refused = r"GET /x .*:\d+ does not respond \(Connection refused\)$"
        with pytest.raises(UnavailableError, match=refused):
            await kube.read("/x")


async def test_a_response_of_another_shape_is_not_retried() -> None:
    async with client_and_server(answers(200, {"metadata": []}), answers(200, b"{")) as (kube, _):
        with pytest.raises(UnexpectedResponseError):
            await kube.read("/x", ApiPod)
        with pytest.raises(UnavailableError):
            await kube.read("/x", ApiPod)


async def test_creates_and_patches_have_their_method_and_content_type() -> None:
    async with client_and_server(*[answers(200, pod("a", 1))] * 4) as (kube, server):
        created = await kube.create("/api/v1/namespaces/d/pods", {"kind": "Pod"}, ApiPod)
        await kube.patch_merge("/p", {"metadata": {"labels": {"x": None}}})
        await kube.patch_json("/p", [{"op": "remove", "path": "/x"}])
        await kube.patch_strategic("/p", {"status": {}}, ApiPod)

    assert created.metadata.uid == "uid-a"
    assert [(r.method, r.headers["content-type"]) for r in server.requests] == [
        ("POST", "application/json"),
        ("PATCH", "application/merge-patch+json"),
        ("PATCH", "application/json-patch+json"),
        ("PATCH", "application/strategic-merge-patch+json"),
    ]
    assert server.requests[1].json() == {"metadata": {"labels": {"x": None}}}


async def test_a_delete_may_be_tied_to_one_uid_and_a_grace_period() -> None:
    async with client_and_server(answers(200), answers(200)) as (kube, server):
        await kube.delete(pod_path("d", "a"), uid="u-1", grace_s=0)
        await kube.delete(pod_path("d", "a"))

    first, second = server.requests
    assert first.json() == {"preconditions": {"uid": "u-1"}, "gracePeriodSeconds": 0}
    assert (second.method, second.path, second.body) == (
        "DELETE",
        "/api/v1/namespaces/d/pods/a",
        b"",
    )


async def test_an_eviction_forbidden_by_a_disruption_budget_has_its_own_error() -> None:
    blocked = refuses(429, "TooManyRequests", "budget needs 2 pods", causes=["DisruptionBudget"])
    async with client_and_server(answers(201), blocked) as (kube, server):
        await kube.evict("d", "a", uid="u-1", dry_run=True)
        with pytest.raises(EvictionBlockedError, match="budget needs 2 pods"):
            await kube.evict("d", "b", uid="u-2")

    assert server.requests[0].path == "/api/v1/namespaces/d/pods/a/eviction"
    assert server.requests[0].json() == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "a", "namespace": "d"},
        "deleteOptions": {"preconditions": {"uid": "u-1"}, "dryRun": ["All"]},
    }


async def test_names_are_escaped_in_paths() -> None:
    async with client_and_server(answers(201)) as (kube, server):
        await kube.evict("d", "../x?y", uid="u")

    assert server.requests[0].path == "/api/v1/namespaces/d/pods/..%2Fx%3Fy/eviction"


async def test_of_large_objects_smaller_pages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.kubernetes.client.MOST_PAGE_BYTES", 1_000)
    large = answers(200, {"items": [{"metadata": {"name": "a" * 2_000}}]})
    small = answers(200, {"items": [{}]})
    async with client_and_server(large, large, large, large, small, small) as (kube, server):
        pages = [await kube.list_page("/api/v1/pods", query={}, limit=500) for _ in range(4)]

    limits = [request.query["limit"] for request in server.requests]
    assert limits == ["500", "100", "20", "20", "20", "500"]
    assert [len(page.items or ()) for page in pages] == [1, 1, 1, 1]


async def test_other_tasks_run_between_two_items_of_a_whole_list() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    listed = b'{"items":[{"metadata":{}},{"metadata":{}},{"metadata":{}}]}'
    async with client_and_server(answers(200, listed)) as (kube, _):
        other_task = asyncio.create_task(take_turns())
        turns_at = await kube.list_whole("/pods", ApiPod, keep=lambda _: turns)
        await end(other_task)

    assert len(set(turns_at)) == 3


async def test_a_whole_list_without_response_ends_at_the_timeout() -> None:
    async with client_and_server(hang, timeout_s=0.1) as (kube, _):
        with pytest.raises(UnreachableError, match="timeout"):
            await kube.list_whole("/pods", ApiPod, keep=lambda pod: pod)


async def test_a_page_has_undecoded_items_and_a_continue_token() -> None:
    selector = {"fieldSelector": "spec.nodeName=n"}
    before = "p"
    async with client_and_server(lists(pod("a", 1), version=7, next_page="t/1=")) as (kube, server):
        page = await kube.list_page("/api/v1/pods", query=selector, limit=5, continue_token=before)

    assert page.items is not None
    assert (len(page.items), page.metadata.resource_version) == (1, "7")
    assert page.metadata.continue_ == "t/1="
    expected = {"fieldSelector": "spec.nodeName=n", "limit": "5", "continue": "p"}
    assert server.requests[0].query == expected


@pytest.mark.parametrize(
    ("tokens", "sent", "refused"),
    [
        (("old", "new\n"), ("old", "new"), False),
        (("same", "same"), ("same",), True),
        (("0", "00", "000"), ("0", "00"), True),
    ],
    ids=["a rotated token is sent at once", "the same is not sent again", "only one more is sent"],
)
async def test_a_token_that_is_refused_is_read_again(
    tmp_path: Path, tokens: tuple[str, ...], sent: tuple[str, ...], *, refused: bool
) -> None:
    file = tmp_path / "token"
    rest = list(tokens[1:])
    file.write_text(tokens[0])

    async def rotates(exchange: Exchange) -> None:
        file.write_text(rest.pop(0))
        await exchange.answer(401, {"message": "expired"})

    steps = [rotates] * (len(sent) if refused else len(sent) - 1)
    async with client_and_server(*steps, answers(200), token_file=file) as (kube, server):
        with (
            pytest.raises(UnauthorizedError, match="service account") if refused else nullcontext()
        ):
            await kube.read("/one")

    headers = [request.headers["authorization"] for request in server.requests]
    assert headers == [f"Bearer {token}" for token in sent]


async def test_a_token_file_is_read_again_after_a_minute_and_may_vanish(tmp_path: Path) -> None:
    file = tmp_path / "token"
    now = [1000.0]
    file.write_text("first")
    async with ScriptedApiserver(*[answers(200)] * 4) as server:
        credentials = ClusterCredentials(server=server.url, token_file=file)
        async with KubernetesClient(credentials, clock=lambda: now[0]) as kube:
            await kube.read("/x")
            file.write_text("second")
            now[0] += 59
            await kube.read("/x")
            now[0] += 1
            await kube.read("/x")
            file.unlink()
            now[0] += 60
            await kube.read("/x")

    sent = [request.headers["authorization"].removeprefix("Bearer ") for request in server.requests]
    assert sent == ["first", "first", "second", "second"]


async def test_a_server_below_a_path_is_reached_there() -> None:
    async with (
        ScriptedApiserver(answers(200)) as server,
        KubernetesClient(ClusterCredentials(server=f"{server.url}/k8s/clusters/c-1")) as kube,
    ):
        await kube.read("/api/v1/x")

    assert server.requests[0].path == "/k8s/clusters/c-1/api/v1/x"


@pytest.fixture
def ours(tmp_path: Path) -> Made:
    return Made(tmp_path)


def serving(by: Made, *names: str, clients_of: Made | None = None) -> ssl.SSLContext:
    """TLS for the server; with `clients_of`, only that authority's clients may connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*by.issue("server", *names))
    if clients_of is not None:
        context.load_verify_locations(clients_of.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize(
    ("by_us", "names", "options"),
    [
        (True, (), {}),
        (False, (), {"ca_pem": None, "insecure_skip_tls_verify": True}),
        (True, ("inner",), {"tls_server_name": "inner"}),
    ],
    ids=["of the named authority", "unverified", "of another name than the address"],
)
async def test_a_server_is_trusted(
    tmp_path: Path, ours: Made, names: tuple[str, ...], options: dict[str, Any], *, by_us: bool
) -> None:
    tls = serving(ours if by_us else Made(tmp_path, "stranger"), *names)
    async with ScriptedApiserver(answers(200), tls=tls) as server:
        given = {"ca_pem": ours.ca.read_text()} | options
        async with KubernetesClient(ClusterCredentials(server=server.url, **given)) as kube:
            await kube.read("/x")

    assert len(server.requests) == 1


async def test_a_server_of_another_authority_is_refused_and_the_error_names_the_setting(
    tmp_path: Path, ours: Made
) -> None:
    tls = serving(Made(tmp_path, "stranger"))
    trusted = ours.ca.read_text()
    async with (
        ScriptedApiserver(answers(200), tls=tls) as server,
        KubernetesClient(ClusterCredentials(server=server.url, ca_pem=trusted)) as kube,
    ):
        with pytest.raises(KubeconfigError, match=r"not trusted.*certificate-authority"):
            await kube.read("/x")

    assert server.requests == []


async def test_a_client_certificate_is_sent(ours: Made) -> None:
    certificate, key = ours.issue("client", "system:scheduler")
    shown: dict[str, Any] = {
        "client_cert_pem": certificate.read_text(),
        "client_key_pem": key.read_text(),
    }
    async with ScriptedApiserver(answers(200), tls=serving(ours, clients_of=ours)) as server:
        anonymous = ClusterCredentials(server=server.url, ca_pem=ours.ca.read_text())
        async with KubernetesClient(replace(anonymous, **shown)) as kube:
            await kube.read("/x")
        async with KubernetesClient(anonymous) as kube:
            with pytest.raises(UnavailableError):
                await kube.read("/x")

    assert len(server.requests) == 1


async def test_an_unusable_certificate_is_a_request_error(ours: Made) -> None:
    ca_pem = ours.ca.read_text()
    credentials = ClusterCredentials(
        server="https://127.0.0.1:1", ca_pem=ca_pem, client_cert_pem=ca_pem, client_key_pem="no key"
    )

    with pytest.raises(KubeconfigError, match="unusable"):
        async with KubernetesClient(credentials):
            pass


class Probed:
    """A probe whose clock the test moves."""

    def __init__(self, kube: KubernetesClient, server: ScriptedApiserver) -> None:
        self.clock = FakeClock()
        self.server = server
        self.probe = ApiServerReachability(kube, self.clock)

    async def after_request(self, number: int) -> str | None:
        """Return the reason once this request is over."""
        await until(lambda: len(self.server.requests) == number and self.clock.sleepers)
        return self.probe.unready_reason()


@asynccontextmanager
async def probed(*steps: Step) -> AsyncIterator[Probed]:
    async with (
        ScriptedApiserver(*steps) as server,
        KubernetesClient(ClusterCredentials(server=server.url)) as kube,
    ):
        found = Probed(kube, server)
        running = asyncio.create_task(found.probe.run())
        try:
            yield found
        finally:
            await end(running)


async def test_one_failure_is_followed_by_another_request_before_a_service_is_unready() -> None:
    async with probed(answers(200), refuses(503, "busy"), answers(200)) as api:
        assert "no response yet" in (api.probe.unready_reason() or "")
        assert await api.after_request(1) is None

        api.clock.advance(INTERVAL_S)
        assert await api.after_request(2) is None
        api.clock.advance(RETRY_S)
        assert await api.after_request(3) is None
        api.clock.advance(INTERVAL_S - RETRY_S)

        assert api.probe.unready_reason() is None


async def test_refused_credentials_are_a_reason_and_a_missing_permission_is_none() -> None:
    async with probed(refuses(401, "Unauthorized"), refuses(403, "Forbidden")) as api:
        reason = await api.after_request(1)
        api.clock.advance(RETRY_S)

        assert "does not accept these credentials" in (reason or "")
        assert await api.after_request(2) is None
