"""The rows of `leasehold top`: leased shares with their measured usage, sorted and filtered; pure.

`--json` prints {"shares": [{"pod", "namespace", "name", "container", "node", "device", "index",
"memory_mib", "cores_percent", "measured"}], "unmeasured_nodes"}; "measured" as in `gpus`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age, used_texts
from services.cli.inspect.json_output import measured_shape
from services.cli.inspect.render import cores_text, usage_notes
from services.cli.snapshot.snapshot import MeasuredUsage
from services.cli.tables import new_table
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals
from shared.model.usage import ShareMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRow:
    """One leased share and its usage."""

    lease: Lease
    share: Share
    measured: ShareMeasurement | None

    @property
    def place(self) -> tuple[str, int, str, str, str]:
        """Node, device and container, which order rows with the same usage."""
        lease, share = self.lease, self.share
        return lease.node, share.index, lease.namespace, lease.name, share.container


def _memory(row: TopRow) -> float:
    return -1 if row.measured is None else row.measured.memory_mib or 0


def _cores(row: TopRow) -> float:
    return -1 if row.measured is None else row.measured.cores_percent or 0


def _idle(row: TopRow) -> float:
    since = row.measured.idle_since if row.measured else None
    return float("inf") if since is None else since


SORT_KEYS: Mapping[str, Callable[[TopRow], Any]] = {
    "memory": lambda row: (-_memory(row), row.place),
    "cores": lambda row: (-_cores(row), row.place),
    "idle": lambda row: (_idle(row), row.place),
    "pod": lambda row: (row.lease.namespace, row.lease.name, row.place),
    "node": lambda row: row.place,
}


def top_rows(
    nodes: Iterable[NodeTotals],
    usage: MeasuredUsage,
    *,
    sort: str,
    namespace: str = "",
    node: str = "",
) -> list[TopRow]:
    """Return the shares of one namespace or all, on one node or all; init containers left out."""
    rows = [
        TopRow(lease=lease, share=share, measured=usage.of(lease, share))
        for totals in nodes
        for lease in totals.leases
        for share in lease.shares
        if not share.init
        and lease.namespace
        and namespace in ("", lease.namespace)
        and node in ("", lease.node)
    ]
    return sorted(rows, key=SORT_KEYS[sort])


def top_table(rows: Sequence[TopRow], usage: MeasuredUsage) -> RenderableType:
    """List the shares: use of the lease, in MiB and percent of the device's cores."""
    listed = new_table(
        "POD", "CONTAINER", "NODE", "GPU", "MIB", "CORES", "PROCESSES", "NOT USED FOR"
    )
    for row in rows:
        measured = row.measured
        memory, cores = used_texts(measured)
        listed.add_row(
            f"{row.lease.namespace}/{row.lease.name}",
            row.share.container,
            row.lease.node,
            str(row.share.index),
            f"{memory} of {row.share.memory_mib}",
            f"{cores} of {cores_text(row.share)}",
            "-" if measured is None else str(measured.processes),
            _idle_text(row, usage),
            style="" if usage.idle_since(row.lease, row.share) is None else "yellow",
        )
    return Group(listed if rows else Text("no pod holds a lease"), *usage_notes(usage))


def _idle_text(row: TopRow, usage: MeasuredUsage) -> str:
    since = row.measured.idle_since if row.measured else None
    if since is None:
        return "-"
    mark = "" if usage.idle_since(row.lease, row.share) is None else " idle"
    return f"{age(usage.read_at - since)}{mark}"


def top_shape(rows: Sequence[TopRow], usage: MeasuredUsage) -> dict[str, Any]:
    """Return the JSON form."""
    return {
        "shares": [
            {
                "pod": row.lease.pod,
                "namespace": row.lease.namespace,
                "name": row.lease.name,
                "container": row.share.container,
                "node": row.lease.node,
                "device": row.share.device,
                "index": row.share.index,
                "memory_mib": row.share.memory_mib,
                "cores_percent": row.share.cores_percent,
                "measured": measured_shape(usage, row.lease, row.share),
            }
            for row in rows
        ],
        "unmeasured_nodes": list(usage.unmeasured_nodes),
    }
