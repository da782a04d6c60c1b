"""The commands of MPS in version 3 of its protocol: their forms, and how lists look; pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

NONE = "-"
"""What is not set."""
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_LIMITS = ("pinned-memory-limit", "active-thread-percentage", "client-priority")
_FORMATS = frozenset({"table", "csv"})
NAMESPACE_FIELDS = ("name", "server", "server-status", *_LIMITS, "pipe-directory")
SERVER_FIELDS = (
    *("name", "uid", "pid", "status", "pipe-directory", "allowed-devices"),
    "context-ids",
)
CLIENT_COLUMNS = ("pid", "server", "device", "maws-ns", "cmd")


class CommandError(Exception):
    """Why a command fails, in one line."""


@dataclass(frozen=True)
class Form:
    """How many names a command takes, and which options; flags have no value."""

    least: int
    most: int
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    needs_option: bool = False


FORMS = {
    ("server", "create"): Form(0, 1, ("uid", "allowed-devices", "locality-domains")),
    ("server", "delete"): Form(1, 1, flags=("force",)),
    ("server", "list"): Form(0, 1, ("format",)),
    ("server", "set"): Form(1, 1, ("uid", "locality-domains", *_LIMITS), needs_option=True),
    ("server", "get"): Form(2, 2),
    ("namespace", "create"): Form(1, 1, ("server",)),
    ("namespace", "delete"): Form(1, 1, ("server",), ("force",)),
    ("namespace", "list"): Form(0, 1, ("server", "format")),
    ("namespace", "set"): Form(1, 1, ("server", *_LIMITS)),
    ("namespace", "get"): Form(3, 3),
    ("client", "list"): Form(0, 0, ("server", "format"), ("all",)),
    ("client", "get"): Form(2, 2),
    ("client", "terminate"): Form(1, 1),
}


@dataclass(frozen=True)
class Command:
    """A command that has its form."""

    module: str
    verb: str
    names: tuple[str, ...]
    options: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"{self.module} {self.verb}".upper()

    @property
    def name(self) -> str | None:
        """The first name, if there is one."""
        return self.names[0] if self.names else None

    def has(self, flag: str) -> bool:
        return flag in self.options

    def limits(self) -> dict[str, str]:
        """Return the limits that it sets."""
        return {limit: self.options[limit] for limit in _LIMITS if limit in self.options}


def parse(words: Sequence[str]) -> Command:
    """Read a command. Raises CommandError if it has no known form."""
    module, verb = (*words, "", "")[:2]
    form = FORMS.get((module, verb))
    if form is None:
        raise CommandError(f"unknown command '{module} {verb}'")
    names: list[str] = []
    options: dict[str, str] = {}
    for word in words[2:]:
        key, is_option, text = word.removeprefix("--").partition("=")
        if not is_option and not word.startswith("--"):
            names.append(word)
        elif key in (form.options if is_option else form.flags):
            options[key] = text
        else:
            raise CommandError(f"{module} {verb}: unknown option '{word}'")
    if not form.least <= len(names) <= form.most:
        raise CommandError(f"{module} {verb}: {len(names)} names given")
    command = Command(module, verb, tuple(names), options)
    _check(command, form)
    return command


def _check(command: Command, form: Form) -> None:
    if form.needs_option and not command.options:
        raise CommandError(f"{command.module} {command.verb}: at least one option is required")
    if command.module == "namespace" and command.verb in {"create", "delete", "set"}:
        if "server" not in command.options:
            raise CommandError(f"namespace {command.verb}: --server is required")
        if command.verb == "set" and not command.limits():
            raise CommandError("namespace set: at least one option is required")
    if command.verb == "create" and command.name is not None and not _NAME.fullmatch(command.name):
        raise CommandError(f"invalid name '{command.name}': use up to 64 of [a-z0-9_]")
    for key, text in command.options.items():
        if not _VALID.get(key, bool)(text) and key not in form.flags:
            raise CommandError(f"invalid value '{text}' for --{key}")


def _is_percentage(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 100


_VALID: Mapping[str, Callable[[str], object]] = {
    "uid": str.isdecimal,
    "locality-domains": {"true", "false"}.__contains__,
    "pinned-memory-limit": re.compile(r"[1-9]\d*[KMG]").fullmatch,
    "active-thread-percentage": _is_percentage,
    "client-priority": {"0", "1"}.__contains__,
    "format": lambda text: text.removesuffix(",noheader") in _FORMATS,
}


def table(columns: Sequence[str], rows: Sequence[Mapping[str, str]], form: str) -> str:
    """Return a list as `--format` names it; in csv nothing is quoted."""
    shape, _, no_header = form.partition(",")
    lines = [[row[column] for column in columns] for row in rows]
    if not no_header:
        lines.insert(0, [column.upper() for column in columns])
    if shape == "csv":
        return "".join(f"{','.join(line)}\n" for line in lines)
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    return "".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines)


def field_value(row: Mapping[str, str], name: str) -> str:
    """Return one field of a row. Raises CommandError if it has none of this name."""
    if name not in row:
        raise CommandError(f"unknown field '{name}'")
    return f"{row[name]}\n"
