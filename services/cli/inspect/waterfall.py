"""Spans of one pod, from the files that services write, as a waterfall."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSeen:
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
    """Spans that it follows from, of this trace or another."""


def read_spans(directory: Path, *, namespace: str, name: str) -> tuple[SpanSeen, ...]:
    """Return the spans of the newest trace of a pod, in the order in which they began.

    The pod is named, or `name` is its uid; it may be gone. Its admission is of another trace, which
    one of these spans links to; it began before them.
    """
    found = [span for path in _files(directory) for span in _matching(path, namespace, name)]
    if not found:
        return ()
    newest = max(found, key=lambda span: span.start_ns).trace
    own = _found(directory, lambda span: span.trace == newest)
    before = {link for span in own.values() for link in span.links} - own.keys()
    every = own | (_found(directory, lambda span: span.span in before) if before else {})
    return tuple(sorted(every.values(), key=lambda span: (span.start_ns, span.span)))


def _found(directory: Path, is_wanted: Callable[[SpanSeen], bool]) -> dict[str, SpanSeen]:
    return {
        span.span: span for path in _files(directory) for span in _spans(path) if is_wanted(span)
    }


def shape(spans: Sequence[SpanSeen]) -> dict[str, Any]:
    """Return the JSON form; see `shapes.py`."""
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


def waterfall(spans: Sequence[SpanSeen], width: int) -> list[str]:
    """Draw one line per span: its place below its parent, its bar, start and length in ms."""
    first = min(span.start_ns for span in spans)
    whole = max(max(span.end_ns for span in spans) - first, 1)
    depth = _depths(spans)
    labels = [f"{'  ' * depth[span.span]}{span.name}" for span in spans]
    room = max(map(len, labels))
    bar_width = max(width - room - 26, 10)
    lines = []
    for span, label in zip(spans, labels, strict=True):
        begin = (span.start_ns - first) * bar_width // whole
        length = max((span.end_ns - span.start_ns) * bar_width // whole, 1)
        begin = min(begin, bar_width - 1)
        bar = f"{' ' * begin}{'#' * min(length, bar_width - begin)}"
        at_ms, took_ms = (span.start_ns - first) / 1e6, (span.end_ns - span.start_ns) / 1e6
        failed = "" if span.ok else f"  failed: {span.text}"
        lines.append(
            f"{label:<{room}}  |{bar:<{bar_width}}| {at_ms:8.1f} +{took_ms:.1f} ms{failed}"
        )
    return lines


def _depths(spans: Sequence[SpanSeen]) -> dict[str, int]:
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


def _matching(path: Path, namespace: str, name: str) -> Iterator[SpanSeen]:
    uid = name.replace("-", "").lower()
    for line in _lines(path):
        if f'"{name}"' not in line and f'"{uid}"' not in line:
            continue
        raw = _loaded(line)
        facts = raw.get("attributes", {})
        named = (facts.get("k8s.namespace.name"), facts.get("k8s.pod.name")) == (namespace, name)
        if (named and "k8s.pod.uid" in facts) or raw.get("trace") == uid:
            yield _span(raw)


def _spans(path: Path) -> Iterator[SpanSeen]:
    return (_span(raw) for line in _lines(path) if (raw := _loaded(line)))


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _loaded(line: str) -> dict[str, Any]:
    """Read one line; the last one of a killed service may be cut short."""
    try:
        raw = json.loads(line)
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) and "span" in raw else {}


def _span(raw: dict[str, Any]) -> SpanSeen:
    return SpanSeen(
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
