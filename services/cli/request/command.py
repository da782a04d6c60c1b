"""`leasehold explain --request FILE`: what the pods of a manifest would be granted."""

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.arguments import own_schedulers
from services.cli.commands import Explain
from services.cli.request.example_node import parse_example_node
from services.cli.request.manifest_report import (
    ContainerGrant,
    PodReport,
    load_watcher_rules,
    report_of,
)
from services.cli.request.manifests import load, pods_in
from shared.model.request import GpuRequest, SharingPolicy


def report_text(reports: Sequence[PodReport]) -> RenderableType:
    """Format each pod: its request, its Binding, its containers."""
    return Group(*(line for report in reports for line in _lines(report)))


def _lines(report: PodReport) -> Iterable[Text]:
    yield Text(report.origin, style="bold")
    if not report.is_ours:
        yield Text(
            f"  schedulerName is {report.scheduler!r}: change it for Leasehold to schedule the pod",
            style="yellow",
        )
    if report.fault:
        yield Text(f"  invalid request: {report.fault}", style="red")
        return
    request = report.request
    if request is None or not request.containers:
        yield Text("  requests no GPU in any known dialect")
        return
    yield Text(f"  dialect     {request.dialect}")
    for container in request.containers:
        yield Text(f"  container   {container.container}: {request_text(container)}")
    yield Text(f"  tried on    {report.node}")
    if report.refusal is not None:
        yield Text(f"  refused     {report.refusal.text}", style="red")
        return
    yield Text("  Binding carries")
    for key, value in (report.annotations or {}).items():
        yield Text(f"    {key}: {value}")
    for grant in report.grants:
        yield from _grant_lines(grant)


def _grant_lines(grant: ContainerGrant) -> Iterable[Text]:
    yield Text(f"  container {grant.container} gets")
    for name, value in grant.setup.environment.items():
        yield Text(f"    {name}={value}")
    for mount in grant.setup.mounts:
        mode = "read-only" if mount.read_only else "read-write"
        yield Text(f"    mount {mount.host_path} at {mount.container_path}, {mode}")


def report_shape(reports: Sequence[PodReport]) -> dict[str, Any]:
    """Return the JSON form."""
    return {"pods": [_shape(report) for report in reports]}


def _shape(report: PodReport) -> dict[str, Any]:
    request = report.request
    grants = {grant.container: grant for grant in report.grants}
    return {
        "origin": report.origin,
        "scheduler": report.scheduler,
        "ours": report.is_ours,
        "fault": report.fault,
        "refusal": "" if report.refusal is None else report.refusal.text,
        "dialect": "" if request is None else request.dialect,
        "example_node": report.node,
        "containers": [
            {
                "container": container.container,
                "request": request_text(container),
                **_grant_shape(grants.get(container.container)),
            }
            for container in (request.containers if request else ())
        ],
        "binding": dict(report.annotations or {}),
    }


def _grant_shape(grant: ContainerGrant | None) -> dict[str, Any]:
    if grant is None:
        return {}
    return {
        "devices": [
            {
                "device": share.device,
                "index": share.index,
                "memory_mib": share.memory_mib,
                "limit_bytes": share.limit_bytes,
                "cores_percent": share.cores_percent,
            }
            for share in grant.shares
        ],
        "environment": dict(grant.setup.environment),
        "mounts": [
            {
                "container_path": mount.container_path,
                "host_path": mount.host_path,
                "read_only": mount.read_only,
            }
            for mount in grant.setup.mounts
        ],
    }


def request_text(container: GpuRequest) -> str:
    """Describe what one container requests."""
    count = f"{container.gpus} GPU{'s' if container.gpus > 1 else ''}"
    if container.whole:
        return f"{count}, whole and not shared"
    if container.strict and container.sharing is not SharingPolicy.EXCLUSIVE:
        count = f"{count} as a MIG instance (isolation is strict)"
    if container.memory_percent is not None:
        memory = f"{container.memory_percent} % of the memory"
    elif container.memory_bytes is not None:
        memory = f"{container.memory_bytes} bytes"
    elif container.memory_units is not None:
        memory = f"{container.memory_units} units of memory (MiB, unless the node's factor differs)"
    else:
        memory = "all of the memory"
    cores = f"{container.cores_percent} % of the cores" if container.cores_percent else "any cores"
    exclusivity = {
        SharingPolicy.EXCLUSIVE: ", exclusively",
        SharingPolicy.IDLE_DEVICE: ", on an idle GPU",
    }.get(container.sharing, "")
    return f"{count}, of {'each' if container.gpus > 1 else 'it'} {memory}, {cores}{exclusivity}"


def explain_manifest(flags: Explain) -> int:
    """Report on a manifest's pods; return 1 if one of them would not be granted as written."""
    source, text = load(flags.request, sys.stdin)
    example = parse_example_node(flags.gpu, now_s=time.time())
    rules = load_watcher_rules(flags.volcano_conf)
    schedulers = own_schedulers(flags.schedulers)
    reports = [report_of(pod, rules, schedulers, example) for pod in pods_in(text, source)]
    if flags.output:
        terminal.print_document(report_shape(reports), flags.output)
    else:
        terminal.print_text(report_text(reports))
    return 1 if any(report.fault or report.refusal for report in reports) else 0
