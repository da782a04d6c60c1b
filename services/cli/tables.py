"""Tables of the commands' output; pure."""

from rich.table import Table


def new_table(*titles: str) -> Table:
    """Return a table whose lines are never broken."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        made.add_column(title, no_wrap=True)
    return made
