"""Formats of durations, instants and usage in the commands' output; pure."""

from datetime import UTC, datetime

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from shared.model.views import GpusView, LeasesView, MeasuredView


def new_table(*titles: str) -> Table:
    """Return a table whose lines are never broken."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        made.add_column(title, no_wrap=True)
    return made


def keep_widths(table: Table, *shortened: str) -> None:
    """On a narrow terminal, shorten only the columns with these titles."""
    for column in table.columns:
        if column.header not in shortened:
            column.min_width = max(map(cell_len, map(str, (column.header, *column.cells))))


def age(seconds: float) -> str:
    """Format a duration as kubectl does: 12s, 5m, 3h, 2d."""
    whole = max(int(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def timestamp(at_s: float) -> str:
    """Format Unix seconds as Kubernetes does, to the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def used_texts(measured: MeasuredView | None) -> tuple[str, str]:
    """Format the memory in MiB and the percent of the cores in use; `-` if it is not known."""
    memory, cores = (measured.memory_mib, measured.cores_percent) if measured else (None, None)
    return "-" if memory is None else str(memory), "-" if cores is None else f"{cores}%"


def measured_text(measured: MeasuredView, now: float) -> str:
    """Describe the usage of a share."""
    memory, cores = used_texts(measured)
    idle = "" if measured.idle_since is None else f", idle for {age(now - measured.idle_since)}"
    return f"uses {memory} MiB and {cores} of the cores; processes: {measured.processes}{idle}"


def notes(view: GpusView | LeasesView) -> list[Text]:
    """Return what is missing, if anything."""
    silent = ", ".join(view.unmeasured_nodes)
    no_reply = f"no reply from the agents of: {silent}; their usage is not shown"
    lines = (*view.problems, no_reply) if silent else view.problems
    return [Text(line, style="yellow") for line in lines]
