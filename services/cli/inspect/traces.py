"""The spans of one pod, read from the files that services write, and drawn as a waterfall."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NS = 1_000_000_000


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


def read_spans(directory: Path, *, namespace: str, name: str) -> tuple[TraceSpan, ...]:
    """Return the spans of the newest trace of a pod, in the order of their start.

    `name` is the pod's name or its uid; the pod may be gone. Its admission is in an earlier trace,
    which one of these spans links to.
    """
    found = [span for path in _files(directory) for span in _matching(path, namespace, name)]
    if not found:
        return ()
    newest = max(found, key=lambda span: span.start_ns).trace
    own = _select(directory, lambda span: span.trace == newest)
    linked = {link for span in own.values() for link in span.links} - own.keys()
    spans = own | (_select(directory, lambda span: span.span in linked) if linked else {})
    return tuple(sorted(spans.values(), key=lambda span: (span.start_ns, span.span)))


def _select(directory: Path, is_wanted: Callable[[TraceSpan], bool]) -> dict[str, TraceSpan]:
    return {
        span.span: span for path in _files(directory) for span in _spans(path) if is_wanted(span)
    }


def shape(spans: Sequence[TraceSpan]) -> dict[str, Any]:
    """Return the JSON form; see `json_output`."""
    first = spans[0].start_ns
    return {
        "trace": spans[-1].trace,
        "spans": [
            {
                "span": span.span,
                "parent": span.parent,
                "service": span.service,
                "name": span.name,
                "start_s": (span.start_ns - first) / NS,
                "duration_s": (span.end_ns - span.start_ns) / NS,
                "ok": span.ok,
                "text": span.text,
            }
            for span in spans
        ],
    }


def waterfall(spans: Sequence[TraceSpan], width: int) -> list[str]:
    """Draw one line per span: indented below its parent, with a bar, start and duration in ms."""
    first = min(span.start_ns for span in spans)
    whole = max(max(span.end_ns for span in spans) - first, 1)
    depth = _depths(spans)
    labels = [f"{'  ' * depth[span.span]}{span.name}" for span in spans]
    label_width = max(map(len, labels))
    bar_width = max(width - label_width - 26, 10)
    lines = []
    for span, label in zip(spans, labels, strict=True):
        begin = (span.start_ns - first) * bar_width // whole
        length = max((span.end_ns - span.start_ns) * bar_width // whole, 1)
        begin = min(begin, bar_width - 1)
        bar = f"{' ' * begin}{'#' * min(length, bar_width - begin)}"
        at_ms, took_ms = (span.start_ns - first) / 1e6, (span.end_ns - span.start_ns) / 1e6
        failed = "" if span.ok else f"  failed: {span.text}"
        lines.append(
            f"{label:<{label_width}}  |{bar:<{bar_width}}| {at_ms:8.1f} +{took_ms:.1f} ms{failed}"
        )
    return lines


def _depths(spans: Sequence[TraceSpan]) -> dict[str, int]:
    parents = {span.span: span.parent for span in spans}

    def depth(span: str) -> int:
        count, seen = 0, {span}
        while (span := parents.get(span, "")) in parents and span not in seen:
            seen.add(span)
            count += 1
        return count

    return {span.span: depth(span.span) for span in spans}


def _files(directory: Path) -> Iterable[Path]:
    return sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.1")])


def _matching(path: Path, namespace: str, name: str) -> Iterator[TraceSpan]:
    uid = name.replace("-", "").lower()
    for line in _lines(path):
        if f'"{name}"' not in line and f'"{uid}"' not in line:
            continue
        raw = _parse(line)
        attributes = raw.get("attributes", {})
        pod = attributes.get("k8s.namespace.name"), attributes.get("k8s.pod.name")
        is_named = pod == (namespace, name) and "k8s.pod.uid" in attributes
        if is_named or raw.get("trace") == uid:
            yield _span(raw)


def _spans(path: Path) -> Iterator[TraceSpan]:
    return (_span(raw) for line in _lines(path) if (raw := _parse(line)))


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
    )
