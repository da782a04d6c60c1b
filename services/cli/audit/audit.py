"""The command `audit`: reads until every difference has settled or has lasted too long.

`--json` prints {"clean", "checked": {"nodes", "devices", "leases", "pods", "agents"},
"not_checked": [text], "differences": [{"invariant", "subject", "text"}]}.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.arguments import own_schedulers
from services.cli.audit.invariants import differences
from services.cli.audit.lease_checks import unexplained
from services.cli.audit.snapshot import Snapshot, lasting_differences
from services.cli.audit.snapshot_reader import open_reader
from services.cli.commands import Audit
from shared.ledger.total_checks import Difference
from shared.model.errors import RequestError

RETRY_S = 1.0
"""Pause before a difference is read again: what passes by itself is none."""


def audit(flags: Audit) -> int:
    if flags.agents and not flags.agents.is_dir():
        raise RequestError(f"--agents {flags.agents} is not a directory: name one with checkpoints")
    snapshot, lasting = asyncio.run(_audit(flags))
    terminal.show(
        flags.output, shape(snapshot, lasting), lambda _: render(snapshot, lasting), kind="Audit"
    )
    return 1 if lasting else 0


async def _audit(flags: Audit) -> tuple[Snapshot, tuple[Difference, ...]]:
    schedulers = own_schedulers(flags.schedulers)
    first_seen: dict[Difference, float] = {}
    async with open_reader(flags) as reader:
        while True:
            now = time.time()
            snapshot = await reader.snapshot(now)
            current = (*differences(snapshot), *unexplained(snapshot, schedulers))
            lasting, first_seen = lasting_differences(current, first_seen, now)
            if len(lasting) == len(first_seen):
                return snapshot, lasting
            if flags.now:
                return snapshot, tuple(first_seen)
            await asyncio.sleep(RETRY_S)


def shape(snapshot: Snapshot, lasting: Sequence[Difference]) -> dict[str, Any]:
    return {
        "clean": not lasting,
        "checked": _checked(snapshot),
        "not_checked": list(snapshot.not_checked),
        "unreadable": [f"{record.kind} {record.key}" for record in snapshot.damaged],
        "differences": [
            {
                "invariant": difference.invariant,
                "subject": difference.subject,
                "text": difference.text,
            }
            for difference in lasting
        ],
    }


def render(snapshot: Snapshot, lasting: Sequence[Difference]) -> RenderableType:
    checked = "{leases} on {devices} of {nodes}, {pods}, the checkpoints of {agents}".format_map(
        {nouns: _count(number, nouns) for nouns, number in _checked(snapshot).items()}
    )
    lines = [Text(f"clean: {checked} agree", style="green")]
    if lasting:
        head = f"{_count(len(lasting), 'differences')} among {checked}"
        lines = [Text(head, style="bold red")]
        lines += [
            Text(f"{difference.invariant}  {difference.subject}: {difference.text}")
            for difference in lasting
        ]
    notes = [f"not checked: {reason}" for reason in snapshot.not_checked]
    notes += [
        f"damaged in the last 24 hours, and rebuilt: {record.kind} {record.key}"
        for record in snapshot.damaged
    ]
    return Group(*lines, *(Text(note, style="yellow") for note in notes))


def _checked(snapshot: Snapshot) -> dict[str, int]:
    return {
        "nodes": len(snapshot.nodes),
        "devices": sum(len(totals.node.devices) for totals in snapshot.nodes),
        "leases": sum(len(totals.leases) for totals in snapshot.nodes),
        "pods": len(snapshot.pods),
        "agents": len(snapshot.allocations),
    }


def _count(number: int, nouns: str) -> str:
    return f"{number} {nouns.removesuffix('s') if number == 1 else nouns}"
