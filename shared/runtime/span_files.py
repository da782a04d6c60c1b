"""The spans of one pod or ResourceClaim, read from the files that services write."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.model.views import SpanView

NS = 1_000_000_000
CLAIM = "leasehold.claim.name"
CLAIM_PODS = "leasehold.claim.pods"
"""Attributes of the spans of a ResourceClaim: its name, and those of the pods that it is for."""


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One finished span, as a line of a file has it."""

    span: str
    trace: str = ""
    parent: str = ""
    service: str = ""
    name: str = ""
    start_ns: int = 0
    end_ns: int = 0
    ok: bool = True
    text: str = ""
    links: tuple[str, ...] = ()
    """Spans that it follows from, in this trace or another."""
    attributes: dict[str, Any] = {}

    @property
    def claim(self) -> str:
        """Name of the ResourceClaim that it is about."""
        return str(self.attributes.get(CLAIM, ""))


_decode = msgspec.json.Decoder(TraceSpan).decode


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
        if any(word in line for word in words) and (span := _parse(line)) and is_wanted(span)
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
        if (span := _parse(line)) is None:
            continue
        names = (span.attributes.get("k8s.pod.name"), *span.attributes.get(CLAIM_PODS, ()))
        is_here = span.attributes.get("k8s.namespace.name") == namespace
        is_named = is_here and name in names and "k8s.pod.uid" in span.attributes
        if is_named or span.trace == uid:
            yield span


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _parse(line: str) -> TraceSpan | None:
    """Parse one line; the last line of a killed service may be cut short."""
    try:
        return _decode(line)
    except msgspec.MsgspecError:
        return None
