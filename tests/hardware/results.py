"""What the tests have seen: rows of a table, kept one by one so that none is lost."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure beside its target."""

    part: str
    shows: str
    figure: str
    target: str = ""
    holds: bool | None = True
    """None: not run, or a figure without a target."""


def append(file: Path, row: Row) -> None:
    """Write a row at once: what follows may hang."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(row)) + "\n")


def read(file: Path) -> list[Row]:
    """Return the rows that were written so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def table(about: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the rows as a section of docs/hardware.md."""
    words = {True: "yes", False: "**no**", None: ""}
    cells = ((row.part, row.shows, row.figure, row.target, words[row.holds]) for row in rows)
    lines = ["| part | shows | seen | target | holds |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(map(_cell, each)) + " |" for each in cells]
    return "\n".join([", ".join(about) + ":", "", *lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
