"""The spans of one pod or ResourceClaim, read from the files that services write."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.model.views import SpanView

NS = 1_000_000_000
CLAIM = "leasehold.claim.name"
CLAIM_PODS = "leasehold.claim.pods"
"""Attributes of the spans of a ResourceClaim: its name, and those of the pods that it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One finished span."""

    trace: str
    span: str
    parent: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    ok: bool = True
    text: str = ""
    links: tuple[str, ...] = ()
    """Spans that it follows from, in this trace or another."""
    claim: str = ""
    """Name of the ResourceClaim that it is about."""


def read_spans(directory: Path, *, namespace: str, name: str) -> tuple[TraceSpan, ...]:
    """Return the spans of the newest trace of a pod, in the order of their start.

    `name` is the pod's name or its uid; the pod may be gone. Its admission is in an earlier trace,
    which one of these spans links to. A pod with a ResourceClaim has the trace of the claim.
    """
    found = [span for path in _files(directory) for span in _matching(path, namespace, name)]
    if not found:
        return ()
    return read_trace(directory, max(found, key=lambda span: span.start_ns).trace)


def read_trace(directory: Path, trace: str) -> tuple[TraceSpan, ...]:
    """Return the spans of a trace, and those of other traces that they link to, by their start."""
    own = _select(directory, {trace}, lambda span: span.trace == trace)
    linked = {link for span in own.values() for link in span.links} - own.keys()
    spans = own | (_select(directory, linked, lambda span: span.span in linked) if linked else {})
    return tuple(sorted(spans.values(), key=lambda span: (span.start_ns, span.span)))


def _select(
    directory: Path, words: Collection[str], is_wanted: Callable[[TraceSpan], bool]
) -> dict[str, TraceSpan]:
    """Return the spans that are wanted, among the lines with one of the words."""
    return {
        span.span: span
        for path in _files(directory)
        for line in _lines(path)
        if any(word in line for word in words)
        and (raw := _parse(line))
        and is_wanted(span := _span(raw))
    }


def span_views(spans: Sequence[TraceSpan]) -> tuple[SpanView, ...]:
    """Return spans as the API does."""
    return tuple(
        SpanView(
            span=span.span,
            parent=span.parent,
            service=span.service,
            name=span.name,
            start_s=(span.start_ns - spans[0].start_ns) / NS,
            duration_s=(span.end_ns - span.start_ns) / NS,
            ok=span.ok,
            text=span.text,
            claim=span.claim,
        )
        for span in spans
    )


def _files(directory: Path) -> Iterable[Path]:
    return sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.1")])


def _matching(path: Path, namespace: str, name: str) -> Iterator[TraceSpan]:
    uid = name.replace("-", "").lower()
    for line in _lines(path):
        if f'"{name}"' not in line and f'"{uid}"' not in line:
            continue
        raw = _parse(line)
        attributes = raw.get("attributes", {})
        names = (attributes.get("k8s.pod.name"), *attributes.get(CLAIM_PODS, ()))
        is_here = attributes.get("k8s.namespace.name") == namespace
        is_named = is_here and name in names and "k8s.pod.uid" in attributes
        if is_named or raw.get("trace") == uid:
            yield _span(raw)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _parse(line: str) -> dict[str, Any]:
    """Parse one line; the last line of a killed service may be cut short."""
    try:
        raw = json.loads(line)
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) and "span" in raw else {}


def _span(raw: dict[str, Any]) -> TraceSpan:
    return TraceSpan(
        trace=raw.get("trace", ""),
        span=raw["span"],
        parent=raw.get("parent", ""),
        service=raw.get("service", ""),
        name=raw.get("name", ""),
        start_ns=int(raw.get("start_ns", 0)),
        end_ns=int(raw.get("end_ns", 0)),
        ok=bool(raw.get("ok", True)),
        text=raw.get("text", ""),
        links=tuple(raw.get("links", ())),
        claim=raw.get("attributes", {}).get(CLAIM, ""),
    )
