"""What viewers see of namespaces of others, and which requests with an effect they may send."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp
import pytest

from shared.credentials.authorization import AnonymousAuthenticator, Authenticator
from shared.model.budgets.budget import AccountUpdate, BudgetWindow, ChargeEntry
from shared.model.events.node_events import ViolationFound
from shared.model.events.pod_events import (
    BudgetChanged,
    PlacementChosen,
    PlacementRefused,
    PodBound,
)
from shared.model.events.request_reply import (
    DryRunReply,
    DryRunRequest,
    GrantReply,
    GrantRequest,
    ResizeReply,
    ResizeRequest,
)
from shared.model.leases.lease import ShareSize
from shared.model.leases.ledger import reservation_for
from shared.model.leases.preemption import Preemption
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import Gang
from shared.nats.bus import Bus
from tests.support.api.board import eviction
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.placer.ledger import device, queued, report, share, verdict
from tests.support.servers.nats import flush
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

THEIRS = ("p1", "1234567", "w1", "default", "reason-of-theirs", "window-of-theirs")
"""Words of a namespace, its pods, and their messages."""


async def streamed_until(shown: RunningApi, after: str, token: str, expected: str) -> str:
    """Return everything that is streamed for a token until a word arrives."""
    found = ""
    async with shown.client.get(
        f"{shown.url}/api/v1/events",
        params={"after": after},
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as answer:
        async with asyncio.timeout(20):
            while expected not in found:
                found += (await answer.content.readline()).decode()
    return found


async def test_neither_stream_nor_api_nor_pages_name_a_namespace_that_the_viewer_may_not_see(
    serve: Any,
) -> None:
    async with serve(tokens="for-b b\nfor-default default\n") as shown:
        begin = (await shown.state("for-b"))["id"]
        lease = await reserve_lease(shown)
        await shown.ledger.bind([lease])
        shown.usage.measure(lease, memory_mib=1_234_567)
        await until(
            lambda: shown.shares("for-default"), lambda found: found and found[0]["measured"]
        )
        waits = queued("w1", units=99_000)
        mine = replace(queued("mine", units=99_000), namespace=Namespace("b"), name="name-of-mine")
        capacity = await shown.ledger.capacity()
        await shown.ledger.waiting_pods.enqueue([verdict(waits, capacity), verdict(mine, capacity)])
        await shown.publish(
            PlacementChosen(lease=lease),
            PodBound(lease=lease),
            PlacementRefused(
                pod=waits.pod,
                namespace=waits.namespace,
                name=waits.name,
                refusal=Refusal(reason="reason-of-theirs"),
            ),
            PlacementRefused(
                pod=mine.pod,
                namespace=mine.namespace,
                name=mine.name,
                refusal=Refusal(reason="full"),
            ),
            ViolationFound(
                node=NodeName("a"),
                pod=PodUid("p1"),
                namespace=Namespace("default"),
                name="name-of-p1",
                container="main",
                reason="GpuLimitTampered",
                message="reason-of-theirs",
            ),
            BudgetChanged(
                namespace=Namespace("default"),
                state="ok",
                previous_state="ok",
                lease_class="guaranteed",
                window="window-of-theirs",
            ),
        )

        theirs, others = await asyncio.gather(
            streamed_until(shown, begin, "for-default", "name-of-p1"),
            streamed_until(shown, begin, "for-b", "name-of-mine"),
        )
        await until(lambda: shown.state("for-b"), lambda state: state["waiting"]["hidden"] >= 1)
        uuid = DeviceUuid("GPU-a-0")
        answers = [
            others,
            str(await shown.state("for-b")),
            *[
                str((await shown.get(path, "for-b"))[1])
                for path in ("/", f"/api/v1/devices/{uuid}")
            ],
        ]

        assert "name-of-p1" in theirs
        for text in answers:
            assert [expected for expected in THEIRS if expected in text] == []
        theirs_only = ("leases/p1", "leases/w1", "namespaces/default")
        for path in (*theirs_only, "leases/p1/history", "namespaces/default/history"):
            assert (await shown.get(f"/api/v1/{path}", "for-b"))[0] == 404
        for path in ("history", "nodes/a/history", f"devices/{uuid}/history"):
            _, history = await shown.get(f"/api/v1/{path}", "for-b")
            assert {"used_memory", "used_cores", "idle"}.isdisjoint(history)
        await shown.ledger.release(["p1"], reason="test")
        await until(lambda: finished(shown, "for-default"), lambda names: names == ["name-of-p1"])
        assert await finished(shown, "for-b") == []


async def finished(shown: RunningApi, token: str) -> list[str]:
    return [pod["name"] for pod in (await shown.get("/api/v1/finished", token))[1]["pods"]]


async def test_a_viewer_sees_neither_the_steps_of_pods_that_are_gone_nor_for_which_one_was_evicted(
    serve: Any,
) -> None:
    async with serve(tokens="for-a a\nfor-b b\n") as shown:
        stored = Preemption(id="uid-for", victims=())
        assert await shown.preemptions.open(stored)
        (read,) = (await shown.preemptions.state(now=time.time())).open
        await shown.preemptions.save(read, stored, [eviction("victim", time.time())])

        state = await until(lambda: shown.state("for-a"), lambda state: bool(state["events"]))

        assert state["events"][0]["name"] == "victim"
        assert "urgent" not in str(state)
        assert (await shown.get("/api/v1/leases/victim", "for-a"))[0] == 200
        assert (await shown.get("/api/v1/leases/victim", "for-b"))[0] == 404


async def test_the_fault_of_a_device_names_no_pod_of_another_namespace(serve: Any) -> None:
    async with serve(tokens="for-all *\nfor-b b\n") as shown:
        unrecorded = replace(device("a", 0), healthy=False, fault="pods a/theirs use parts of it")
        sick = replace(device("a", 1), healthy=False, fault="cordoned: XidError: Xid 79")
        await shown.ledger.save_devices([report("a", [unrecorded, sick])])

        async def faults(token: str) -> list[str]:
            return sorted(one["fault"] for one in (await shown.state(token))["devices"])

        assert await until(lambda: faults("for-all"), all) == [sick.fault, unrecorded.fault]
        assert await faults("for-b") == ["", sick.fault]
        assert "theirs" not in str(await shown.get("/api/v1/devices/GPU-a-0", "for-b"))


async def test_costs_of_namespaces_that_the_viewer_may_not_see_are_added_up_without_their_names(
    serve: Any,
) -> None:
    async with serve(tokens="for-a a\nfor-all *\n") as shown:
        status, nothing = await shown.get("/api/v1/reports/costs", "for-a")
        assert (status, nothing["lines"]) == (200, [])
        await shown.record_costs("a", "b", "c")

        _, some = await shown.get("/api/v1/reports/costs?step=hour", "for-a")
        _, everything = await shown.get("/allocation/compute?window=2d", "for-all")
        wrong = ("/allocation?window=1d&aggregate=pod", "/allocation?window=90d&step=1h")
        refused = [await shown.get(path, "for-all") for path in ("/allocation", *wrong)]
        unknown, _ = await shown.get("/allocation?window=1d", "of-nobody")

    amounts = {line["namespace"]: line["gpu_hours"] for line in some["lines"]}
    assert amounts == {"a": "1.000000", "(others)": "2.000000"}
    assert some["capacity_units"] == {"T4": str(3 * 3_600_000_000)}
    assert set(everything["data"][0]) == {"a", "b", "c"}
    assert [status for status, _ in refused] == [400] * 3
    assert unknown == 401


async def test_the_ledger_of_a_budget_is_read_in_pages_by_those_who_may_see_its_namespace(
    serve: Any,
) -> None:
    async with serve(tokens="for-a a\nfor-b b\n") as shown:
        window = BudgetWindow(id="w", start_ms=1)
        charges = tuple(ChargeEntry(window="w", kind="charge", units=unit) for unit in (1, 2, 3))
        update = AccountUpdate(
            namespace=Namespace("a"), revision=0, windows=(window,), entries=charges
        )
        assert await shown.budgets.save(update)
        path = "/api/v1/budgets/a/ledger"
        status, page = await shown.get(f"{path}?from=0002-01-01T00:00:00Z", "for-a")
        _, rest = await shown.get(f"{path}?cursor={page['entries'][0]['id']}", "for-a")
        hidden, _ = await shown.get(path, "for-b")
        refused = [
            (await shown.get(f"{path}?{query}", "for-a"))[0]
            for query in ("cursor=1-2-3", "cursor=-", f"cursor=1-{'9' * 20}", "from=soon")
        ]
        report = "/api/v1/reports/showback"
        wrong, _ = await shown.get(f"{report}?groupBy=colour", "for-a")
        known, _ = await shown.get(f"{report}?window=w", "for-a")
        reverse = "from=2031-05-02T00:00:00Z&to=2031-05-01T00:00:00Z"
        reversed_ = [
            await shown.get(f"/api/v1/reports/{kind}?{reverse}", "for-a")
            for kind in ("showback", "costs")
        ]
        unknown = [
            await shown.get(f"{report}?window={window}", token)
            for window, token in (("2099-13", "for-a"), ("w", "for-b"))
        ]

    assert (status, page["cursor"]) == (200, None)
    assert [entry["units"] for entry in page["entries"]] == ["1", "2", "3"]
    assert list(page["entries"][0])[:6] == ["id", "ts", "ns", "window", "kind", "lease"]
    assert rest["entries"] == page["entries"][1:]
    assert (hidden, refused, wrong, known) == (404, [400] * 4, 400, 200)
    order = "from=2031-05-02T00:00:00Z is not before to=2031-05-01T00:00:00Z"
    assert reversed_ == [(400, {"error": order})] * 2
    text = "no namespace that you may see has a window"
    assert unknown == [
        (400, {"error": f"{text} 2099-13: the latest are w"}),
        (400, {"error": f"{text} w: none has begun"}),
    ]


RESIZE = "/api/v1/leases/p1/resize"
GRANT = "/api/v1/budgets/default/grants"
SIZE = {"memory_mib": 2_000}
MINUTES = {"minutes": "30", "reason": "deadline", "key": "one"}


@dataclass
class Receivers:
    """A planner, a binder and a timekeeper that record what they receive."""

    received: list[Any] = field(default_factory=list)

    async def resize(self, request: ResizeRequest) -> ResizeReply:
        self.received.append(request)
        size = ShareSize(memory_mib=request.memory_mib or 0, cores_percent=30)
        return ResizeReply(outcome="resized", container="main", node="a", after=size)

    async def plan(self, request: DryRunRequest) -> DryRunReply:
        self.received.append(request)
        return DryRunReply(waits=True, reason="no pod may be preempted for it")

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
        await bus.reply(DryRunRequest, "planner", "", receivers.plan)
        await bus.reply(GrantRequest, "timekeeper", "", receivers.grant)
        await flush(bus.client)
        await reserve_lease(shown)
        await until(lambda: shown.service.projection.devices)
        await until(shown.service.projection.leased_nodes)
        yield shown, receivers


@pytest.mark.parametrize("anonymous", [True, False])
async def test_orders_are_done_for_those_who_may_and_nobody_else(
    serve: Any, anonymous: bool
) -> None:
    async with reviewed(Reviews(), FakeClock()) as of_tokens:
        authenticator = AnonymousAuthenticator(of_tokens) if anonymous else of_tokens
        async with api(serve, authenticator) as (shown, receivers):
            refused = [
                (await shown.post(path, body, token))[0]
                for token in ("", "token-of-member", "token-of-nobody")
                for path, body in ((RESIZE, SIZE), (GRANT, MINUTES))
            ]
            nothing = list(receivers.received)
            resized = await shown.post(RESIZE, SIZE, "token-of-root")
            granted = await shown.post(GRANT, MINUTES, "token-of-root")

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
    assert resize.actor == "root"
    assert (grant.namespace, grant.actor, grant.reason) == ("default", "root", "deadline")


async def test_what_another_site_or_a_mistake_sends_does_nothing(serve: Any) -> None:
    async with (
        reviewed(Reviews(), FakeClock()) as authenticator,
        api(serve, authenticator) as (shown, receivers),
    ):
        form = await shown.post(RESIZE, SIZE, "token-of-root", **{"Content-Type": "text/plain"})
        negative = await shown.post(RESIZE, {"memory_mib": -1}, "token-of-root")
        unknown = await shown.post("/api/v1/leases/p9/resize", SIZE, "token-of-root")
        hidden = await shown.post(RESIZE, SIZE, "token-of-stranger")
        large = await shown.post(GRANT, MINUTES | {"reason": "x" * 300_000}, "token-of-root")
        long = await shown.post(GRANT.replace("default", "a" * 300), MINUTES, "token-of-root")
        nothing = list(receivers.received)
        no_number = await shown.post(GRANT, MINUTES | {"minutes": "no"}, "token-of-root")

    statuses = [each[0] for each in (form, negative, unknown, hidden, large, long)]
    assert (statuses, nothing) == ([415, 400, 404, 404, 413, 400], [])
    assert no_number == (400, {"error": "no is not a number"})


async def test_a_planner_plans_a_preemption_for_those_who_see_all_namespaces(serve: Any) -> None:
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
        long = await shown.get(f"{path}?min_runtime_s=1e300", "token-of-root")

    assert (unknown[0], refused[0], wrong[0], long[0]) == (404, 403, 400, 400)
    assert (found[1]["pod"], found[1]["reason"]) == (
        "default/w1",
        "no pod may be preempted for it",
    )
    assert receivers.received == [DryRunRequest(pod=waits.pod, min_runtime_s=5.0)]


@pytest.mark.parametrize("gang", [None, Gang(name="default/train", min_member=1)])
async def test_a_preemption_in_progress_is_shown_before_the_pod_is_seen_to_wait(
    serve: Any, gang: Gang | None
) -> None:
    pod = queued("w1", units=1_000)
    place = Placement(node=NodeName("a"), shares=(share("a", 0),))
    async with serve(tokens="for-all *\n") as shown:
        plan = Preemption(
            id=gang.name if gang else pod.pod,
            victims=(),
            wanted=(reservation_for(pod, (place,)),),
            gang=gang,
        )
        assert await shown.preemptions.open(plan)

        status, view = await shown.get(f"/api/v1/preemptions/{pod.pod}", "for-all")

    assert status == 200
    assert (view["pod"], view["in_progress"]["id"]) == ("default/w1", plan.id)


async def test_without_a_binder_the_outcome_is_said_to_be_unknown(serve: Any) -> None:
    async with (
        reviewed(Reviews(), FakeClock()) as authenticator,
        serve(authenticator) as shown,
    ):
        await reserve_lease(shown)
        await until(shown.service.projection.leased_nodes)
        status, body = await shown.post(RESIZE, SIZE, "token-of-root")

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

        tried = partial(shown.post, "/api/v1/what-if")
        status, fits = await tried(manifest(8_000, replicas=3), "for-all")
        _, room = await tried(manifest(14_000, replicas=2), "for-all")
        _, hidden = await tried(manifest(14_000, replicas=2), "for-b")
        wrong = [
            await tried(each, "for-all")
            for each in (manifest(8_000, replicas=501), {"manifest": "x"})
        ]

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
