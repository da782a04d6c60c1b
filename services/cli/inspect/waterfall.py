"""The spans of a pod, drawn as a waterfall."""

from collections.abc import Sequence

from shared.runtime.span_files import TraceSpan


def waterfall(spans: Sequence[TraceSpan], width: int) -> list[str]:
    """Draw one line per span: indented below its parent, with a bar, start and duration in ms."""
    if not spans:
        return ["no step of it is known: it ended its last one before the dashboard started"]
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
