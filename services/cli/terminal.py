"""Output of the commands: JSON, YAML, or coloured text in the width of the terminal."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shared.model.bounds import printable_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
NAME = "leasehold"
PLUGIN = "kubectl-leasehold"
"""kubectl runs a program of this name as `kubectl leasehold`."""


def program_name() -> str:
    return "kubectl leasehold" if Path(sys.argv[0]).name == PLUGIN else NAME


def program() -> str:
    """Return the typed path if PATH has another program of this name or none."""
    typed = Path(sys.argv[0])
    if typed.name != NAME:
        return program_name()
    path = shutil.which(NAME)
    if path is not None and typed.exists() and Path(path).samefile(typed):
        return NAME
    return shlex.quote(str(typed))


DEFAULT_WIDTH = 120
UNBROKEN_WIDTH = 4_000


API_VERSION = "cli.leasehold.dev/v1"
"""No API server has these documents."""
CUSTOM_COLUMNS = "custom-columns="
INTERVAL_S = 2.0
"""Interval of the output of commands with --watch."""
CHANGING = frozenset({"measured", "read_at", "dominant_share", "weighted_share", "text", "trace"})
"""Keys of documents that change all the time."""


def present(
    flags: Any,
    read: Callable[[], S],
    text: Callable[[S], "RenderableType"],
    names: Callable[[S], Iterable[str]] = lambda _: (),
) -> int:
    """With --watch, show it again whenever it changes, until it is interrupted."""
    watch = getattr(flags, "watch", False)
    before = None
    while True:
        view = read()
        lasting = _lasting(msgspec.to_builtins(view)) if watch else None
        if before is None or lasting != before:
            if before is not None:
                print()
            show(flags.output, view, text, names)
            sys.stdout.flush()
        if not watch:
            return 0
        before = lasting
        time.sleep(INTERVAL_S)


def _lasting(document: Any) -> Any:
    if isinstance(document, dict):
        return {key: _lasting(value) for key, value in document.items() if key not in CHANGING}
    if isinstance(document, list | tuple):
        return [_lasting(value) for value in document]
    return document


def show(
    output: str,
    view: T,
    text: Callable[[T], "RenderableType"],
    names: Callable[[T], Iterable[str]] = lambda _: (),
    kind: str = "",
) -> None:
    if output in {"json", "yaml"}:
        print_document(view, output, kind)
    elif output == "name":
        print(printable_lines("".join(f"{name}\n" for name in dict.fromkeys(names(view)))), end="")
    else:
        print_text(text(view))


def print_document(document: Any, output: str, kind: str = "") -> None:
    """Texts that could change how a terminal shows the rest are escaped, as the form allows."""
    typed = {
        "apiVersion": API_VERSION,
        "kind": kind or type(document).__name__.removesuffix("View"),
        **msgspec.to_builtins(document),
    }
    text = msgspec.json.format(msgspec.json.encode(typed), indent=1).decode()
    plain = msgspec.json.decode(text)
    is_printable = printable_lines(text) == text
    if output == "yaml":
        import yaml

        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=is_printable).rstrip()
    elif not is_printable:
        text = json.dumps(plain, indent=1)
    print(text)


class Printable:
    """Content without texts that could change how a terminal shows the rest."""

    def __init__(self, content: "RenderableType") -> None:
        self.content = content

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Segment]":
        for segment in console.render(self.content, options):
            yield segment._replace(text=printable_lines(segment.text))


def console_of(width: int | None = None) -> "Console":
    """Values of pods are no markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_text(content: "RenderableType") -> None:
    console = console_of(None if sys.stdout.isatty() else UNBROKEN_WIDTH)
    console.print(Printable(content), end="", crop=False)


def terminal_width() -> int:
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
