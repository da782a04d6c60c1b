"""Formats of durations, instants and usage in the commands' output; pure."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from shared.model.leases.lease import ShareSize
from shared.model.views.budgets import IdleView
from shared.model.views.gpus import GpusView, MeasuredView
from shared.model.views.leases import LeasesView

WRAPPED_WIDTH = 30


class FittedTable:
    """A table without as many of its least valuable columns as the width requires.

    No cell is shortened; texts in the column `wrapped` continue on the next line.
    """

    def __init__(
        self,
        *titles: str,
        least: Sequence[str] = (),
        wrapped: str = "",
        wide: bool = False,
        of_wide: Sequence[str] = (),
        headers: bool = True,
    ) -> None:
        self.titles = titles
        self.headers = headers
        self.wrapped = wrapped
        self.least, self.hidden = ((), ()) if wide else (least, of_wide)
        self.rows: list[tuple[tuple[str | Text, ...], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {
            title: self._width(number)
            for number, title in enumerate(self.titles)
            if title not in self.hidden
        }
        for title in self.least:
            if _sum(widths) > options.max_width:
                del widths[title]
        made = Table(box=None, pad_edge=False, header_style="bold", show_header=self.headers)
        for title, width in widths.items():
            made.add_column(title, no_wrap=title != self.wrapped, min_width=width)
        for cells, style in self.rows:
            shown = zip(self.titles, cells, strict=True)
            made.add_row(*(cell for title, cell in shown if title in widths), style=style)
        yield from console.render(made, options.update(width=max(options.max_width, _sum(widths))))

    def _width(self, number: int) -> int:
        if self.titles[number] == self.wrapped:
            return WRAPPED_WIDTH
        cells = [str(cells[number]) for cells, _ in self.rows]
        title = [self.titles[number]] if self.headers else []
        return max(map(cell_len, [*title, *cells]), default=0)


def _sum(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def age(seconds: float) -> str:
    """Format a duration as kubectl does.

    >>> age(45), age(400), age(90_000)
    ('45s', '6m', '25h')
    """
    whole = max(int(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def size_text(size: ShareSize) -> str:
    """0 percent of the cores are no limit."""
    cores = size.cores_percent
    return (
        f"{size.memory_mib} MiB{f' and {cores} % of the cores' if cores else ', cores not limited'}"
    )


def used_texts(measured: MeasuredView | None) -> tuple[str, str]:
    """MiB, and percent of the cores."""
    memory, cores = (measured.memory_mib, measured.cores_percent) if measured else (None, None)
    return "-" if memory is None else str(memory), "-" if cores is None else f"{cores}%"


def measured_text(measured: MeasuredView, now: float) -> str:
    memory, cores = used_texts(measured)
    since = measured.idle_since
    state = "idle" if measured.idle else "not used"
    unused = "" if since is None else f", {state} for {age(now - since)}"
    return f"{memory} MiB and {cores} of its cores, processes: {measured.processes}{unused}"


def notes(view: GpusView | LeasesView | IdleView) -> list[Text]:
    silent = ", ".join(view.unmeasured_nodes)
    no_reply = f"no reply from the agents of: {silent}; their usage is not shown"
    lines = (*view.problems, no_reply) if silent else view.problems
    return [Text(line, style="yellow") for line in lines]
