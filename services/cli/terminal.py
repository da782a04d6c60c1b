"""Output of the commands: JSON, YAML, or coloured text in the width of the terminal."""

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_WIDTH = 120
UNBROKEN_WIDTH = 4_000
"""Columns where the output is not a terminal: lines are never broken there."""


def print_document(document: Any, output: str) -> None:
    """Print a document of plain values as `json` or `yaml`."""
    text = json.dumps(document, indent=1)
    if output == "yaml":
        import yaml

        text = yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True).rstrip()
    print(text)


def print_text(content: "RenderableType") -> None:
    """Print in colour and in its width to a terminal; otherwise plain, with unbroken lines."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else UNBROKEN_WIDTH
    Console(highlight=False, width=width).print(content)


def terminal_width() -> int:
    """Return the columns to draw in."""
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
