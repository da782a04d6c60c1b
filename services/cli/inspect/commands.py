"""The commands that look: gpus, ps, explain, audit, trace, topology."""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.cli.audit.audit import differences, lasting, unexplained
from services.cli.audit.difference import Difference
from services.cli.inspect import json_output, sources
from services.cli.inspect.facts import Facts
from services.cli.inspect.sources import Reader, Where
from shared.model.errors import RequestError

AUDIT_AGAIN_S = 1.0
PLAIN_WIDTH = 120
UNBROKEN_WIDTH = 4_000


def gpus(flags: argparse.Namespace) -> int:
    """Show every device and its leases."""
    accounts = _read(flags, lambda reader: reader.accounts(), pods=False)
    if flags.json:
        return _dump(json_output.gpus(accounts))
    from services.cli.inspect import render

    return _show(lambda width: render.gpus(accounts, width))


def ps(flags: argparse.Namespace) -> int:
    """Show leases and waiting pods."""
    facts = _read(flags, lambda reader: reader.facts(now=time.time(), pods=False), pods=False)
    if flags.json:
        return _dump(json_output.ps(facts))
    from services.cli.inspect import render

    return _show(lambda _: render.ps(facts))


def explain(flags: argparse.Namespace) -> int:
    """Say why a pod runs where it runs, or why it waits."""
    from services.cli.inspect import explain as explaining

    if bool(flags.request) == bool(flags.pod):
        raise RequestError("name either a POD or, with --request, a manifest")
    if flags.request:
        return _explain_request(flags)

    async def read(reader: Reader) -> tuple[Any, Facts]:
        pod = await reader.pod(flags.namespace, flags.pod)
        return pod, await reader.facts(now=time.time(), pods=False)

    pod, facts = _read(flags, read)
    if pod is None:
        print(
            f"leasehold explain: there is no pod {flags.namespace}/{flags.pod}; `kubectl get pods "
            "-A` lists them, -n names another namespace",
            file=sys.stderr,
        )
        return 1
    answer = explaining.explain(pod, facts, _schedulers(flags))
    if flags.json:
        return _dump(explaining.shape(pod, answer))
    from services.cli.inspect import render

    return _show(lambda _: render.explanation(answer))


def _explain_request(flags: argparse.Namespace) -> int:
    """Say how a manifest is read; return 1 if one of its pods could not be granted as written."""
    from services.cli.request import manifest_reader, manifests
    from services.cli.request import render as render_reading

    source, text = manifests.load(flags.request, sys.stdin)
    example = manifest_reader.example_of(flags.gpu, now_s=time.time())
    rules = manifest_reader.rules_of(flags.volcano_conf)
    schedulers = _schedulers(flags)
    readings = [
        manifest_reader.read_written(written, rules, schedulers, example)
        for written in manifests.pods_in(text, source)
    ]
    if flags.json:
        _dump(render_reading.shape(readings))
    else:
        _show(lambda _: render_reading.text(readings))
    return 1 if any(one.fault or one.refusal for one in readings) else 0


def audit(flags: argparse.Namespace) -> int:
    """Recompute what must hold; return 1 if something does not."""
    schedulers = _schedulers(flags)
    facts, wrong = _read(flags, lambda reader: _audited(reader, schedulers, wait=not flags.now))
    if flags.json:
        _dump(json_output.audit(facts, wrong))
    else:
        from services.cli.inspect import render

        _show(lambda _: render.audit(facts, wrong))
    return 1 if wrong else 0


def trace(flags: argparse.Namespace) -> int:
    """Show the spans of a pod."""
    from services.cli.inspect import waterfall

    where = sources.find(flags.state, redis_url="-", trace_dir=flags.trace_dir)
    directory = where.traces or Path()
    spans = waterfall.read_spans(directory, namespace=flags.namespace, name=flags.pod)
    if not spans:
        print(
            f"leasehold trace: no span of pod {flags.namespace}/{flags.pod} is in {directory}; "
            "spans arrive half a second after they end. Services with --otlp-endpoint send them "
            "there: the id of the trace is the pod's uid without its hyphens",
            file=sys.stderr,
        )
        return 1
    if flags.json:
        return _dump(waterfall.shape(spans))
    print(f"trace {spans[-1].trace} of {flags.namespace}/{flags.pod}")
    print("\n".join(waterfall.waterfall(spans, _width())))
    return 0


def topology(flags: argparse.Namespace) -> int:
    """Draw which service says what to whom."""
    from services.topology import edges, mermaid, table

    if flags.json:
        listed = [
            {"says": e.publisher, "event": e.event.subject, "as": e.manner, "hears": e.consumer}
            for e in edges()
        ]
        return _dump({"edges": listed})
    print(mermaid() if flags.mermaid else table())
    return 0


async def _audited(
    reader: Reader, schedulers: frozenset[str], *, wait: bool
) -> tuple[Facts, tuple[Difference, ...]]:
    """Read until every difference has either gone or lasted longer than it may."""
    since: dict[Difference, float] = {}
    while True:
        now = time.time()
        facts = await reader.audited(now=now)
        found = (*differences(facts), *unexplained(facts, schedulers))
        wrong, since = lasting(found, since, now)
        if len(wrong) == len(since):
            return facts, wrong
        if not wait:
            return facts, tuple(since)
        await asyncio.sleep(AUDIT_AGAIN_S)


def _read(
    flags: argparse.Namespace, read: Callable[[Reader], Awaitable[Any]], *, pods: bool = True
) -> Any:
    async def reading(where: Where) -> Any:
        async with sources.opened(where, pods=pods) as reader:
            return await read(reader)

    where = sources.find(
        flags.state,
        redis_url=flags.redis_url,
        redis_keys=sources.redis_keys_of(flags),
        kubeconfig=flags.kubeconfig,
        agents=getattr(flags, "agents", ""),
    )
    return asyncio.run(reading(where))


def _schedulers(flags: argparse.Namespace) -> frozenset[str]:
    return frozenset(name.strip() for name in flags.schedulers.split(",") if name.strip())


def _dump(shape: Any) -> int:
    print(json.dumps(shape, indent=1))
    return 0


def _width() -> int:
    return shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns


def _show(draw: Callable[[int], Any]) -> int:
    """Print for a terminal in colour and in its width; otherwise plain, lines never broken."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else UNBROKEN_WIDTH
    Console(highlight=False, width=width).print(draw(_width()))
    return 0
