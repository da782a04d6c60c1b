"""O1: one bound pod is one trace, from the watch event to the kubelet's Allocate."""

import json

from shared.model.events.event import ADMISSION
from tests.support.servers.otlp import Spans
from tests.support.stack import PODS, Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

STEPS = (
    "watcher watch_pods",
    "placer place_pods",
    "placer reserve",
    "binder bind_pods",
    "node-agent allocate",
)


async def test_o1_one_trace_covers_a_pod_from_watch_to_allocate(up: Stack, spans: Spans) -> None:
    made = await up.create(gpu_pod("traced", vgpu(memory=1000)))
    uid = made["metadata"]["uid"]
    _, admitted_in, admitted_by, _ = made["metadata"]["annotations"][ADMISSION].split("-")
    await up.until("traced", running)
    trace_id = uid.replace("-", "")
    await until(lambda: set(STEPS) <= set(spans.of(trace_id)), limit_s=20)

    by_name = spans.of(trace_id)
    assert by_name[STEPS[0]].parent_span_id == b""
    (link,) = by_name[STEPS[0]].links
    assert (link.trace_id.hex(), link.span_id.hex()) == (admitted_in, admitted_by)
    await until(lambda: spans.of(admitted_in), limit_s=20)
    assert spans.of(admitted_in)["webhook review"].span_id == link.span_id
    shown = json.loads((await up.leasehold("trace", "traced", "--json")).out)["spans"]
    assert [step["name"] for step in shown[:2]] == ["webhook review", STEPS[0]]
    assert shown[0]["duration_s"] > 0
    assert by_name["placer place_pods"].parent_span_id == by_name[STEPS[0]].span_id
    for below, above in (
        ("placer reserve", "placer place_pods"),
        ("binder bind_pods", "placer place_pods"),
        ("node-agent allocate", "placer reserve"),
    ):
        assert by_name[below].parent_span_id == by_name[above].span_id
    for span in by_name.values():
        facts = {a.key: a.value.string_value for a in span.attributes}
        assert facts["k8s.pod.uid"] == uid
        assert facts["k8s.pod.name"] == "traced"
        assert facts["k8s.namespace.name"] == "default"
    placed = {a.key: a.value.string_value for a in by_name["placer place_pods"].attributes}
    assert placed["messaging.system"] == "nats"
    assert placed["messaging.destination.name"] == "pod.queued.v1"
    assert {name for name, span in spans.received if span.trace_id.hex() == trace_id} == {
        "leasehold-watcher",
        "leasehold-placer",
        "leasehold-binder",
        "leasehold-node-agent",
    }


async def test_o1_a_pod_that_waited_is_one_trace_with_a_link_over_the_wait(
    up: Stack, spans: Spans
) -> None:
    await up.create(gpu_pod("before", vgpu(memory=12_000)))
    await up.until("before", running)
    made = await up.create(gpu_pod("waited", vgpu(memory=12_000)))
    await up.until("waited", lambda pod: pod["status"].get("conditions"))
    await up.kube.delete(f"{PODS}/before")
    await up.until("waited", running)
    trace_id = made["metadata"]["uid"].replace("-", "")
    await until(lambda: set(STEPS) <= set(spans.of(trace_id)), limit_s=20)

    of_pod = [span for _, span in spans.received if span.trace_id.hex() == trace_id]
    waits = next(span for span in of_pod if span.name == "placer place_pods")
    linked = [span for span in of_pod if span.links and span.name != STEPS[0]]
    reserve = spans.of(trace_id)["placer reserve"]
    assert reserve.parent_span_id in {span.span_id for span in linked}
    assert {span.name for span in linked} == {"placer place_pods"}
    assert {span.parent_span_id for span in linked} == {b""}
    led_to = {link.span_id for span in linked for link in span.links}
    assert waits.span_id in led_to
    assert all(link.trace_id.hex() == trace_id for span in linked for link in span.links)
