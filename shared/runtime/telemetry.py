"""Traces and logs of a service.

A pod's trace ID is its UID without dashes, and the ID of its root span also follows from the UID:
each service knows the parent of its first span, and two watchers record the same spans. Spans after
the pod's start link to the root. The context is W3C `traceparent` text
(https://www.w3.org/TR/trace-context/).
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

from shared.model.errors import RequestError
from shared.model.events.event import Event, is_traceparent
from shared.runtime.health import suppress_bad_request_tracebacks
from shared.runtime.log_limits import LONGEST_TEXT, LONGEST_TRACEBACK, StatementLimit, shortened
from shared.runtime.settings import ServiceSettings
from shared.runtime.span_attributes import (
    CLAIM_UID,
    REASON,
    fault_of,
    holder_of,
    pod_attributes,
    reason_attributes,
)

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event)

MAX_TRACE_FILE_BYTES = 64 * 1024 * 1024
ROOT = "create pod"
"""From a pod's review, or its creation, until the API server has it."""
REVIEW = "review pod"
MOST_LINKS = 32
"""Each pod of a larger gang links to those after it, in a ring."""
_chosen_ids: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("ids", default=(0, 0))


def trace_id_of(pod: str) -> str:
    """Return the trace ID, 32 hex digits, of the pod with this UID.

    >>> trace_id_of("1f0c2c57-7d6e-4e53-9f0a-5a4c6de5b1f2")
    '1f0c2c577d6e4e539f0a5a4c6de5b1f2'
    """
    digits = pod.replace("-", "").lower()
    if len(digits) == 32 and all(c in "0123456789abcdef" for c in digits) and int(digits, 16):
        return digits
    return hashlib.blake2s(pod.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _choosing(trace_id: int, span_id: int = 0) -> Iterator[None]:
    """Choose IDs; 0 is a random one."""
    token = _chosen_ids.set((trace_id, span_id))
    try:
        yield
    finally:
        _chosen_ids.reset(token)


def _span_id(pod: str, name: str) -> int:
    return int.from_bytes(hashlib.blake2s(f"{pod} {name}".encode(), digest_size=8).digest()) or 1


class _PodTraceIds(RandomIdGenerator):
    def generate_trace_id(self) -> int:
        return _chosen_ids.get()[0] or super().generate_trace_id()

    def generate_span_id(self) -> int:
        return _chosen_ids.get()[1] or super().generate_span_id()


class Tracing:
    def __init__(
        self,
        service: str,
        provider: TracerProvider | None,
        processors: Sequence[SpanProcessor] = (),
    ) -> None:
        self.service = service
        self.provider = provider
        self._processors = processors
        self.tracer = provider.get_tracer("leasehold") if provider else None
        self._of_others: dict[str, trace.Tracer] = {}

    def start(
        self, name: str, events: Sequence[E], *, kind: SpanKind
    ) -> tuple[list[E], list[Span]]:
        """Begin one span per event that concerns a pod; return the events inside their spans.

        Spans of the events that follow are its children. The first span is a child of the root; so
        is the span of a pod that waited, with a link to the one before.
        """
        if self.tracer is None:
            return list(events), []
        inside: list[E] = []
        spans: list[Span] = []
        gang_links = self._gang_links(events)
        for event in events:
            facts = pod_attributes(event)
            pod = holder_of(facts)
            if not pod or not hasattr(event, "trace"):
                inside.append(event)
                continue
            title = name or f"publish {event.subject.rpartition('.')[0]}"
            facts |= reason_attributes(event)
            facts["messaging.system"] = "nats"
            facts["messaging.destination.name"] = event.subject
            span = self._begin(
                title,
                event.trace,
                facts,
                kind,
                follows_wait=event.follows_wait,
                follows_start=event.follows_start,
                links=gang_links.get(pod, ()),
            )
            if fault := fault_of(event):
                span.set_status(Status(StatusCode.ERROR, fault))
            spans.append(span)
            placed: Any = event
            inside.append(dataclasses.replace(placed, trace=context_of(span)))
        return inside, spans

    def _gang_links(self, events: Sequence[Event]) -> dict[str, list[Link]]:
        gangs: dict[str, list[str]] = {}
        for event in events:
            gang = getattr(getattr(event, "request", None), "gang", None)
            if gang is not None:
                gangs.setdefault(gang.name, []).append(str(getattr(event, "pod", "")))
        links: dict[str, list[Link]] = {}
        for pods in gangs.values():
            links |= self.links_between(pods)
        return links

    def links_between(self, pods: Sequence[str]) -> dict[str, list[Link]]:
        """Return links to the root spans of other pods, at most `MOST_LINKS`."""
        names = list(dict.fromkeys(pods))
        roots = [Link(self._root_of(pod)) for pod in names]
        count = min(len(names) - 1, MOST_LINKS)
        ring = [*roots, *roots[:count]]
        return {pod: ring[index + 1 : index + 1 + count] for index, pod in enumerate(names)}

    def span(
        self,
        name: str,
        parent: str,
        facts: Mapping[str, AttributeValue],
        links: Sequence[Link] = (),
    ) -> Span | None:
        if self.tracer is None:
            return None
        return self._begin(name, parent, facts, SpanKind.INTERNAL, links=links)

    def record(
        self,
        name: str,
        facts: Mapping[str, AttributeValue],
        began_ns: int,
        ended_ns: int,
        *,
        service: str = "",
        notes: Sequence[tuple[int, str]] = (),
        fault: str = "",
    ) -> None:
        """Record a finished span below a pod's root, or the root itself.

        Its ID follows from the pod's UID and its name. `service` is the service that did the work,
        if not this one; notes are events in the span.
        """
        if self.tracer is None:
            return
        pod = holder_of(facts)
        ids = (int(trace_id_of(pod), 16), _span_id(pod, name)) if pod else (0, 0)
        above = self._root_of(pod) if pod and name != ROOT else trace.INVALID_SPAN_CONTEXT
        context = trace.set_span_in_context(NonRecordingSpan(above))
        with _choosing(*ids):
            tracer = self._tracer_of(service)
            span = tracer.start_span(name, context, attributes=facts, start_time=began_ns)
        for at_ns, text in notes:
            span.add_event("waits", {REASON: text}, at_ns)
        if fault:
            span.set_attribute(REASON, fault)
            span.set_status(Status(StatusCode.ERROR, fault))
        span.end(ended_ns)

    def record_after_start(
        self, name: str, facts: Mapping[str, AttributeValue], beneficiaries: Sequence[str] = ()
    ) -> None:
        """Link to the root spans of the pod, and of the pods for which something was done to it."""
        if self.tracer is None:
            return
        links = [Link(self._root_of(pod)) for pod in beneficiaries[:MOST_LINKS]]
        self._begin(name, "", facts, SpanKind.INTERNAL, follows_start=True, links=links).end()

    def _tracer_of(self, service: str) -> trace.Tracer:
        if self.provider is None or self.tracer is None:
            raise AssertionError("spans are recorded only while tracing is on")
        if not service:
            return self.tracer
        if service not in self._of_others:
            own = self.provider.resource
            of_other = own.merge(Resource({"service.name": f"leasehold-{service}"}))
            provider = TracerProvider(
                self.provider.sampler, of_other, shutdown_on_exit=False, id_generator=_PodTraceIds()
            )
            for processor in self._processors:
                provider.add_span_processor(processor)
            self._of_others[service] = provider.get_tracer("leasehold")
        return self._of_others[service]

    def _root_of(self, pod: str) -> SpanContext:
        if self.provider is None:
            raise AssertionError("spans are begun only while tracing is on")
        trace_id = int(trace_id_of(pod), 16)
        decision = self.provider.sampler.should_sample(None, trace_id, ROOT).decision
        flags = TraceFlags(int(decision is Decision.RECORD_AND_SAMPLE))
        return SpanContext(trace_id, _span_id(pod, ROOT), is_remote=True, trace_flags=flags)

    def _begin(
        self,
        name: str,
        parent: str,
        facts: Mapping[str, AttributeValue],
        kind: SpanKind,
        *,
        follows_wait: bool = False,
        follows_start: bool = False,
        links: Sequence[Link] = (),
    ) -> Span:
        if self.tracer is None:
            raise AssertionError("spans are begun only while tracing is on")
        pod = holder_of(facts)
        above = parse_traceparent(parent)
        causes = list(links)
        if above is None and follows_start:
            causes.append(Link(self._root_of(pod)))
        elif above is None or follows_wait:
            causes += [] if above is None else [Link(above)]
            above = trace.INVALID_SPAN_CONTEXT if CLAIM_UID in facts else self._root_of(pod)
        context = trace.set_span_in_context(NonRecordingSpan(above or trace.INVALID_SPAN_CONTEXT))
        with _choosing(int(trace_id_of(pod), 16)):
            return self.tracer.start_span(name, context, kind=kind, attributes=facts, links=causes)

    def close(self) -> None:
        if self.provider is not None:
            self.provider.shutdown()


def end(spans: Iterable[Span], error: BaseException | None = None) -> None:
    for span in spans:
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()


def context_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def parse_traceparent(text: str) -> SpanContext | None:
    if not is_traceparent(text):
        return None
    trace_id, span_id, flags = (int(part, 16) for part in text.split("-")[1:])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def exemplar_of(context: str) -> dict[str, str] | None:
    """Return None if the span is not recorded."""
    span = parse_traceparent(context)
    if span is None or not span.trace_flags.sampled:
        return None
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}


class SpanFile(SpanProcessor):
    """Writes finished spans as JSON lines; the file is rotated to `.1` at 64 MiB.

    No thread runs while there are none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ended: list[ReadableSpan] = []
        self._adding = threading.Lock()
        self._writing = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        if not (span.context and span.context.trace_flags.sampled):
            return
        with self._adding:
            self._ended.append(span)
            is_first = len(self._ended) == 1
        if is_first:
            timer = threading.Timer(EXPORT_DELAY_MS / 1000, self.force_flush)
            timer.daemon = True
            timer.start()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """A failure is logged, and loses the spans."""
        with self._writing:
            with self._adding:
                spans, self._ended = self._ended, []
            try:
                self._append(spans)
            except OSError as error:
                logger.warning("%d spans were not written to %s: %s", len(spans), self.path, error)
        return True

    def shutdown(self) -> None:
        self.force_flush()

    def _append(self, spans: Sequence[ReadableSpan]) -> None:
        lines = "".join(json.dumps(_plain(span), separators=(",", ":")) + "\n" for span in spans)
        if self.path.exists() and self.path.stat().st_size > MAX_TRACE_FILE_BYTES:
            self.path.replace(self.path.with_suffix(".jsonl.1"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)


OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_DELAY_MS = 500


def open_tracing(service: str, settings: ServiceSettings) -> Tracing:
    """Set up tracing; what the settings leave open, the SDK's variables decide.

    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/

    Raises RequestError if the directory cannot be created.
    """
    processors: list[SpanProcessor] = []
    if settings.trace_dir is not None:
        try:
            settings.trace_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--trace-dir {settings.trace_dir} cannot be created ({error.strerror}): choose "
                "another directory"
            ) from error
        processors.append(SpanFile(settings.trace_dir / f"{instance_of(service, settings)}.jsonl"))
    if settings.otlp_endpoint or any(os.environ.get(name) for name in OTLP_ENDPOINTS):
        delay_ms = None if os.environ.get("OTEL_BSP_SCHEDULE_DELAY") else EXPORT_DELAY_MS
        exporter = _otlp_exporter(settings.otlp_endpoint)
        processors.append(BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms))
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or not (processors and settings.trace_ratio):
        return Tracing(service, None)
    names = {
        "service.instance.id": instance_of(service, settings),
        "service.version": version("leasehold"),
        "host.name": platform.node(),
    }
    if not os.environ.get("OTEL_SERVICE_NAME"):
        names["service.name"] = f"leasehold-{service}"
    provider = TracerProvider(
        sampler=_sampler(settings.trace_ratio),
        id_generator=_PodTraceIds(),
        resource=Resource.create(names),
    )
    for processor in processors:
        provider.add_span_processor(processor)
    return Tracing(service, provider, processors)


def _sampler(ratio: float) -> Sampler | None:
    """Return None for all spans: then the variables decide."""
    return ParentBased(TraceIdRatioBased(ratio)) if ratio < 1 else None


def _otlp_exporter(endpoint: str) -> SpanExporter:
    """Without an endpoint, the variables decide."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - 0.1 s

    if not endpoint:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))


def instance_of(service: str, settings: ServiceSettings) -> str:
    return settings.instance or f"{service}-{platform.node()}-{os.getpid()}"


EXTRAS = ("pod", "trace", "left_out")


class JsonLines(logging.Formatter):
    """`left_out` is how many lines of the same statement were not written before."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "text": shortened(record.getMessage(), LONGEST_TEXT),
        }
        line |= {key: getattr(record, key) for key in EXTRAS if hasattr(record, key)}
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line["traceback"] = shortened(traceback, LONGEST_TRACEBACK)
        return json.dumps(line, ensure_ascii=False)


def open_logs(service: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    handler.addFilter(StatementLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel("WARNING")
    suppress_bad_request_tracebacks()
    logging.getLogger("nats").setLevel("CRITICAL")  # its errors reach us as exceptions


def _plain(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    return {
        "trace": f"{context.trace_id:032x}" if context else "",
        "span": f"{context.span_id:016x}" if context else "",
        "parent": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "service": span.resource.attributes.get("service.name", ""),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "ok": span.status.status_code is not StatusCode.ERROR,
        "text": span.status.description or "",
        "attributes": dict(span.attributes or {}),
        "notes": [
            (event.timestamp, (event.attributes or {}).get(REASON, event.name))
            for event in span.events
        ],
    }
