"""The command report --idle."""

import argparse
import time

from services.cli import terminal
from services.cli.admin.idle_report import idle_shape, idle_table
from services.cli.snapshot.flagged_reader import ClusterReader, read_with_flags
from services.cli.snapshot.snapshot import Snapshot
from shared.model.errors import RequestError


def report_idle(flags: argparse.Namespace) -> int:
    """Add up what idle shares hold, by namespace and owner."""
    budget_flags = {
        "--window": flags.window,
        "--from": flags.begin,
        "--to": flags.end,
        "--group-by": flags.group_by,
        "--csv": flags.csv,
    }
    used = [name for name, value in budget_flags.items() if value]
    if used:
        raise RequestError(f"--idle reports what is held now: omit {', '.join(used)}")

    async def read(reader: ClusterReader) -> Snapshot:
        return await reader.with_usage(await reader.snapshot(now=time.time()))

    snapshot = read_with_flags(flags, read)
    if flags.output:
        terminal.print_document(idle_shape(snapshot), flags.output)
    else:
        terminal.print_text(idle_table(snapshot))
    return 0
