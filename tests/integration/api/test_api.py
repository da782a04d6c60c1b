"""The API with a real NATS and a real Valkey: what it shows, streams, and hides."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs
from prometheus_client import REGISTRY

from services.api.http import http_server
from shared.credentials import authorization
from shared.credentials.authorization import VIEWER_COOKIE, load_tokens, make_token
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import (
    Heartbeat,
    LeaseChanged,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodTerminated,
)
from shared.model.names import Namespace
from shared.model.requests.placement import Refusal
from shared.nats.bus import Bus
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.runtime.run import sending_heartbeats
from tests.support import build
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.placer.ledger import queued, verdict
from tests.support.servers.nats import nats_server
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Stream:
    """A reader of server-sent events."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.id = ""

    async def next(self) -> tuple[str, Any]:
        name = ""
        async with asyncio.timeout(20):
            while True:
                line = (await self.answer.content.readline()).decode().rstrip("\n")
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "id":
                    self.id = value
                elif field == "data":
                    return name, json.loads(value)
                elif not line and self.answer.content.at_eof():
                    raise AssertionError("the stream has ended")

    async def until(self, key: str) -> Any:
        """Return the first delta that has something under a key."""
        while True:
            name, delta = await self.next()
            assert name == "delta"
            if delta.get(key):
                return delta[key]


@contextlib.asynccontextmanager
async def streamed(
    shown: RunningApi, *, after: str = "", last: str = "", token: str = ""
) -> AsyncIterator[Stream]:
    headers = {"Last-Event-ID": last} if last else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    url = f"{shown.url}/api/v1/events"
    timeout = aiohttp.ClientTimeout(total=None)
    async with shown.client.get(
        url, params={"after": after}, headers=headers, timeout=timeout
    ) as answer:
        assert answer.content_type == "text/event-stream"
        yield Stream(answer)


async def test_leases_are_shown_until_they_end(shown: RunningApi) -> None:
    lease = await reserve_lease(shown)

    (one,) = await shown.until_shares(1)
    assert (one["pod"], one["name"], one["state"]) == ("p1", "name-of-p1", "reserved")

    await shown.ledger.bind([lease])
    await shown.publish(PodBound(lease=lease))
    await until(shown.shares, lambda shares: shares[0]["state"] == "bound")
    await shown.ledger.release([lease.pod], reason="test")
    await shown.until_shares(0)


async def test_the_time_to_bind_of_each_pod_is_observed_once(shown: RunningApi) -> None:
    def count() -> float:
        labels = {"system": lease.dialect, "waited": "no"}
        return REGISTRY.get_sample_value("leasehold_time_to_bind_seconds_count", labels) or 0

    lease = await reserve_lease(shown)
    first = queued(lease.pod)
    bound = PodBound(lease=lease)
    before = count()

    await shown.service.observe_pod_events([first, bound, bound])
    await shown.service.observe_pod_events([bound])

    assert count() == before + 1


async def test_a_pod_has_a_history_and_is_listed_for_a_day_after_it_finished(
    shown: RunningApi,
) -> None:
    lease = await reserve_lease(shown)
    await shown.ledger.bind([lease])
    await shown.publish(PodBound(lease=lease))
    await until(shown.shares, lambda shares: bool(shares and shares[0]["state"] == "bound"))
    shown.usage.measure(lease, memory_mib=1_600, cores_percent=7)
    await until(shown.shares, lambda shares: bool(shares and shares[0]["measured"]))
    await shown.service.sample_history()
    for path in ("leases/p1", "nodes/a", "devices/GPU-a-0", f"namespaces/{lease.namespace}"):
        _, history = await shown.get(f"/api/v1/{path}/history?range=1h")
        assert (history["memory"][-1], history["used_memory"][-1]) == (4000, 1600)
    _, cluster = await shown.get("/api/v1/history?range=7d")
    assert (cluster["range"], cluster["source"], cluster["cores_capacity"]) == ("1h", "memory", 200)
    assert cluster["used_cores"][-1] == 7
    status, wrong = await shown.get("/api/v1/history?range=1y")
    assert (status, wrong["error"]) == (400, "range=1y is not one of 1h, 1d, 7d")

    ended = PodTerminated(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        node=lease.node,
        phase="Succeeded",
    )
    await shown.publish(ended)
    await until(shown.state, lambda state: len(state["events"]) == 2)
    await shown.ledger.release([lease.pod], reason="test")

    _, found = await until(
        lambda: shown.get("/api/v1/finished?node=a"), lambda reply: reply[1]["total"] == 1
    )
    (pod,) = found["pods"]
    assert (pod["pod"], pod["reason"], pod["memory_mib"]) == ("p1", "Succeeded", 4000)
    assert (await shown.get("/api/v1/finished?node=b"))[1]["total"] == 0
    assert (await shown.get("/api/v1/leases/p1/history"))[0] == 200
    assert (await shown.get("/api/v1/leases/p1"))[1]["finished"] == pod


async def test_changes_are_streamed_and_a_reader_that_reconnects_misses_nothing(
    shown: RunningApi,
) -> None:
    begin = (await shown.state())["id"]
    async with streamed(shown, after=begin) as stream:
        await reserve_lease(shown, "p1", 0)
        (device,) = await stream.until("devices")
        assert device["shares"][0]["pod"] == "p1"
        place = stream.id

    await reserve_lease(shown, "p2", 1)
    await shown.until_shares(2)

    async with streamed(shown, after=begin, last=place) as stream:
        devices = await stream.until("devices")
        assert [one["uuid"] for one in devices] == ["GPU-a-1"]


async def test_a_reader_with_an_unknown_position_must_start_anew(shown: RunningApi) -> None:
    async with streamed(shown, last="another-7") as stream:
        assert (await stream.next())[0] == "reset"


async def test_a_waiting_pod_is_shown_with_position_and_reason_until_it_leaves(
    shown: RunningApi,
) -> None:
    for pod, gpu in (("p1", 0), ("p2", 1)):
        await reserve_lease(shown, pod, gpu)
    event = queued("w1", units=16_000)
    await shown.ledger.waiting_pods.enqueue([verdict(event, await shown.ledger.capacity())])
    refused = PlacementRefused(
        pod=event.pod,
        namespace=event.namespace,
        name=event.name,
        refusal=Refusal(reason="full"),
    )
    begin = (await shown.state())["id"]
    async with streamed(shown, after=begin) as stream:
        await shown.publish(event, refused)
        queue = await stream.until("waiting")
        assert [(one["name"], one["position"], one["reason"]) for one in queue["pods"]] == [
            ("w1", 1, "full")
        ]
    _, response = await shown.get("/api/v1/leases/w1")
    assert response["lease"] is None
    assert response["waiting"]["position"] == 1
    assert "is set for default/name-of-p" in response["waiting"]["no_end"]

    await shown.ledger.waiting_pods.remove([event.pod])
    await shown.publish(event)
    await until(shown.state, lambda state: not state["waiting"]["total"])


@pytest.mark.parametrize("alike", [True, False])
async def test_the_changes_of_a_hint_are_returned_if_a_trial_leads_to_it(
    shown: RunningApi, *, alike: bool
) -> None:
    for pod, index in (("p1", 0), ("p2", 1)):
        await reserve_lease(shown, pod, index)
    wanted = build.request(build.gpu(memory=14_000), resources={})
    event = build.pod_queued("w1", wanted)
    mirror = ClusterMirror()
    async for page in shown.ledger.totals.pages():
        for totals in page:
            mirror.put_node(totals.node)
    refusal = place_explained(event.request, NodeIndex(mirror), lambda: 0.0)
    assert isinstance(refusal, Refusal)
    stored = refusal if alike else structs.replace(refusal, hint="ask an administrator")
    waits = replace(verdict(event, await shown.ledger.capacity()), refusal=stored)
    await shown.ledger.waiting_pods.enqueue([waits])
    await shown.publish(event)
    await until(shown.state, lambda state: state["waiting"]["total"])

    _, plain = await shown.get("/api/v1/leases/w1")
    _, tried = await shown.get("/api/v1/leases/w1?changes=true")

    changed = {
        "place": "resource",
        "name": "volcano.sh/vgpu-memory",
        "value": "12000",
        "container": "main",
    }
    assert "in container main set volcano.sh/vgpu-memory: 12000" in refusal.hint
    assert plain["waiting"]["changes"] == []
    assert tried["waiting"]["changes"] == ([changed] if alike else [])


async def test_recent_events_are_copies_and_take_no_work_from_consumers(shown: RunningApi) -> None:
    placed = await shown.bus.subscribe([PlacementChosen], group="binder-bind-pods")
    lease = await reserve_lease(shown)

    await shown.publish(queued("p1"), PlacementChosen(lease=lease))

    await until(
        shown.state,
        lambda state: [one["kind"] for one in state["events"]] == ["queued", "placed"],
    )
    (work,) = await placed.batch()
    assert work.events == [PlacementChosen(lease=lease)]
    work.confirm()


async def test_a_lease_without_an_event_is_found_by_its_change(shown: RunningApi) -> None:
    lease = await reserve_lease(shown)
    await shown.until_shares(1)
    await shown.ledger.bind([lease])

    await shown.ledger.activate([(lease.pod, lease.node)])
    await shown.publish(LeaseChanged(lease=lease))

    await until(shown.shares, lambda shares: shares[0]["state"] == "active")


async def test_a_replica_sends_heartbeats_and_reports_when_it_stops() -> None:
    async with nats_server() as nats, Bus.connect(nats.url, name="test") as bus:
        heartbeats = await bus.observe([Heartbeat])
        probes = {"ledger": lambda: "not read yet"}

        async with (
            asyncio.timeout(20),
            sending_heartbeats(
                bus.publish, probes, service="s", instance="s-1", node="n", every_s=0.01
            ),
        ):
            (first, *_) = await heartbeats.batch()
            (second, *_) = await heartbeats.batch()
        async with asyncio.timeout(20):
            while not (last := (await heartbeats.batch())[-1].events[-1]).stopping:
                pass

        assert (first.events[0].instance, first.events[0].node) == ("s-1", "n")
        assert second.events[0].unready_reasons == ("ledger: not read yet",)
        assert (first.events[0].stopping, last.stopping) == (False, True)


async def test_a_lease_has_its_trace_and_a_device_its_shares(shown: RunningApi) -> None:
    await reserve_lease(shown, "7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")
    await shown.until_shares(1)

    _, lease = await shown.get("/api/v1/leases/7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")
    _, device = await shown.get("/api/v1/devices/GPU-a-0")

    assert lease["trace"]["url"] == "http://j/7f7c2c5e57a54d3c9d0e0d7e6c1f2a3b"
    assert device["shares"][0]["name"] == lease["lease"]["name"]
    assert (await shown.get("/api/v1/leases/unknown"))[0] == 404
    assert (await shown.get("/api/v1/namespaces/default"))[1]["leases"] == 1


async def test_without_a_token_only_loopback_hosts_are_served(shown: RunningApi) -> None:
    headers = {"Host": "evil.example.org"}
    async with shown.client.get(f"{shown.url}/api/v1/state", headers=headers) as answer:
        assert answer.status == 403


async def test_every_response_has_security_headers(shown: RunningApi) -> None:
    for path in ("/", "/static/page.js", "/api/v1/state", "/static/none", "/login"):
        async with shown.client.get(shown.url + path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/static/page.js", "/api/v1/version"])
async def test_files_and_large_documents_are_compressed_for_clients_that_accept_it(
    shown: RunningApi, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(http_server, "LARGE_BYTES", 10)
    bodies = set()
    for accepted, encoding in (("gzip, br", "gzip"), ("identity", None)):
        headers = {"Accept-Encoding": accepted}
        async with shown.client.get(shown.url + path, headers=headers) as answer:
            assert answer.headers.get("Content-Encoding") == encoding
            bodies.add(await answer.text())

    assert len(bodies) == 1


# Authentication


async def test_without_a_valid_token_nothing_is_shown(serve: Any) -> None:
    async with serve(tokens="everything *\n") as shown:
        for path in ("/api/v1/state", "/api/v1/events", "/api/v1/leases/p1"):
            assert (await shown.get(path, "wrong"))[0] == 401
            assert (await shown.get(path))[0] == 401


async def test_login_stores_the_token_where_scripts_cannot_read_it(serve: Any) -> None:
    async with serve(tokens="secret *\n") as shown:
        assert "Token" in (await shown.get("/"))[1]

        async with shown.client.post(f"{shown.url}/login", data={"token": "wrong"}) as answer:
            assert answer.status == 401
        async with shown.client.post(
            f"{shown.url}/login", data={"token": "secret"}, allow_redirects=False
        ) as answer:
            cookie = answer.cookies[VIEWER_COOKIE]

        assert (cookie["httponly"], cookie["samesite"]) == (True, "Strict")
        assert "Sign out" in (await shown.get("/"))[1]
        assert (await shown.get("/api/v1/state"))[0] == 200
        await shown.client.post(f"{shown.url}/logout")
        assert (await shown.get("/api/v1/state"))[0] == 401


async def test_a_token_is_created_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokens"
    messages: list[str] = []

    make_token(path, messages.append)
    first = path.read_text()
    make_token(path, messages.append)

    assert path.read_text() == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.split()[1] == "*"
    assert first.split()[0] not in messages[0]
    viewer = await load_tokens(path).authenticate(first.split()[0])
    assert viewer is not None
    assert viewer.name == "administrator"


async def test_a_revoked_right_ends_the_view() -> None:
    reviews = Reviews()
    clock = FakeClock()
    where = [Namespace("default")]
    async with reviewed(reviews, clock) as authenticator:
        viewer = await authenticator.authenticate("token-of-member")
        assert viewer is not None
        assert await viewer.visible(where) == frozenset(where)
        assert await viewer.visible(where) == frozenset(where)
        assert reviews.requests == ["member:", "member:default"]

        reviews.rights["member"].clear()
        clock.advance(31)

        assert await viewer.visible(where) == frozenset()
        reviews.rights.pop("member")
        assert await authenticator.authenticate("token-of-member") is None


@pytest.mark.parametrize("path", ["/static/..%2f__init__.py", "/static/page.html", "/api/v1/none"])
async def test_unknown_paths_are_not_found(path: str, shown: RunningApi) -> None:
    assert (await shown.get(path))[0] == 404


async def test_unknown_tokens_cost_few_reviews_and_keep_no_known_one_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authorization, "UNKNOWN_TOKENS", 4)
    reviews = Reviews()
    clock = FakeClock()
    async with reviewed(reviews, clock) as authenticator:
        assert await authenticator.authenticate("token-of-member", "10.0.0.1")
        clock.advance(authorization.CACHE_S + 1)
        for number in range(3):
            for _ in range(2):
                assert await authenticator.authenticate(f"invented-{number}", "10.0.0.2") is None

        with pytest.raises(UnavailableError, match="many unknown tokens"):
            await authenticator.authenticate("invented-3", "10.0.0.2")
        assert await authenticator.authenticate("token-of-root", "10.0.0.3")
        with pytest.raises(UnavailableError, match="many unknown tokens"):
            await authenticator.authenticate("invented-4", "10.0.0.4")
        assert await authenticator.authenticate("token-of-member", "10.0.0.1")
        clock.advance(1)
        assert await authenticator.authenticate("invented-4", "10.0.0.4") is None
