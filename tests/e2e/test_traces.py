"""Traces of pods as a viewer of traces finds them: one per pod, whole at any moment.

The services send their spans to a receiver of the tests; where there is a Jaeger 2, it gets the
same, and its query API returns what the receiver has.
"""

import json
import operator
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.test_default_scheduler import CLAIM, claim_pod
from tests.support.servers.jaeger import MISSING, PROGRAM, Jaeger, jaeger
from tests.support.servers.otlp import ReceivedSpan, Spans, orphans, otlp_receiver, send
from tests.support.stack import PODS, Stack, gpu_pod, running, stack, vgpu
from tests.support.waiting import until

BUDGETS = """
apiVersion: leasehold.dev/v1beta1
kind: GPUBudget
metadata: {name: team-a}
spec: {limitGPUMinutes: 0.02, policy: {type: none}}
"""
ENV = {
    "LEASEHOLD_DRA": "conditions",
    "LEASEHOLD_TICK_S": "0.2",
    "LEASEHOLD_PREEMPTION_NOTICE_S": "1",
    "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "1",
}
GANG = {
    "gang.scheduling.koordinator.sh/name": "pair",
    "gang.scheduling.koordinator.sh/min-available": "2",
}
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
NO_MEMORY = {"leasehold.reason.code": "InsufficientGpuMemory"}


@dataclass(slots=True)
class Played:
    """What was played on the stack, as traces."""

    spans: Spans
    traces: dict[str, str] = field(default_factory=dict)
    """The ID of each pod's trace, by the pod's name."""
    orphans_of_waiting: list[str] = field(default_factory=list)
    while_waiting: list[ReceivedSpan] = field(default_factory=list)

    def of(self, name: str) -> list[ReceivedSpan]:
        return self.spans.trace(self.traces[name])

    def span(self, pod: str, name: str) -> ReceivedSpan:
        return next(span for span in self.of(pod) if span.name == name)


def trace_of(made: dict[str, Any]) -> str:
    return str(made["metadata"]["uid"]).replace("-", "")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Played]:
    budgets = tmp_path_factory.mktemp("budgets") / "budgets.yaml"
    budgets.write_text(BUDGETS)
    async with otlp_receiver() as spans:
        flags = ("--nodes", "1", "--gpus", "1xT4", "--budgets", str(budgets))
        traced = ("--otlp-endpoint", spans.url)
        async with stack(*flags, *traced, webhook=True, env=ENV) as up:
            result = Played(spans)
            await _play_a_waiting_pod(up, result)
            await _play_a_gang(up, result)
            await _play_a_failed_pod(up, result)
            await _play_a_claim(up, result)
            await _play_a_preempted_pod(up, result)
        yield result


async def _create(up: Stack, result: Played, pod: dict[str, Any], namespace: str = "") -> None:
    path = PODS.replace("/default/", f"/{namespace}/") if namespace else PODS
    made = json.loads(await up.kube.create(path, pod))
    result.traces[pod["metadata"]["name"]] = trace_of(made)


async def _until_spans(result: Played, pod: str, *names: str) -> None:
    await until(lambda: {span.name for span in result.of(pod)} >= set(names))


async def _play_a_waiting_pod(up: Stack, result: Played) -> None:
    await _create(up, result, gpu_pod("first", vgpu(memory=12_000)))
    await up.until("first", running)
    await _create(up, result, gpu_pod("patient", vgpu(memory=12_000)))
    await _until_spans(result, "patient", "create pod", "explain waiting")
    # Services export their spans up to half a second later than the others.
    await until(lambda: orphans(result.of("patient")) == [])
    result.while_waiting = result.of("patient")
    await up.kube.delete(f"{PODS}/first")
    await up.until("patient", running)
    await _until_spans(result, "patient", "start pod", "activate shares")
    await _until_spans(result, "first", "publish pod.terminated", "end leases")
    await up.clear()


async def _play_a_gang(up: Stack, result: Played) -> None:
    for name in ("left", "right"):
        await _create(up, result, gpu_pod(name, vgpu(memory=1000), annotations=GANG))
    for name in ("left", "right"):
        await up.until(name, running)
        await _until_spans(result, name, "start pod", "reserve devices", "activate shares")
    await up.clear()


async def _play_a_failed_pod(up: Stack, result: Played) -> None:
    failing = gpu_pod("failing", vgpu(memory=1000), restartPolicy="Never")
    failing["spec"]["containers"][0]["command"] = ["sh", "-c", "exit 3"]
    await _create(up, result, failing)
    await up.until("failing", lambda pod: pod["status"].get("phase") == "Failed")
    await _until_spans(result, "failing", "publish pod.terminated", "end leases")
    await up.clear()


async def _play_a_claim(up: Stack, result: Played) -> None:
    made = json.loads(await up.kube.create(CLAIMS, CLAIM))
    result.traces["claiming"] = trace_of(made)
    await up.create(claim_pod("claiming"))
    await up.until("claiming", running)
    await _until_spans(result, "claiming", "lease claim", "lease claims", "activate shares")
    await up.clear()
    await up.kube.delete(f"{CLAIMS}/shared")


async def _play_a_preempted_pod(up: Stack, result: Played) -> None:
    for namespace in ("team-a", "team-b"):
        await up.kube.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    await _create(up, result, gpu_pod("spender", vgpu(memory=12_000)), "team-a")
    await _until_spans(result, "spender", "start pod")
    await _create(up, result, gpu_pod("saver", vgpu(memory=12_000)), "team-b")
    await _until_spans(result, "saver", "start pod", "activate shares")
    await _until_spans(result, "spender", "evict pod", "publish pod.terminated", "end leases")


def test_no_span_of_a_waiting_pod_is_an_orphan(played: Played) -> None:
    assert {span.name for span in played.while_waiting} >= {"create pod", "explain waiting"}
    assert "start pod" not in {span.name for span in played.while_waiting}
    assert orphans(played.while_waiting) == []


def test_no_span_of_any_trace_is_an_orphan(played: Played) -> None:
    assert orphans(played.spans.all()) == []


def test_a_waiting_pod_names_the_reason_and_its_numbers(played: Played) -> None:
    facts = played.span("patient", "explain waiting").attributes

    assert (
        facts.items()
        >= {
            **NO_MEMORY,
            "leasehold.excluded_nodes.InsufficientGpuMemory": "1",
            "leasehold.permanent": "false",
            "k8s.pod.name": "patient",
            "k8s.namespace.name": "default",
        }.items()
    )
    assert facts["leasehold.reason"].startswith("0/1 nodes are available: 1 Insufficient GPU")
    assert facts["leasehold.hint"]


def test_pods_of_a_gang_link_to_one_another(played: Played) -> None:
    left, right = (played.span(name, "reserve devices") for name in ("left", "right"))

    assert left.links == {played.traces["right"]}
    assert right.links == {played.traces["left"]}


def test_a_failed_pod_is_marked_as_an_error_and_others_are_not(played: Played) -> None:
    ended = played.span("failing", "publish pod.terminated")

    assert (ended.error, ended.attributes["k8s.pod.status.phase"]) == (
        "the pod has failed",
        "Failed",
    )
    assert [span.name for name in ("first", "patient", "left") for span in played.of(name)
            if span.error is not None] == []  # fmt: skip


def test_an_evicted_pod_says_why_and_links_to_the_pod_that_gets_its_devices(
    played: Played,
) -> None:
    evicted = played.span("spender", "evict pod")

    assert evicted.links == {played.traces["spender"], played.traces["saver"]}
    assert "budget" in evicted.attributes["leasehold.reason"]
    assert evicted.attributes["k8s.node.name"] == "node-0"
    assert "team-b" not in str(evicted.attributes), "whose pods others may not see"


def test_a_claims_spans_are_one_trace_that_names_its_pod(played: Played) -> None:
    spans = played.of("claiming")
    pods = {span.attributes["k8s.pod.name"] for span in spans if "k8s.pod.name" in span.attributes}

    assert pods == {"claiming"}
    assert {span.attributes["leasehold.claim.name"] for span in spans} == {"shared"}
    assert {span.attributes.get("k8s.pod.uid") for span in spans}.isdisjoint(
        span.attributes["leasehold.claim.uid"] for span in spans
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def viewer(played: Played, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Jaeger]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    log: Path = tmp_path_factory.mktemp("jaeger") / "log"
    async with jaeger(PROGRAM, log) as server:
        await send(played.spans.requests, server.otlp)
        for trace in played.traces.values():
            count = len({span.span for span in played.spans.trace(trace)})
            await until(partial(_count, server, trace), partial(operator.eq, count))
        yield server


async def _count(server: Jaeger, trace: str) -> int:
    return len({span.span for span in await server.trace(trace)})


async def test_jaeger_has_each_pods_trace_as_it_was_sent(viewer: Jaeger, played: Played) -> None:
    for name, trace in played.traces.items():
        sent = {(s.span, s.parent, s.name, s.service, s.error) for s in played.of(name)}

        spans = await viewer.trace(trace)

        assert {(s.span, s.parent, s.name, s.service, s.error) for s in spans} == sent
        assert orphans(spans) == []


FOUND: list[tuple[str, str, dict[str, str], set[str]]] = [
    ("by pod", "watcher", {"k8s.pod.name": "patient"}, {"patient"}),
    ("by namespace", "watcher", {"k8s.namespace.name": "team-b"}, {"saver"}),
    ("by phase", "watcher", {"k8s.pod.status.phase": "Failed"}, {"failing"}),
    ("by claim", "binder", {"leasehold.claim.name": "shared"}, {"claiming"}),
    ("by the pod of a claim", "binder", {"k8s.pod.name": "claiming"}, {"claiming"}),
    ("by eviction", "binder", {"k8s.pod.name": "spender", "k8s.node.name": "node-0"}, {"spender"}),
]


@pytest.mark.parametrize(
    ("service", "tags", "pods"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND]
)
async def test_jaeger_finds_traces(
    viewer: Jaeger, played: Played, service: str, tags: dict[str, str], pods: set[str]
) -> None:
    traces = await viewer.find(f"leasehold-{service}", tags=tags)

    assert traces == {played.traces[pod] for pod in pods}


async def test_jaeger_finds_pods_by_the_reason_why_they_waited(
    viewer: Jaeger, played: Played
) -> None:
    traces = await viewer.find("leasehold-binder", tags=NO_MEMORY)

    assert traces >= {played.traces["patient"], played.traces["saver"]}
    assert played.traces["first"] not in traces


async def test_jaeger_finds_every_pod_by_its_node(viewer: Jaeger, played: Played) -> None:
    traces = await viewer.find("leasehold-node-agent", tags={"k8s.node.name": "node-0"})

    assert traces == set(played.traces.values())


async def test_jaeger_shows_a_gangs_links(viewer: Jaeger, played: Played) -> None:
    for name, other in (("left", "right"), ("right", "left")):
        [reserved] = [
            span
            for span in await viewer.trace(played.traces[name])
            if span.name == "reserve devices"
        ]
        assert reserved.links == {played.traces[other]}
