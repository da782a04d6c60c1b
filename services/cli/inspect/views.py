"""The commands gpus, ps, top, explain, trace and topology."""

import contextlib
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import structs

from services.cli import terminal
from services.cli.api_client import ApiClient, NothingFoundError, RefusedError
from services.cli.arguments import FORMS, own_schedulers
from services.cli.commands import Explain, Gpus, Ps, Top, Topology, Trace, Version
from services.cli.listing import present_list
from services.cli.terminal import Printable, console_of, program
from shared.kubernetes.paths import objects_path
from shared.model.errors import LeaseholdError, RequestError
from shared.model.views.gpus import GpusView
from shared.model.views.leases import LeasesView
from shared.model.views.orders import VersionView
from shared.model.views.pods import PodView, SpanView, TraceView
from shared.model.views.view import View

if TYPE_CHECKING:
    from rich.console import RenderableType

API_PODS = "/api/v1/pods"
NO_TRACE_URL = (
    "these are the times at which the API saw each step. With --otlp-endpoint, services send every "
    "span to a collector, and --trace-url of the API links to its page"
)


def gpus(flags: Gpus) -> int:
    api = ApiClient(flags)

    def read() -> GpusView:
        view = api.get("/api/v1/gpus", GpusView, idle_after_s=flags.idle_after_s)
        if not flags.selector:
            return view
        chosen = {node.name for node in api.server.selected("/api/v1/nodes", flags.selector)}
        return structs.replace(view, nodes=tuple(e for e in view.nodes if e.node in chosen))

    def show(view: GpusView) -> "RenderableType":
        from services.cli.inspect import render

        return render.gpus(
            view,
            terminal.terminal_width(),
            wide=flags.output == "wide",
            narrowed=bool(flags.selector),
        )

    return present_list(flags, ("nodes.devices",), read, show, _gpu_names)


def _gpu_names(view: GpusView) -> list[str]:
    return [f"{node.node}/{gpu.index}" for node in view.nodes for gpu in node.devices]


def ps(flags: Ps) -> int:
    api = ApiClient(flags)

    def show(view: LeasesView) -> "RenderableType":
        from services.cli.inspect import render

        return render.ps(
            view,
            namespace=flags.namespace,
            wide=flags.output == "wide",
            narrowed=bool(flags.pod or flags.selector),
            headers=not flags.no_headers,
        )

    def read() -> LeasesView:
        return _leases(api, flags, name=flags.pod)

    return present_list(flags, ("leases", "waiting"), read, show, _pod_names)


def _pod_names(view: LeasesView) -> list[str]:
    names = [*(lease.name for lease in view.leases), *(pod.name for pod in view.waiting)]
    return [f"pod/{name}" for name in names]


def _leases(api: ApiClient, flags: Ps | Top, name: str = "") -> LeasesView:
    view = api.get(
        "/api/v1/leases",
        LeasesView,
        namespace=flags.namespace,
        name=name,
        idle_after_s=flags.idle_after_s,
    )
    if not flags.selector:
        return view
    path = objects_path(flags.namespace, "pods") if flags.namespace else API_PODS
    chosen = {pod.uid for pod in api.server.selected(path, flags.selector)}
    return structs.replace(
        view,
        leases=tuple(lease for lease in view.leases if chosen.intersection(lease.users)),
        waiting=tuple(pod for pod in view.waiting if pod.pod in chosen),
    )


def top(flags: Top) -> int:
    from services.cli.inspect.render import TopView, top_rows, top_table, top_view

    api = ApiClient(flags)
    wide = flags.output == "wide"
    view = LeasesView(read_at=0.0, idle_after_s=0.0)

    def read() -> TopView:
        nonlocal view
        view = _leases(api, flags)
        return top_view(top_rows(view, sort=flags.sort, node=flags.node), view)

    def show(top: TopView) -> "RenderableType":
        narrowed = bool(flags.node or flags.selector)
        return top_table(
            top.shares,
            view,
            namespace=flags.namespace,
            wide=wide,
            narrowed=narrowed,
            headers=not flags.no_headers,
        )

    if flags.once or flags.output not in {"", "wide"} or not sys.stdout.isatty():
        return present_list(
            flags, ("shares",), read, show, lambda view: [f"pod/{row.name}" for row in view.shares]
        )
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(
            Printable(show(read())), console=console_of(), screen=True, auto_refresh=False
        ) as live,
    ):
        while True:
            time.sleep(flags.interval)
            live.update(Printable(show(read())), refresh=True)
    return 0


def names_in_cluster(kind: str, flags: Ps) -> list[str]:
    try:
        api = ApiClient(flags)
        if kind in {"node", "gpu"}:
            view = api.get("/api/v1/gpus", GpusView)
            return _gpu_names(view) if kind == "gpu" else [node.node for node in view.nodes]
        namespace = "" if kind == "namespace" else flags.namespace
        if namespace is None:
            namespace = api.namespace
        leases = api.get("/api/v1/leases", LeasesView, namespace=namespace)
    except LeaseholdError:
        return []
    attribute = "name" if kind == "pod" else "namespace"
    return list({getattr(item, attribute) for item in (*leases.leases, *leases.waiting)})


def explain(flags: Explain) -> int:
    from services.cli.inspect.explanation import Explanation, explanation_of
    from services.cli.inspect.refused_claims import refused_claim_lines
    from services.cli.inspect.workloads import pod_to_explain

    if flags.request:
        from services.cli.request.command import explain_manifest

        return explain_manifest(flags)
    api = ApiClient(flags)

    def read() -> Explanation:
        pod = pod_to_explain(api.server, flags.namespace, flags.pod)
        with_patch = flags.output in FORMS
        view = _pod_view(api, pod.pod, flags.idle_after_s, with_changes=with_patch)
        cluster = GpusView(read_at=0.0)
        if view is None or view.lease is not None:
            cluster = api.get("/api/v1/gpus", GpusView)
        problems = cluster.problems if view is None else view.problems
        has_no_lease = not pod.node and (view is None or view.lease is None)
        changes = view.waiting.changes if view and view.waiting else ()
        return explanation_of(
            pod,
            view,
            own_schedulers(flags.schedulers),
            program(),
            nodes=cluster.nodes,
            problems=problems,
            claims=tuple(refused_claim_lines(api.server, pod)) if has_no_lease else (),
            manifest=api.server.manifest(pod.namespace, pod.name) if changes else None,
        )

    def show(explanation: Explanation) -> "RenderableType":
        from services.cli.inspect import render

        return render.explanation(explanation, wide=flags.output == "wide")

    return terminal.present(flags, read, show, lambda explanation: [f"pod/{explanation.name}"])


def _pod_view(
    api: ApiClient, uid: str, idle_s: str = "", *, with_changes: bool = False
) -> PodView | None:
    changes = "true" if with_changes else ""
    try:
        return api.get(f"/api/v1/leases/{uid}", PodView, idle_after_s=idle_s, changes=changes)
    except RefusedError as error:
        if error.status == 404:
            return None
        raise


def trace(flags: Trace) -> int:
    name = f"{flags.namespace}/{flags.pod}"

    def read() -> TraceView:
        trace = _trace_in(flags.trace_dir, flags) if flags.trace_dir else _trace_of_api(flags)
        if trace is None:
            raise NothingFoundError(
                f"no span of pod {name} is in {flags.trace_dir or 'the API'}; spans arrive half a "
                "second after they end. Services with --otlp-endpoint send them there: the trace "
                "id is the pod's uid without its hyphens"
            )
        return trace

    def show(trace: TraceView) -> str:
        claim = next((f", ResourceClaim {span.claim}" for span in trace.spans if span.claim), "")
        lines = [f"trace {trace.trace} of {name}{claim}"]
        lines += waterfall(trace.spans, terminal.terminal_width())
        if trace.url or not any(span.service for span in trace.spans):
            lines.append(trace.url or NO_TRACE_URL)
        return "\n".join(lines)

    return terminal.present(flags, read, show)


def _trace_in(directory: Path, flags: Trace) -> TraceView | None:
    from shared.runtime.span_files import read_spans, span_views

    if not directory.is_dir():
        raise RequestError(f"--trace-dir {directory} is not a directory: name one with spans")
    spans = read_spans(directory, namespace=flags.namespace, name=flags.pod)
    return TraceView(trace=spans[-1].trace, spans=span_views(spans)) if spans else None


def _trace_of_api(flags: Trace) -> TraceView | None:
    """The API may know a pod only by its UID."""
    api = ApiClient(flags)
    try:
        return api.get(
            "/api/v1/traces/"
            + "/".join(quote(name, safe="") for name in (flags.namespace, flags.pod)),
            TraceView,
        )
    except RefusedError as error:
        if error.status != 404:
            raise
    view = _pod_view(api, api.server.pod(flags.namespace, flags.pod).pod)
    return view.trace if view else None


class Versions(View, frozen=True, kw_only=True):
    client: str
    server: VersionView | None


def version(flags: Version) -> int:
    from importlib import metadata

    def read() -> Versions:
        server = None
        if not flags.client:
            server = ApiClient(flags).get("/api/v1/version", VersionView)
        return Versions(client=metadata.version("leasehold"), server=server)

    def show(versions_view: Versions) -> str:
        lines = [f"client {versions_view.client}"]
        if versions_view.server is not None:
            others = [
                f"{service} {', '.join(versions)}"
                for service, versions in versions_view.server.services.items()
                if versions != (versions_view.server.version,)
            ]
            lines += [f"server {versions_view.server.version}", *others]
        return "\n".join(lines)

    return terminal.present(flags, read, show)


def topology(flags: Topology) -> int:
    from services.topology import edges, mermaid, table

    listed = [
        {
            "publisher": edge.publisher,
            "event": edge.event.subject,
            "delivery": edge.delivery,
            "consumer": edge.consumer,
        }
        for edge in edges()
    ]
    terminal.show(
        flags.output,
        {"edges": listed},
        lambda _: mermaid() if flags.mermaid else table(),
        kind="Topology",
    )
    return 0


def waterfall(spans: Sequence[SpanView], width: int) -> list[str]:
    if not spans:
        return ["no step of it is known: it ended its last one before the API started"]
    whole = max(*(span.start_s + span.duration_s for span in spans), 1e-9)
    depth = _depths(spans)
    labels = [f"{'  ' * depth[span.span]}{_title(span)}" for span in spans]
    label_width = max(map(len, labels))
    bar_width = max(width - label_width - 26, 10)
    lines = []
    for span, label in zip(spans, labels, strict=True):
        begin = min(int(span.start_s * bar_width / whole), bar_width - 1)
        length = max(int(span.duration_s * bar_width / whole), 1)
        bar = f"{' ' * begin}{'#' * min(length, bar_width - begin)}"
        at = _seconds(span.start_s)
        took = _seconds(span.duration_s)
        failed = "" if span.ok else f"  failed: {span.text}"
        lines.append(f"{label:<{label_width}}  |{bar:<{bar_width}}| {at:>9} +{took}{failed}")
        indent = "  " * (depth[span.span] + 1)
        for note in span.notes:
            lines += textwrap.wrap(
                note, width, initial_indent=indent, subsequent_indent=indent + "  "
            )
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _title(span: SpanView) -> str:
    return f"{span.service}: {span.name}" if span.service else span.name


def _depths(spans: Sequence[SpanView]) -> dict[str, int]:
    parents = {span.span: span.parent for span in spans}

    def depth(span: str) -> int:
        count = 0
        seen = {span}
        while (span := parents.get(span, "")) in parents and span not in seen:
            seen.add(span)
            count += 1
        return count

    return {span.span: depth(span.span) for span in spans}
