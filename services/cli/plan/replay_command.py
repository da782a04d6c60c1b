"""The command replay."""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.cli import terminal
from services.cli.plan import replay_render
from services.cli.plan.replay import replay
from services.cli.plan.trace import idle_in_parts, read_nodes, read_pods
from services.cli.request.manifests import load
from services.cli.snapshot.location import locate_ledger
from services.cli.snapshot.snapshot_reader import open_reader
from shared.model.errors import RequestError
from shared.model.ledger import LedgerNode
from shared.model.request import NodeOrder


def replay_trace(flags: argparse.Namespace) -> int:
    """Replay a trace by each of the policies and show what came of it."""
    source, text = load(flags.file, sys.stdin)
    pods = read_pods(text.splitlines(), source, timed=True)
    if not pods or pods[0].created_s == pods[-1].created_s:
        raise RequestError(f"{source} has no pods that arrive at different times")
    nodes = _nodes(flags)
    if not any(node.devices for node in nodes):
        raise RequestError(f"{flags.nodes or 'the cluster'} has no node with GPUs")
    pods = [replace(pod, created_s=pod.created_s / flags.load) for pod in pods]
    results = [replay(pods, nodes, NodeOrder(policy)) for policy in flags.policies]
    if flags.output:
        terminal.print_document(replay_render.replay_shape(results), flags.output)
    else:
        terminal.print_text(replay_render.replay_text(results))
    return 0


def _nodes(flags: argparse.Namespace) -> Sequence[LedgerNode]:
    if flags.nodes:
        source, text = load(flags.nodes, sys.stdin)
        return read_nodes(text.splitlines(), source)
    return [idle_in_parts(node) for node in asyncio.run(_cluster_nodes(flags))]


async def _cluster_nodes(flags: argparse.Namespace) -> Iterable[LedgerNode]:
    async with open_reader(locate_ledger(flags), pods=False) as reader:
        return [totals.node for totals in await reader.nodes()]
