"""Requests with an effect: who may send them, and what binder and timekeeper receive."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.credentials.authorization import AnonymousAuthenticator, Authenticator
from shared.model.events.request_reply import (
    DryRunReply,
    DryRunRequest,
    GrantReply,
    GrantRequest,
    ResizeReply,
    ResizeRequest,
)
from shared.model.lease import ShareSize
from shared.nats.bus import Bus
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.placer.ledger import queued, verdict
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESIZE = "/api/v1/leases/p1/resize"
GRANT = "/api/v1/budgets/default/grants"
SIZE = {"memory_mib": 2_000}
MINUTES = {"minutes": "30", "reason": "deadline", "key": "one"}


@dataclass
class Receivers:
    """A binder and a timekeeper that record what they receive."""

    received: list[Any] = field(default_factory=list)

    async def resize(self, request: ResizeRequest) -> ResizeReply:
        self.received.append(request)
        size = ShareSize(memory_mib=request.memory_mib or 0, cores_percent=30)
        return ResizeReply(outcome="resized", container="main", node="a", after=size)

    async def plan(self, request: DryRunRequest) -> DryRunReply:
        self.received.append(request)
        return DryRunReply(waits=True, reason="no lease may be preempted for it")

    async def grant(self, request: GrantRequest) -> GrantReply:
        self.received.append(request)
        if request.minutes == "no":
            return GrantReply(refusal="no is not a number")
        return GrantReply(granted="30.000")


@asynccontextmanager
async def api(
    serve: Any, authenticator: Authenticator
) -> AsyncIterator[tuple[RunningApi, Receivers]]:
    receivers = Receivers()
    async with serve(authenticator) as shown, Bus.connect(shown.nats_url, name="x") as bus:
        await bus.reply(ResizeRequest, "binder", "", receivers.resize)
        await bus.reply(DryRunRequest, "binder", "", receivers.plan)
        await bus.reply(GrantRequest, "timekeeper", "", receivers.grant)
        await reserve_lease(shown)
        await until(lambda: shown.service.projection.devices)
        await until(shown.service.projection.leased_nodes)
        yield shown, receivers


async def send(
    shown: RunningApi, path: str, body: Any, token: str = "", **headers: str
) -> tuple[int, Any]:
    if token:
        headers["Authorization"] = f"Bearer token-of-{token}"
    async with shown.client.post(shown.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("anonymous", [True, False])
async def test_orders_are_done_for_those_who_may_and_nobody_else(
    serve: Any, anonymous: bool
) -> None:
    async with reviewed(Reviews(), FakeClock()) as of_tokens:
        authenticator = AnonymousAuthenticator(of_tokens) if anonymous else of_tokens
        async with api(serve, authenticator) as (shown, receivers):
            refused = [
                (await send(shown, path, body, token))[0]
                for token in ("", "member", "nobody")
                for path, body in ((RESIZE, SIZE), (GRANT, MINUTES))
            ]
            nothing = list(receivers.received)
            resized = await send(shown, RESIZE, SIZE, "root")
            granted = await send(shown, GRANT, MINUTES, "root")

    assert (refused, nothing) == ([401, 401, 403, 403, 401, 401], [])
    assert (resized[0], resized[1]["outcome"], resized[1]["after"]["memory_mib"]) == (
        200,
        "resized",
        2_000,
    )
    assert granted == (
        200,
        {
            "namespace": "default",
            "granted_minutes": "30.000",
            "remaining_minutes": None,
            "missing_minutes": None,
        },
    )
    resize, grant = receivers.received
    assert (resize.pod, resize.memory_mib, resize.cores_percent) == ("p1", 2_000, None)
    assert (grant.namespace, grant.actor, grant.reason) == ("default", "root", "deadline")


async def test_what_another_site_or_a_mistake_sends_does_nothing(serve: Any) -> None:
    async with (
        reviewed(Reviews(), FakeClock()) as authenticator,
        api(serve, authenticator) as (shown, receivers),
    ):
        form = await send(shown, RESIZE, SIZE, "root", **{"Content-Type": "text/plain"})
        negative = await send(shown, RESIZE, {"memory_mib": -1}, "root")
        unknown = await send(shown, "/api/v1/leases/p9/resize", SIZE, "root")
        hidden = await send(shown, RESIZE, SIZE, "stranger")
        large = await send(shown, GRANT, MINUTES | {"reason": "x" * 300_000}, "root")
        nothing = list(receivers.received)
        no_number = await send(shown, GRANT, MINUTES | {"minutes": "no"}, "root")

    statuses = [each[0] for each in (form, negative, unknown, hidden, large)]
    assert (statuses, nothing) == ([415, 400, 404, 404, 413], [])
    assert no_number == (400, {"error": "no is not a number"})


async def test_a_binder_plans_a_preemption_for_those_who_see_all_namespaces(serve: Any) -> None:
    path = "/api/v1/preemptions/w1"
    async with (
        reviewed(Reviews(), FakeClock()) as authenticator,
        api(serve, authenticator) as (shown, receivers),
    ):
        unknown = await shown.get(path, "token-of-root")
        waits = queued("w1", units=99_000)
        await shown.ledger.waiting_pods.enqueue([verdict(waits, await shown.ledger.capacity())])
        await shown.publish(waits)
        found = await until(
            lambda: shown.get(f"{path}?min_runtime_s=5", "token-of-root"),
            lambda answer: answer[0] == 200,
        )
        refused = await shown.get(path, "token-of-member")
        wrong = await shown.get(f"{path}?min_runtime_s=soon", "token-of-root")

    assert (unknown[0], refused[0], wrong[0]) == (404, 403, 400)
    assert (found[1]["pod"], found[1]["reason"]) == (
        "default/w1",
        "no lease may be preempted for it",
    )
    assert receivers.received == [DryRunRequest(pod=waits.pod, min_runtime_s=5.0)]


async def test_without_a_binder_the_outcome_is_said_to_be_unknown(serve: Any) -> None:
    async with (
        reviewed(Reviews(), FakeClock()) as authenticator,
        serve(authenticator) as shown,
    ):
        await reserve_lease(shown)
        await until(shown.service.projection.leased_nodes)
        status, body = await send(shown, RESIZE, SIZE, "root")

    assert status == 503
    assert "the outcome is unknown" in body["error"]


def manifest(memory_mib: int, replicas: int = 1) -> dict[str, str]:
    limits = f"{{volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: {memory_mib}}}"
    containers = f"[{{name: main, resources: {{limits: {limits}}}}}]"
    pod = f"{{metadata: {{namespace: b}}, spec: {{containers: {containers}}}}}"
    return {
        "manifest": f"{{kind: Deployment, metadata: {{name: web}}, "
        f"spec: {{replicas: {replicas}, template: {pod}}}}}"
    }


async def test_what_if_answers_where_pods_would_run_and_what_is_missing(serve: Any) -> None:
    async with serve(tokens="for-all *\nfor-b b\n") as shown:
        lease = await reserve_lease(shown, cores=50)
        await until(lambda: shown.shares("for-all"), lambda shares: len(shares) == 1)

        async def tried(body: Any, viewer: str = "all") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer for-{viewer}"}
            url = f"{shown.url}/api/v1/what-if"
            async with shown.client.post(url, json=body, headers=headers) as answer:
                return answer.status, await answer.json()

        status, fits = await tried(manifest(8_000, replicas=3))
        _, room = await tried(manifest(14_000, replicas=2))
        _, hidden = await tried(manifest(14_000, replicas=2), "b")
        wrong = [await tried(each) for each in (manifest(8_000, replicas=501), {"manifest": "x"})]

    assert status == 200
    assert [(one["origin"], one["pod"], one["node"]) for one in fits["pods"]] == [
        ("Deployment web", "b/web", "a")
    ] * 3
    assert {one["shares"][0]["memory_mib"] for one in fits["pods"]} == {8_000}
    first, second = room["pods"]
    assert (first["node"], second["node"]) == ("a", "")
    assert "Insufficient GPU memory" in second["refusal"]
    assert second["room"]["leases"] == [f"{lease.namespace}/{lease.name}"]
    assert hidden["pods"][1]["room"] is None
    assert [(code, reply["error"]) for code, reply in wrong] == [
        (400, "the manifest has 501 pods; at most 500 can be tried"),
        (400, "the manifest, document 1 is not a Kubernetes object: it has no kind"),
    ]
