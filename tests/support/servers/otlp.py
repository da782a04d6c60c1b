"""An OTLP receiver over gRPC that keeps the spans it was sent."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as any receiver of OTLP has it; IDs are hex digits."""

    trace: str
    span: str
    parent: str = ""
    name: str
    service: str
    attributes: dict[str, str]
    """Values as text."""
    error: str | None = None
    """The description of the status ERROR; None for other statuses."""
    links: frozenset[str] = frozenset()
    """Traces to which it links."""


@dataclass(slots=True)
class Spans:
    """What arrived: (service, span) in order of arrival."""

    url: str = ""
    received: list[tuple[str, Any]] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    """The same as requests, to be sent to another receiver."""

    def of(self, trace_id: str) -> dict[str, Any]:
        """Return the spans of a trace by name, the first of each."""
        values: dict[str, Any] = {}
        for _, span in self.received:
            if span.trace_id.hex() == trace_id:
                values.setdefault(span.name, span)
        return values

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [
            _received(service, span)
            for service, span in self.received
            if span.trace_id.hex() == trace_id
        ]

    def all(self) -> list[ReceivedSpan]:
        return [_received(service, span) for service, span in self.received]


def orphans(spans: Iterable[ReceivedSpan]) -> list[str]:
    """Return the names of spans whose parent is not among the spans of their trace."""
    listed = list(spans)
    present = {(span.trace, span.span) for span in listed}
    return [
        span.name for span in listed if span.parent and (span.trace, span.parent) not in present
    ]


def _received(service: str, span: Any) -> ReceivedSpan:
    is_error = span.status.code == span.status.STATUS_CODE_ERROR
    return ReceivedSpan(
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        attributes={a.key: _text(a.value) for a in span.attributes},
        error=span.status.message if is_error else None,
        links=frozenset(link.trace_id.hex() for link in span.links),
    )


def _text(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ",".join(_text(item) for item in value.array_value.values)
    content = getattr(value, kind)
    return str(content).lower() if isinstance(content, bool) else str(content)


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, spans: Spans) -> None:
        self.spans = spans

    async def Export(self, request: Any, _: Any) -> Any:  # noqa: N802 - gRPC's name
        self.spans.requests.append(request)
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.received += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Spans]:
    spans = Spans()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Receiver(spans), server)
    port = server.add_insecure_port("127.0.0.1:0")
    spans.url = f"http://127.0.0.1:{port}"
    await server.start()
    try:
        yield spans
    finally:
        await server.stop(0)


async def send(requests: Iterable[Any], address: str) -> None:
    """Send exported spans to another receiver at HOST:PORT."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = trace_service_pb2_grpc.TraceServiceStub(channel)
        for request in requests:
            await stub.Export(request)
