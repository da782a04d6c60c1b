"""Write the tables of measured figures on pages from the JSON in docs/measured.

    python -m tests.benchmarks.measured                          # write the pages
    python -m tests.benchmarks.measured scenarios results.json   # after a run, its figures first
    python -m tests.benchmarks.measured h200 dist/gpu-results/results.json

A contract test compares the pages with the files.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hardware import results
from tools.generate.pages import DOCS, filled

MEASURED = DOCS / "measured"
PAGES = {
    DOCS / "performance.md": ("pace", "scenarios", "full-cluster", "scale"),
    DOCS / "hardware.md": ("h200",),
    DOCS / "compute-time.md": ("compute-time",),
}
"""The files of each page, without `.json`."""
Columns = Mapping[str, Mapping[str, str]]
"""By column and row, a cell: what `scenarios --results` writes."""


def columns_table(columns: Columns, rows: str = "") -> str:
    """Return a table with a column for each result; `rows` is the title of the first column.

    >>> print(columns_table({"ours": {"p50": "3 ms"}, "theirs": {"p99": "9 ms"}}))
    | | ours | theirs |
    |---|---|---|
    | p50 | 3 ms |  |
    | p99 |  | 9 ms |
    """
    titles = dict.fromkeys(title for column in columns.values() for title in column)
    head = f"| {rows} | " if rows else "| | "
    lines = [head + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for title in titles:
        cells = " | ".join(column.get(title, "") for column in columns.values())
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines)


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text())
    return content


def table(name: str) -> str:
    """Return the table of a file."""
    content = load(name)
    if "about" in content:
        rows = [results.Row(**row) for row in content["rows"]]
        return results.table(content["about"], rows).rstrip()
    return columns_table(content["results"], content["rows"])


def pages() -> dict[Path, str]:
    """Return the pages with the tables of all files."""
    return {
        page: filled(page, {f"measured-{name}": f"\n{table(name)}\n" for name in names})
        for page, names in PAGES.items()
    }


def take_over(name: str, run: Path) -> None:
    """Put the figures of a run into a file: of `scenarios`, those of the columns that it has."""
    content = load(name)
    measured = json.loads(run.read_text())
    if "about" in content:
        content |= measured
    else:
        content["results"] |= measured
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (MEASURED / f"{name}.json").write_text(f"{text}\n")


def main() -> None:
    if len(sys.argv) == 3:
        take_over(sys.argv[1], Path(sys.argv[2]))
    elif len(sys.argv) != 1:
        sys.exit(__doc__)
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
