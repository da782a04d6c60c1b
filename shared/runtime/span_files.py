"""The spans of one pod or ResourceClaim, read from the files that services write."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.model.errors import UNDECODABLE
from shared.model.views.pods import SpanView
from shared.runtime.span_attributes import CLAIM, CLAIM_PODS, NAMESPACE, POD_NAME, holder_of

NS = 1_000_000_000


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True):
    span: str
    trace: str = ""
    parent: str = ""
    service: str = ""
    name: str = ""
    start_ns: int = 0
    end_ns: int = 0
    ok: bool = True
    text: str = ""
    notes: tuple[tuple[int, str], ...] = ()
    attributes: dict[str, Any] = {}

    @property
    def claim(self) -> str:
        return str(self.attributes.get(CLAIM, ""))


_decode = msgspec.json.Decoder(TraceSpan).decode


def read_spans(directory: Path, *, namespace: str, name: str) -> tuple[TraceSpan, ...]:
    """Return the newest trace of a pod, which may be gone; `name` may be its uid."""
    spans = [span for path in _files(directory) for span in _matching(path, namespace, name)]
    if not spans:
        return ()
    return read_trace(directory, max(spans, key=lambda span: span.start_ns).trace)


def read_trace(directory: Path, trace: str) -> tuple[TraceSpan, ...]:
    roots = {
        span.span: span
        for path in _files(directory)
        for line in _lines(path)
        if trace in line and (span := _parse(line)) and span.trace == trace
    }
    return tuple(sorted(roots.values(), key=lambda span: (span.start_ns, span.span)))


def span_views(spans: Sequence[TraceSpan]) -> tuple[SpanView, ...]:
    began_ns = min((span.start_ns for span in spans), default=0)
    return tuple(
        SpanView.from_attributes(
            span,
            service=span.service.removeprefix("leasehold-"),
            start_s=(span.start_ns - began_ns) / NS,
            duration_s=(span.end_ns - span.start_ns) / NS,
            notes=tuple(f"{(at_ns - began_ns) / NS:.1f} s: {text}" for at_ns, text in span.notes),
        )
        for span in _in_tree(spans)
    )


def _in_tree(spans: Sequence[TraceSpan]) -> Iterator[TraceSpan]:
    span_ids = {span.span for span in spans}
    below: dict[str, list[TraceSpan]] = {}
    for span in spans:
        above = span.parent if span.parent in span_ids and span.parent != span.span else ""
        below.setdefault(above, []).append(span)

    def under(parent: str) -> Iterator[TraceSpan]:
        for span in below.pop(parent, ()):
            yield span
            yield from under(span.span)

    yield from under("")


def _files(directory: Path) -> Iterable[Path]:
    return sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.1")])


def _matching(path: Path, namespace: str, name: str) -> Iterator[TraceSpan]:
    uid = name.replace("-", "").lower()
    for line in _lines(path):
        if f'"{name}"' not in line and f'"{uid}"' not in line:
            continue
        if (span := _parse(line)) is None:
            continue
        names = (span.attributes.get(POD_NAME), *span.attributes.get(CLAIM_PODS, ()))
        is_here = span.attributes.get(NAMESPACE) == namespace
        is_named = is_here and name in names and bool(holder_of(span.attributes))
        if is_named or span.trace == uid:
            yield span


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _parse(line: str) -> TraceSpan | None:
    """The last line of a killed service may be cut short."""
    try:
        return _decode(line)
    except UNDECODABLE:
        return None
