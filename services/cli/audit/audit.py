"""The command `audit`: reads until every difference has settled or has lasted too long.

`--json` prints {"clean", "checked": {"nodes", "devices", "leases", "pods", "agents"},
"not_checked": [text], "differences": [{"invariant", "subject", "text"}]}.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.arguments import own_schedulers
from services.cli.audit.account_checks import window_totals
from services.cli.audit.invariants import differences, unread_checkpoints
from services.cli.audit.lease_checks import unexplained
from services.cli.audit.snapshot import Difference, Snapshot, WindowTotals, lasting_differences
from services.cli.audit.snapshot_reader import (
    LedgerLocation,
    SnapshotReader,
    locate_ledger,
    open_reader,
)
from services.cli.commands import Audit
from shared.ledger.budgets import Budgets
from shared.ledger.showback import entries_of
from shared.model.budget import HOUR_MS
from shared.model.errors import PermissionDeniedError, RequestError

RETRY_S = 1.0
COSTS_MS = 400 * 24 * HOUR_MS


def audit(flags: Audit) -> int:
    """Recompute every invariant; return 1 if one is violated."""
    if flags.agents and not flags.agents.is_dir():
        raise RequestError(f"--agents {flags.agents} is not a directory: name one with checkpoints")
    location = locate_ledger(flags)
    snapshot, lasting = asyncio.run(
        _audit(location, own_schedulers(flags.schedulers), wait=not flags.now)
    )
    terminal.show(flags.output, shape(snapshot, lasting), lambda _: render(snapshot, lasting))
    return 1 if lasting else 0


async def _audit(
    location: LedgerLocation, schedulers: frozenset[str], *, wait: bool
) -> tuple[Snapshot, tuple[Difference, ...]]:
    """Read until every difference has gone or has lasted longer than it may."""
    first_seen: dict[Difference, float] = {}
    async with open_reader(location) as reader:
        while True:
            now = time.time()
            snapshot = await read_audited(reader, now)
            found = (*differences(snapshot), *unexplained(snapshot, schedulers))
            lasting, first_seen = lasting_differences(found, first_seen, now)
            if len(lasting) == len(first_seen):
                return snapshot, lasting
            if not wait:
                return snapshot, tuple(first_seen)
            await asyncio.sleep(RETRY_S)


async def read_audited(reader: SnapshotReader, now: float) -> Snapshot:
    """Read everything that an audit compares, and record the parts that are not readable here."""
    snapshot = await reader.snapshot(now=now)
    not_checked = list(unread_checkpoints(snapshot))
    try:
        snapshot = replace(snapshot, api_nodes=await reader.cluster_objects.node_names())
    except PermissionDeniedError:
        not_checked.append("nodes: this user may not list them at the API server")
    snapshot = replace(snapshot, claims=await reader.cluster_objects.claims())
    if snapshot.claims is None and any(lease.claim for lease in snapshot.leases):
        not_checked.append("claims: this user may not list ResourceClaims at the API server")
    try:
        snapshot = await _with_budgets(snapshot, reader.location)
    except PermissionDeniedError:
        not_checked.append("budgets: this Redis user may not read them; the user operator may")
    return replace(snapshot, not_checked=tuple(not_checked))


async def _with_budgets(snapshot: Snapshot, location: LedgerLocation) -> Snapshot:
    """Add every open budget window that has a start, with the sum of its entries, and costs."""
    windows: list[WindowTotals] = []
    credentials = location.redis_credentials
    async with Budgets.connect(location.redis_url, credentials=credentials) as budgets:
        now_ms = await budgets.now_ms()
        hours = (await budgets.costs(now_ms - COSTS_MS, now_ms)).hours.values()
        for account in await budgets.load(dict.fromkeys(await budgets.revisions())):
            # The first entries of a window that never ends may have been trimmed.
            if not account.windows or not account.windows[-1].start_ms:
                continue
            window = account.windows[-1]
            after = f"{window.start_ms - 1}"
            entries = [each async for each in entries_of(budgets, account.namespace, after=after)]
            windows.append(window_totals(account.namespace, window, entries))
    return replace(snapshot, budget_windows=tuple(windows), cost_hours=tuple(hours))


def shape(snapshot: Snapshot, lasting: Sequence[Difference]) -> dict[str, Any]:
    """Return the JSON form."""
    nodes, devices, leases = _counts(snapshot)
    return {
        "clean": not lasting,
        "checked": {
            "nodes": nodes,
            "devices": devices,
            "leases": leases,
            "pods": len(snapshot.pods),
            "agents": len(snapshot.allocations),
        },
        "not_checked": list(snapshot.not_checked),
        "unreadable": [f"{record.kind} {record.key}" for record in snapshot.unreadable],
        "differences": [
            {"invariant": one.invariant, "subject": one.subject, "text": one.text}
            for one in lasting
        ],
    }


def render(snapshot: Snapshot, lasting: Sequence[Difference]) -> RenderableType:
    """List what was checked and every difference."""
    nodes, devices, leases = _counts(snapshot)
    checked = (
        f"{_count(leases, 'lease')} on {_count(devices, 'device')} of {_count(nodes, 'node')}, "
        f"{_count(len(snapshot.pods), 'pod')}, the checkpoints of "
        f"{_count(len(snapshot.allocations), 'agent')}"
    )
    if lasting:
        lines = [Text(f"{_count(len(lasting), 'difference')} among {checked}", style="bold red")]
        lines += [Text(f"{one.invariant}  {one.subject}: {one.text}") for one in lasting]
    else:
        lines = [Text(f"clean: {checked} agree", style="green")]
    lines += [Text(f"not checked: {one}", style="yellow") for one in snapshot.not_checked]
    lines += [
        Text(
            f"damaged in the last 24 hours, and rebuilt: {record.kind} {record.key}", style="yellow"
        )
        for record in snapshot.unreadable
    ]
    return Group(*lines)


def _counts(snapshot: Snapshot) -> tuple[int, int, int]:
    devices = sum(len(totals.node.devices) for totals in snapshot.nodes)
    return len(snapshot.nodes), devices, sum(len(totals.leases) for totals in snapshot.nodes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
