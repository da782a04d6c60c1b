"""What spans say about pods, gangs and claims, and to what they link."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shared.model.events.claim_events import AllocatedClaim, ClaimAllocated
from shared.model.events.event import Event
from shared.model.events.pod_events import (
    BindingFailed,
    PlacementRefused,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, PodRequest
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import MOST_LINKS, ROOT, Tracing, end, open_tracing, trace_id_of

NAMES: dict[str, Any] = {"namespace": Namespace("ns"), "name": "p"}
POD = PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b")


@dataclass(slots=True)
class Recorded:
    """Tracing whose spans are kept."""

    tracing: Tracing
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def spans_of(self, events: Sequence[Event]) -> list[ReadableSpan]:
        """Return the spans that handling events leads to, in the order of the events."""
        end(self.tracing.start("handle", events, kind=SpanKind.CONSUMER)[1])
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    made = Recorded(open_tracing("test", ServiceSettings(trace_dir=tmp_path)))
    assert made.tracing.provider is not None
    made.tracing.provider.add_span_processor(SimpleSpanProcessor(made.exporter))
    return made


def linked(span: ReadableSpan) -> list[str]:
    return [f"{link.context.trace_id:032x}" for link in span.links]


def members(count: int, gang: str = "ns/g") -> list[PodQueued]:
    request = structs.replace(PodRequest(), gang=Gang(name=gang, min_member=count))
    return [
        PodQueued(pod=PodUid(f"{gang}-{n}"), resource_version="1", request=request, **NAMES)
        for n in range(count)
    ]


def test_members_of_a_gang_link_to_one_another_and_to_no_other_pod(recorded: Recorded) -> None:
    gang = members(3)
    alone = PodQueued(pod=POD, resource_version="1", request=PodRequest(), **NAMES)

    *spans, other = recorded.spans_of([*gang, alone])

    traces = [trace_id_of(pod.pod) for pod in gang]
    for own, span in zip(traces, spans, strict=True):
        assert sorted(linked(span)) == sorted(set(traces) - {own})
    assert linked(other) == []


def test_a_large_gang_has_few_links_and_each_member_is_reached(recorded: Recorded) -> None:
    gang = members(100)

    spans = recorded.spans_of(gang)

    assert {len(span.links) for span in spans} == {MOST_LINKS}
    assert {trace for span in spans for trace in linked(span)} == {
        trace_id_of(pod.pod) for pod in gang
    }


def test_why_a_pod_waits_is_in_attributes_with_its_numbers(recorded: Recorded) -> None:
    refusal = Refusal(
        reason="0/3 nodes are available", counts=(("Cordoned", 2), ("Tainted", 1)), hint="wait"
    )

    [span] = recorded.spans_of([PlacementRefused(pod=POD, refusal=refusal, **NAMES)])

    assert (
        dict(span.attributes or {}).items()
        >= {
            "k8s.pod.uid": POD,
            "k8s.pod.name": "p",
            "k8s.namespace.name": "ns",
            "leasehold.reason": "0/3 nodes are available",
            "leasehold.reason.code": "Cordoned",
            "leasehold.excluded_nodes.Cordoned": 2,
            "leasehold.excluded_nodes.Tainted": 1,
            "leasehold.hint": "wait",
            "leasehold.permanent": False,
        }.items()
    )
    assert span.status.status_code is StatusCode.UNSET, "to wait is no error"


FAILED = PodTerminated(pod=POD, node=NodeName("n"), phase="Failed", **NAMES)


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (BindingFailed(pod=POD, reason="timeout", **NAMES), "timeout"),
        (PodRejected(pod=POD, resource_version="1", reason="no unit", **NAMES), "no unit"),
        (FAILED, "the pod has failed"),
        (replace(FAILED, rejection="OutOfcpu: x"), "OutOfcpu: x"),
        (replace(FAILED, phase="Succeeded"), None),
    ],
)
def test_what_fails_is_an_error_with_its_reason(
    recorded: Recorded, event: Event, fault: str | None
) -> None:
    [span] = recorded.spans_of([event])

    assert span.status.description == fault
    assert (span.status.status_code is StatusCode.ERROR) == (fault is not None)


def test_the_end_of_a_pod_has_no_parent_that_a_collector_may_have_dropped(
    recorded: Recorded,
) -> None:
    [span] = recorded.spans_of([FAILED])

    assert span.parent is None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trace_id_of(POD)
    assert linked(span) == [trace_id_of(POD)]


def test_what_is_done_to_a_running_pod_links_to_its_start_and_to_the_beneficiary(
    recorded: Recorded,
) -> None:
    facts = {"k8s.pod.uid": POD}
    recorded.tracing.record(ROOT, facts, 1, 2)

    recorded.tracing.record_after_start("evict pod", facts, ["other"])

    root, span = recorded.exporter.get_finished_spans()
    assert span.parent is None
    assert linked(span) == [trace_id_of("other"), trace_id_of(POD)]
    assert root.context is not None
    assert span.links[1].context.span_id == root.context.span_id


@pytest.mark.parametrize(("names", "pod"), [(("a",), "a"), (("a", "b"), None)])
def test_a_claims_span_names_its_pod_and_no_claim_is_taken_for_a_pod(
    recorded: Recorded, names: tuple[str, ...], pod: str | None
) -> None:
    claim = AllocatedClaim(
        claim=PodUid("c"),
        namespace=Namespace("ns"),
        name="shared",
        node=NodeName("n"),
        generation="1",
        devices=(),
        consumers=tuple(PodUid(f"uid-{name}") for name in names),
        consumer_names=names,
    )

    [span] = recorded.spans_of([ClaimAllocated(claim=claim)])

    facts = dict(span.attributes or {})
    assert (facts["leasehold.claim.uid"], facts["leasehold.claim.name"]) == ("c", "shared")
    assert facts["leasehold.claim.pods"] == names
    assert facts.get("k8s.pod.name") == pod
    assert facts.get("k8s.pod.uid") == (f"uid-{pod}" if pod else None)
