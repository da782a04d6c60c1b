"""The rows of `top`: leased shares with their measured usage, sorted and filtered; pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age, new_table, notes, used_texts
from services.cli.inspect.render import cores_text
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.views import LeasesView, ShareView, View


class TopRow(ShareView, frozen=True, kw_only=True):
    """One leased share and its usage."""

    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName

    @property
    def place(self) -> tuple[str, int, str, str, str]:
        """Node, device and container, which order rows with the same usage."""
        return self.node, self.index, self.namespace, self.name, self.container


class TopView(View, frozen=True, kw_only=True):
    """The shares, in the order of the command."""

    shares: tuple[TopRow, ...]
    unmeasured_nodes: tuple[NodeName, ...] = ()


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
    "pod": lambda row: (row.namespace, row.name, row.place),
    "node": lambda row: row.place,
}


def top_rows(view: LeasesView, *, sort: str, node: str = "") -> list[TopRow]:
    """Return the shares on one node or all; init containers left out."""
    rows = [
        TopRow(
            **{name: getattr(share, name) for name in ShareView.__struct_fields__},
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            node=lease.node,
        )
        for lease in view.leases
        for share in lease.shares
        if not share.init and node in {"", lease.node}
    ]
    return sorted(rows, key=SORT_KEYS[sort])


def top_view(rows: Sequence[TopRow], view: LeasesView) -> TopView:
    """Return what `-o json` prints."""
    return TopView(shares=tuple(rows), unmeasured_nodes=view.unmeasured_nodes)


def top_table(rows: Sequence[TopRow], view: LeasesView) -> RenderableType:
    """List the shares: use of the lease, in MiB and percent of the device's cores."""
    listed = new_table(
        "POD", "CONTAINER", "NODE", "GPU", "MIB", "CORES", "PROCESSES", "NOT USED FOR"
    )
    for row in rows:
        measured = row.measured
        memory, cores = used_texts(measured)
        listed.add_row(
            f"{row.namespace}/{row.name}",
            row.container,
            row.node,
            str(row.index),
            f"{memory} of {row.memory_mib}",
            f"{cores} of {cores_text(row)}",
            "-" if measured is None else str(measured.processes),
            _idle_text(row, view.read_at),
            style="yellow" if measured and measured.idle else "",
        )
    return Group(listed if rows else Text("no pod holds a lease"), *notes(view))


def _idle_text(row: TopRow, now: float) -> str:
    since = row.measured.idle_since if row.measured else None
    if since is None:
        return "-"
    return f"{age(now - since)}{' idle' if row.measured and row.measured.idle else ''}"
