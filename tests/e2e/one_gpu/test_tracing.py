"""O1: one pod is one trace, from its review until its containers run."""

import json
from typing import Any

from shared.runtime.health import OPENMETRICS
from tests.support.servers.otlp import Spans
from tests.support.stack import PODS, Stack, gpu_pod, running, succeeded, vgpu
from tests.support.waiting import until

ABOVE = {
    "start pod": "create pod",
    "review pod": "create pod",
    "publish pod.queued": "create pod",
    "start containers": "create pod",
    "place pods": "publish pod.queued",
    "reserve devices": "place pods",
    "bind pods": "place pods",
    "allocate devices": "bind pods",
    "publish share.activated": "allocate devices",
    "activate shares": "publish share.activated",
}
STEPS = {"create pod", *ABOVE}


async def test_o1_one_trace_covers_a_pod_from_its_review_until_it_runs(
    up: Stack, spans: Spans
) -> None:
    made = await up.create(gpu_pod("traced", vgpu(memory=1000)))
    uid = made["metadata"]["uid"]
    await up.until("traced", running)
    trace_id = uid.replace("-", "")
    await until(lambda: set(spans.of(trace_id)) >= STEPS)

    by_name = spans.of(trace_id)
    parents = {span.span_id: name for name, span in by_name.items()}
    assert {name: parents[by_name[name].parent_span_id] for name in ABOVE} == ABOVE
    assert by_name["create pod"].parent_span_id == b""

    async def shown_spans() -> list[dict[str, Any]]:
        done = await up.leasehold("trace", "traced", "--json")
        return list(json.loads(done.out)["spans"]) if succeeded(done) else []

    shown = await until(shown_spans, lambda spans: {step["name"] for step in spans} >= STEPS)
    assert shown[0]["name"] == "create pod"
    assert all(step["duration_s"] > 0 for step in shown if step["name"] == "review pod")
    for span in by_name.values():
        facts = {a.key: a.value.string_value for a in span.attributes}
        assert facts["k8s.pod.uid"] == uid
        assert facts["k8s.pod.name"] == "traced"
        assert facts["k8s.namespace.name"] == "default"
    placed = {a.key: a.value.string_value for a in by_name["place pods"].attributes}
    assert placed["messaging.system"] == "nats"
    assert placed["messaging.destination.name"] == "pod.queued.v1"
    assert {name for name, span in spans.received if span.trace_id.hex() == trace_id} == {
        "leasehold-webhook",
        "leasehold-watcher",
        "leasehold-placer",
        "leasehold-binder",
        "leasehold-node-agent",
    }


LATENCIES = {
    'leasehold_handling_seconds_bucket{handler="place_pods"',
    'leasehold_handling_seconds_bucket{handler="bind_pods"',
    "leasehold_allocation_seconds_bucket{",
    "leasehold_time_to_bind_seconds_bucket{",
}


async def test_o1_a_latency_on_the_metrics_leads_to_the_trace_of_a_pod(up: Stack) -> None:
    made = await up.create(gpu_pod("measured", vgpu(memory=1000)))
    await up.until("measured", running)
    exemplar = f'trace_id="{made["metadata"]["uid"].replace("-", "")}"'

    async def found() -> set[str]:
        lines = [line for line in await up.metrics(accept=OPENMETRICS) if exemplar in line]
        return {start for start in LATENCIES if any(line.startswith(start) for line in lines)}

    await until(found, lambda starts: starts == LATENCIES)


async def test_o1_a_pod_that_waited_is_one_trace_with_its_wait_and_the_reason(
    up: Stack, spans: Spans
) -> None:
    await up.create(gpu_pod("before", vgpu(memory=12_000)))
    await up.until("before", running)
    made = await up.create(gpu_pod("waited", vgpu(memory=12_000)))
    await up.until("waited", lambda pod: pod["status"].get("conditions"))
    await up.kube.delete(f"{PODS}/before")
    await up.until("waited", running)
    trace_id = made["metadata"]["uid"].replace("-", "")
    waited = {"wait for capacity", "explain waiting"}
    await until(lambda: set(spans.of(trace_id)) >= STEPS | waited)

    def offered_again() -> list[Any]:
        of_pod = [span for _, span in spans.received if span.trace_id.hex() == trace_id]
        return [span for span in of_pod if span.name == "place pods" and span.links]

    root = spans.of(trace_id)["create pod"].span_id
    assert {span.parent_span_id for span in await until(offered_again)} == {root}
    wait = spans.of(trace_id)["wait for capacity"]
    assert wait.parent_span_id == root
    reasons = [event.attributes[0].value.string_value for event in wait.events]
    assert "Insufficient GPU memory" in reasons[0]
    refused = spans.of(trace_id)["explain waiting"].attributes
    assert (
        "Insufficient GPU memory"
        in {a.key: a.value.string_value for a in refused}["leasehold.reason"]
    )
