"""The commands gpus, ps, top, explain, trace and topology."""

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.cli import terminal
from services.cli.flags import schedulers_of
from services.cli.inspect import json_output
from services.cli.inspect.shown_changes import Shown
from services.cli.program import program, program_name
from services.cli.snapshot.flagged_reader import ClusterReader, read_with_flags
from services.cli.snapshot.location import ClusterLocation, locate
from services.cli.snapshot.snapshot import MeasuredUsage, PodSummary, Snapshot
from shared.model.bounds import printable
from shared.model.errors import RequestError
from shared.model.ledger import NodeTotals

if TYPE_CHECKING:
    from services.cli.inspect.top import TopRow

T = TypeVar("T")
NO_TRACE_URL = (
    "these are the times at which the dashboard saw each step. With --otlp-endpoint, services send "
    "every span to a collector, and --trace-url of the dashboard links to its page"
)


def gpus(flags: argparse.Namespace) -> int:
    """Show every device and its leases."""

    def show(read: tuple[tuple[NodeTotals, ...], MeasuredUsage]) -> None:
        if flags.output:
            terminal.print_document(json_output.gpus(*read), flags.output)
        else:
            from services.cli.inspect import render

            nodes, usage = read
            terminal.print_text(render.gpus(nodes, terminal.terminal_width(), usage))

    shown = Shown(read=_nodes_and_usage, document=lambda read: json_output.gpus(*read), show=show)
    read_with_flags(flags, shown.once_or_watched(watch=flags.watch), pods=False)
    return 0


def ps(flags: argparse.Namespace) -> int:
    """Show leases and waiting pods."""

    async def read(reader: ClusterReader) -> Snapshot:
        whole = await reader.snapshot(now=time.time(), pods=False)
        return await reader.with_usage(whole.of_pods(flags.namespace, flags.pod))

    def show(snapshot: Snapshot) -> None:
        if flags.output == "name":
            print("".join(f"pod/{name}\n" for name in snapshot.pod_names), end="")
        elif flags.output in {"json", "yaml"}:
            terminal.print_document(json_output.ps(snapshot), flags.output)
        else:
            from services.cli.inspect import render

            terminal.print_text(render.ps(snapshot, wide=flags.output == "wide"))

    shown = Shown(read=read, document=json_output.ps, show=show)
    read_with_flags(flags, shown.once_or_watched(watch=flags.watch), pods=False)
    return 0


def top(flags: argparse.Namespace) -> int:
    """Show the usage of every share beside its lease, until interrupted."""
    from rich.live import Live

    from services.cli.inspect.top import top_rows, top_shape, top_table

    if flags.interval <= 0:
        raise RequestError(f"--interval must be above 0, got {flags.interval:g}")

    async def show(reader: ClusterReader) -> None:
        async def read() -> "tuple[list[TopRow], MeasuredUsage]":
            nodes, usage = await _nodes_and_usage(reader)
            selected = {"namespace": flags.namespace, "node": flags.node}
            return top_rows(nodes, usage, sort=flags.sort, **selected), usage

        rows, usage = await read()
        if flags.output:
            terminal.print_document(top_shape(rows, usage), flags.output)
            return
        if flags.once or not sys.stdout.isatty():
            terminal.print_text(top_table(rows, usage))
            return
        with Live(top_table(rows, usage), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(flags.interval)
                rows, usage = await read()
                live.update(top_table(rows, usage), refresh=True)

    with contextlib.suppress(KeyboardInterrupt):
        read_with_flags(flags, show, pods=False)
    return 0


def explain(flags: argparse.Namespace) -> int:
    """Explain why a pod runs on its node, or why it waits."""
    from services.cli.inspect import explanation

    if bool(flags.request) == bool(flags.pod):
        raise RequestError("name either a POD or, with --request, a manifest")
    if flags.request:
        from services.cli.request.command import explain_manifest

        return explain_manifest(flags)

    async def read(reader: ClusterReader) -> tuple[PodSummary | None, Snapshot]:
        pod = await reader.pod(flags.namespace, flags.pod)
        return pod, await _snapshot_and_usage(reader)

    def explained(pod: PodSummary, snapshot: Snapshot) -> explanation.Explanation:
        return explanation.explain(pod, snapshot, schedulers_of(flags), program())

    def document(read: tuple[PodSummary | None, Snapshot]) -> dict[str, Any]:
        pod, snapshot = read
        if pod is None:
            return {}
        return explanation.shape(pod, explained(pod, snapshot))

    def show(read: tuple[PodSummary | None, Snapshot]) -> None:
        pod, snapshot = read
        if pod is None:
            print(
                f"{program_name()} explain: there is no pod {flags.namespace}/{flags.pod}; "
                "`kubectl get pods -A` lists them, -n names another namespace",
                file=sys.stderr,
            )
        elif flags.output:
            terminal.print_document(document(read), flags.output)
        else:
            from services.cli.inspect import render

            terminal.print_text(render.explanation(explained(pod, snapshot)))

    shown = Shown(read=read, document=document, show=show)
    pod, _ = read_with_flags(flags, shown.once_or_watched(watch=flags.watch))
    return 0 if pod else 1


def trace(flags: argparse.Namespace) -> int:
    """Show the spans of a pod."""
    from services.cli.inspect.waterfall import waterfall
    from shared.runtime.span_files import read_spans, spans_json

    location = locate(flags)
    if location.traces is None:
        return asyncio.run(_trace_in_cluster(flags, location))
    directory = location.traces or Path()
    spans = read_spans(directory, namespace=flags.namespace, name=flags.pod)
    if not spans:
        print(
            f"{program_name()} trace: no span of pod {flags.namespace}/{flags.pod} is in "
            f"{directory}; spans arrive half a second after they end. Services with "
            "--otlp-endpoint send them there: the trace id is the pod's uid without its hyphens",
            file=sys.stderr,
        )
        return 1
    if flags.output:
        terminal.print_document(spans_json(spans), flags.output)
    else:
        claim = next((f", ResourceClaim {span.claim}" for span in spans if span.claim), "")
        print(f"trace {spans[-1].trace} of {flags.namespace}/{flags.pod}{claim}")
        print("\n".join(map(printable, waterfall(spans, terminal.terminal_width()))))
    return 0


async def _trace_in_cluster(flags: argparse.Namespace, location: ClusterLocation) -> int:
    """Show the spans of a pod of a cluster, or else the times of its steps, and where all are."""
    from services.cli.inspect.waterfall import waterfall
    from services.cli.snapshot.dashboard_reader import open_dashboard_reader
    from shared.runtime.span_files import spans_of_json

    async with open_dashboard_reader(location) as reader:
        pod = await reader.pod(flags.namespace, flags.pod)
        if pod is None:
            raise RequestError(f"there is no pod {flags.namespace}/{flags.pod}")
        found = await reader.get(f"/api/v1/leases/{pod.pod}", dict[str, Any])
    trace = found["trace"]
    if flags.output:
        shown = {"trace": trace["id"], "url": trace["url"], "spans": trace["spans"]}
        terminal.print_document(shown, flags.output)
        return 0
    print(f"trace {trace['id']} of {flags.namespace}/{flags.pod}")
    lines = waterfall(spans_of_json(trace["spans"]), terminal.terminal_width())
    print("\n".join(map(printable, lines)))
    print(trace["url"] or NO_TRACE_URL)
    return 0


def topology(flags: argparse.Namespace) -> int:
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


async def _nodes_and_usage(reader: ClusterReader) -> tuple[tuple[NodeTotals, ...], MeasuredUsage]:
    nodes = await reader.nodes()
    return nodes, await reader.read_usage(nodes)


async def _snapshot_and_usage(reader: ClusterReader) -> Snapshot:
    return await reader.with_usage(await reader.snapshot(now=time.time(), pods=False))
