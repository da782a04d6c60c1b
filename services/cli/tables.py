"""Tables of the commands' output; pure."""

from rich.cells import cell_len
from rich.table import Table


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
