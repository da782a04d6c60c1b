"""The commands gpus, ps, top, explain, trace and topology."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from services.cli import terminal
from services.cli.api_client import ApiClient, RefusedError, locate
from services.cli.arguments import own_schedulers
from services.cli.commands import Explain, Gpus, Ps, Top, Topology, Trace
from services.cli.terminal import program, program_name
from shared.model.bounds import printable
from shared.model.views import GpusView, LeasesView, PodView, SpanView, TraceView

T = TypeVar("T")
INTERVAL_S = 2.0
CHANGING = frozenset({"measured", "read_at", "dominant_share", "weighted_share", "text", "trace"})
"""Keys of documents that change all the time: usage, and texts with ages."""
NO_TRACE_URL = (
    "these are the times at which the API saw each step. With --otlp-endpoint, services send every "
    "span to a collector, and --trace-url of the API links to its page"
)


def gpus(flags: Gpus) -> int:
    """Show every device and its leases."""
    api = ApiClient(locate(flags))

    def show(view: GpusView) -> None:
        from services.cli.inspect import render

        terminal.print_text(render.gpus(view, terminal.terminal_width()))

    def read() -> GpusView:
        return api.get("/api/v1/gpus", GpusView, idle_after_s=flags.idle_after_s)

    _show(flags, read, show)
    return 0


def ps(flags: Ps) -> int:
    """Show leases and waiting pods."""
    api = ApiClient(locate(flags))

    def show(view: LeasesView) -> None:
        if flags.output == "name":
            names = dict.fromkeys(
                (*(one.name for one in view.leases), *(one.name for one in view.waiting))
            )
            print("".join(f"pod/{name}\n" for name in names), end="")
            return
        from services.cli.inspect import render

        terminal.print_text(render.ps(view, wide=flags.output == "wide"))

    def read() -> LeasesView:
        return _leases(api, flags, name=flags.pod)

    _show(flags, read, show)
    return 0


def _leases(api: ApiClient, flags: Ps | Top, name: str = "") -> LeasesView:
    return api.get(
        "/api/v1/leases",
        LeasesView,
        namespace=flags.namespace,
        name=name,
        idle_after_s=flags.idle_after_s,
    )


def top(flags: Top) -> int:
    """Show the usage of every share beside its lease, until interrupted."""
    from services.cli.inspect.render import top_rows, top_table, top_view

    api = ApiClient(locate(flags))

    def read() -> LeasesView:
        return _leases(api, flags)

    view = read()
    rows = top_rows(view, sort=flags.sort, node=flags.node)
    if flags.output:
        terminal.print_document(top_view(rows, view), flags.output)
        return 0
    if flags.once or not sys.stdout.isatty():
        terminal.print_text(top_table(rows, view))
        return 0
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(top_table(rows, view), screen=True, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(flags.interval)
            view = read()
            rows = top_rows(view, sort=flags.sort, node=flags.node)
            live.update(top_table(rows, view), refresh=True)
    return 0


def explain(flags: Explain) -> int:
    """Explain why a pod runs on its node, or why it waits."""
    from services.cli.inspect.explanation import Explanation, explanation_of

    if flags.request:
        from services.cli.request.command import explain_manifest

        return explain_manifest(flags)
    api = ApiClient(locate(flags))

    def read() -> Explanation:
        pod = api.server.pod(flags.namespace, flags.pod)
        if pod is None:
            raise _NoPodError
        found = _pod_view(api, pod.pod, flags.idle_after_s)
        return explanation_of(pod, found, own_schedulers(flags.schedulers), program())

    def show(found: Explanation) -> None:
        from services.cli.inspect import render

        terminal.print_text(render.explanation(found))

    try:
        _show(flags, read, show)
    except _NoPodError:
        print(
            f"{program_name()} explain: there is no pod {flags.namespace}/{flags.pod}; "
            "`kubectl get pods -A` lists them, -n names another namespace",
            file=sys.stderr,
        )
        return 1
    return 0


class _NoPodError(Exception):
    """The pod does not exist."""


def _pod_view(api: ApiClient, uid: str, idle_s: str = "") -> PodView | None:
    try:
        return api.get(f"/api/v1/leases/{uid}", PodView, idle_after_s=idle_s)
    except RefusedError as error:
        if error.status == 404:
            return None
        raise


def trace(flags: Trace) -> int:
    """Show the spans of a pod."""
    found = _trace_in(flags.trace_dir, flags) if flags.trace_dir else _trace_of_api(flags)
    name = f"{flags.namespace}/{flags.pod}"
    if found is None:
        where = flags.trace_dir or "the API"
        print(
            f"{program_name()} trace: no span of pod {name} is in {where}; spans arrive half a "
            "second after they end. Services with --otlp-endpoint send them there: the trace id "
            "is the pod's uid without its hyphens",
            file=sys.stderr,
        )
        return 1
    if flags.output:
        terminal.print_document(found, flags.output)
        return 0
    claim = next((f", ResourceClaim {span.claim}" for span in found.spans if span.claim), "")
    print(f"trace {found.trace} of {name}{claim}")
    print("\n".join(map(printable, waterfall(found.spans, terminal.terminal_width()))))
    if found.url or not any(span.service for span in found.spans):
        print(found.url or NO_TRACE_URL)
    return 0


def _trace_in(directory: Path, flags: Trace) -> TraceView | None:
    from shared.runtime.span_files import read_spans, span_views

    spans = read_spans(directory, namespace=flags.namespace, name=flags.pod)
    return TraceView(trace=spans[-1].trace, spans=span_views(spans)) if spans else None


def _trace_of_api(flags: Trace) -> TraceView | None:
    """Return the trace of a pod by its name, which the API may know only by its UID."""
    api = ApiClient(locate(flags))
    try:
        return api.get(f"/api/v1/traces/{quote(flags.namespace)}/{quote(flags.pod)}", TraceView)
    except RefusedError as error:
        if error.status != 404:
            raise
    pod = api.server.pod(flags.namespace, flags.pod)
    found = pod and _pod_view(api, pod.pod)
    return found.trace if found else None


def topology(flags: Topology) -> int:
    """Show which service publishes which event to which other."""
    from services.topology import edges, mermaid, table

    if flags.output:
        listed = [
            {
                "publisher": edge.publisher,
                "event": edge.event.subject,
                "delivery": edge.delivery,
                "consumer": edge.consumer,
            }
            for edge in edges()
        ]
        terminal.print_document({"edges": listed}, flags.output)
    else:
        print(mermaid() if flags.mermaid else table())
    return 0


def _show(flags: Gpus | Ps | Explain, read: Callable[[], T], show: Callable[[T], None]) -> None:
    """Show what is read; with --watch, again whenever it changes, until it is interrupted."""
    before: Any = None
    while True:
        found = read()
        lasting = _lasting(msgspec.to_builtins(found)) if flags.watch else None
        if before is None or lasting != before:
            if before is not None:
                print()
            if flags.output in {"json", "yaml"}:
                terminal.print_document(found, flags.output)
            else:
                show(found)
            sys.stdout.flush()
        if not flags.watch:
            return
        before = lasting
        time.sleep(INTERVAL_S)


def _lasting(document: Any) -> Any:
    """Return a document without what changes all the time."""
    if isinstance(document, dict):
        return {key: _lasting(value) for key, value in document.items() if key not in CHANGING}
    if isinstance(document, list | tuple):
        return [_lasting(value) for value in document]
    return document


def waterfall(spans: Sequence[SpanView], width: int) -> list[str]:
    """Draw one line per span: indented below its parent, with a bar, start and duration in ms."""
    if not spans:
        return ["no step of it is known: it ended its last one before the API started"]
    whole = max(*(span.start_s + span.duration_s for span in spans), 1e-9)
    depth = _depths(spans)
    labels = [f"{'  ' * depth[span.span]}{span.name}" for span in spans]
    label_width = max(map(len, labels))
    bar_width = max(width - label_width - 26, 10)
    lines = []
    for span, label in zip(spans, labels, strict=True):
        begin = min(int(span.start_s * bar_width / whole), bar_width - 1)
        length = max(int(span.duration_s * bar_width / whole), 1)
        bar = f"{' ' * begin}{'#' * min(length, bar_width - begin)}"
        at_ms, took_ms = span.start_s * 1e3, span.duration_s * 1e3
        failed = "" if span.ok else f"  failed: {span.text}"
        lines.append(
            f"{label:<{label_width}}  |{bar:<{bar_width}}| {at_ms:8.1f} +{took_ms:.1f} ms{failed}"
        )
    return lines


def _depths(spans: Sequence[SpanView]) -> dict[str, int]:
    parents = {span.span: span.parent for span in spans}

    def depth(span: str) -> int:
        count, seen = 0, {span}
        while (span := parents.get(span, "")) in parents and span not in seen:
            seen.add(span)
            count += 1
        return count

    return {span.span: depth(span.span) for span in spans}
