"""An OTLP receiver over gRPC that keeps the spans it was sent."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(slots=True)
class Spans:
    """What arrived: (service, span) in order of arrival."""

    url: str = ""
    received: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, trace_id: str) -> dict[str, Any]:
        """Return the spans of a trace by name, the first of each."""
        values: dict[str, Any] = {}
        for _, span in self.received:
            if span.trace_id.hex() == trace_id:
                values.setdefault(span.name, span)
        return values


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, spans: Spans) -> None:
        self.spans = spans

    async def Export(self, request: Any, _: Any) -> Any:  # noqa: N802 - gRPC's name
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
