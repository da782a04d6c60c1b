"""The commands gpus, ps, explain, trace and topology."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from services.cli import terminal
from services.cli.flags import schedulers_of
from services.cli.inspect import json_output
from services.cli.snapshot.location import locate, redis_credentials_of
from services.cli.snapshot.snapshot import PodSummary, Snapshot
from services.cli.snapshot.snapshot_reader import SnapshotReader, open_reader
from shared.model.errors import RequestError

T = TypeVar("T")


def gpus(flags: argparse.Namespace) -> int:
    """Show every device and its leases."""
    nodes = _read(flags, lambda reader: reader.nodes(), pods=False)
    if flags.json:
        terminal.print_json(json_output.gpus(nodes))
    else:
        from services.cli.inspect import render

        terminal.print_text(render.gpus(nodes, terminal.terminal_width()))
    return 0


def ps(flags: argparse.Namespace) -> int:
    """Show leases and waiting pods."""
    snapshot = _read(flags, lambda reader: reader.snapshot(now=time.time(), pods=False), pods=False)
    if flags.json:
        terminal.print_json(json_output.ps(snapshot))
    else:
        from services.cli.inspect import render

        terminal.print_text(render.ps(snapshot))
    return 0


def explain(flags: argparse.Namespace) -> int:
    """Explain why a pod runs on its node, or why it waits."""
    from services.cli.inspect import explanation

    if bool(flags.request) == bool(flags.pod):
        raise RequestError("name either a POD or, with --request, a manifest")
    if flags.request:
        from services.cli.request.manifest_report import explain_manifest

        return explain_manifest(flags)

    async def read(reader: SnapshotReader) -> tuple[PodSummary | None, Snapshot]:
        pod = await reader.pod(flags.namespace, flags.pod)
        return pod, await reader.snapshot(now=time.time(), pods=False)

    pod, snapshot = _read(flags, read)
    if pod is None:
        print(
            f"leasehold explain: there is no pod {flags.namespace}/{flags.pod}; `kubectl get pods "
            "-A` lists them, -n names another namespace",
            file=sys.stderr,
        )
        return 1
    explained = explanation.explain(pod, snapshot, schedulers_of(flags))
    if flags.json:
        terminal.print_json(explanation.shape(pod, explained))
    else:
        from services.cli.inspect import render

        terminal.print_text(render.explanation(explained))
    return 0


def trace(flags: argparse.Namespace) -> int:
    """Show the spans of a pod."""
    from services.cli.inspect import traces

    location = locate(flags.state, redis_url="-", trace_dir=flags.trace_dir)
    directory = location.traces or Path()
    spans = traces.read_spans(directory, namespace=flags.namespace, name=flags.pod)
    if not spans:
        print(
            f"leasehold trace: no span of pod {flags.namespace}/{flags.pod} is in {directory}; "
            "spans arrive half a second after they end. Services with --otlp-endpoint send them "
            "there: the trace id is the pod's uid without its hyphens",
            file=sys.stderr,
        )
        return 1
    if flags.json:
        terminal.print_json(traces.shape(spans))
    else:
        print(f"trace {spans[-1].trace} of {flags.namespace}/{flags.pod}")
        print("\n".join(traces.waterfall(spans, terminal.terminal_width())))
    return 0


def topology(flags: argparse.Namespace) -> int:
    """Show which service publishes which event to which other."""
    from services.topology import edges, mermaid, table

    if flags.json:
        listed = [
            {
                "publisher": edge.publisher,
                "event": edge.event.subject,
                "delivery": edge.delivery,
                "consumer": edge.consumer,
            }
            for edge in edges()
        ]
        terminal.print_json({"edges": listed})
    else:
        print(mermaid() if flags.mermaid else table())
    return 0


def _read(
    flags: argparse.Namespace,
    read: Callable[[SnapshotReader], Awaitable[T]],
    *,
    pods: bool = True,
) -> T:
    location = locate(
        flags.state,
        redis_url=flags.redis_url,
        redis_credentials=redis_credentials_of(flags),
        kubeconfig=flags.kubeconfig,
    )

    async def reading() -> T:
        async with open_reader(location, pods=pods) as reader:
            return await read(reader)

    return asyncio.run(reading())
