"""What docs/reference.md says of commands, settings and events, read from the code."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from services.cli import commands
from services.topology import OPERATOR, SERVICES, roles
from shared.model.events import node_events, pod_events, request_reply
from shared.model.events.event import Event
from shared.model.events.pod_events import Heartbeat
from shared.runtime.settings import PREFIX, ServiceSettings
from simcluster import __main__ as simcluster
from tools.generate.pages import DOCS, ROOT, filled
from tools.generate.reference_metrics import node_page, registered

PAGE = DOCS / "reference.md"
MAIN = "__main__"
EVENT_MODULES = (pod_events, node_events, request_reply)


def pieces() -> dict[str, str]:
    """Return the generated parts of the page, by the name of their place."""
    return {
        "exit codes": f"```\n{commands.EXIT_CODES.strip()}\n```",
        "commands": _commands(),
        "settings": _settings(),
        "metrics": _metrics(),
        "events": _events(),
        "fields": _fields(),
    }


# Commands


def _commands() -> str:
    subcommands = next(
        action.choices for action in _actions(commands.parser()) if isinstance(action.choices, dict)
    )
    about = {name: str(found.description) for name, found in subcommands.items()}
    parts = [
        f"### leasehold {name}\n\n{about[name]}\n\n{_flags(subcommands[name])}"
        for name in sorted(subcommands)
    ]
    return "\n\n".join(parts)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a command line takes; argparse has no public API for it."""
    return [action for action in parser._actions if action.dest != "help"]


def _flags(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in _actions(parser):
        said = str(action.help or "")
        if action.choices:
            said = f"{said} one of {', '.join(map(str, action.choices))}".strip()
        said = said.replace("%(default)s", str(action.default)).replace("%%", "%")
        rows.append((_flag(action), said))
    return _table(("argument", "what"), rows)


def _flag(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{f' {value}' if action.nargs != 0 else ''}`"


# Settings


def _settings() -> str:
    parts = [f"### Every service\n\n{_fields_of(ServiceSettings, ())}"]
    known = {item.name for item in dataclasses.fields(ServiceSettings)}
    for name, kind in sorted(_kinds().items()):
        parts.append(f"### python -m services.{name}\n\n{_fields_of(kind, known)}")
    parts.append(
        "### python -m simcluster\n\nThe simulated cluster takes flags only.\n\n"
        + _flags(simcluster.parser())
    )
    return "\n\n".join(parts)


def _kinds() -> dict[str, type[ServiceSettings]]:
    """Return each service's settings, found where it builds itself."""
    found: dict[str, type[ServiceSettings]] = {}
    for path in sorted(ROOT.glob(f"services/*/{MAIN}.py")):
        for module in _modules_of(path.parent.name):
            for value in vars(module).values():
                if _is_below(value, ServiceSettings):
                    found[path.parent.name] = value
    return found


def _is_below(value: object, base: type) -> bool:
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def _modules_of(service: str) -> Iterator[ModuleType]:
    for part in ("settings", MAIN):
        if (ROOT / "services" / service / f"{part}.py").exists():
            yield importlib.import_module(f"services.{service}.{part}")


def _fields_of(kind: type[ServiceSettings], without: Iterable[str]) -> str:
    rows = [
        (
            f"`--{item.name.replace('_', '-')}`",
            f"`{PREFIX}{item.name.upper()}`",
            _shown(item.default),
            str(item.metadata["help"]),
        )
        for item in dataclasses.fields(kind)
        if item.name not in without
    ]
    return _table(("flag", "variable", "default", "what"), rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        value = ",".join(value)
    return "" if value in {None, ""} else f"`{value}`"


# Metrics


def _metrics() -> str:
    head = ("name", "type", "labels", "what")
    parts = []
    for owner, rows in registered().items():
        shown = [(f"`{name}`", *rest) for name, *rest in rows]
        parts.append(f"### {owner.capitalize()}\n\n{_table(head, shown)}")
    shown = [(f"`{name}`", *rest) for name, *rest in node_page()]
    parts.append(f"### Port 9394 of each node\n\n{_table(head, shown)}")
    return "\n\n".join(parts)


# Events


def _kinds_of_events() -> list[type[Event]]:
    here = [value for module in EVENT_MODULES for value in vars(module).values()]
    kinds = {value for value in here if _is_below(value, Event)}
    return sorted(kinds, key=lambda kind: kind.subject)


def _events() -> str:
    rows = []
    for kind in _kinds_of_events():
        about = str(inspect.getdoc(kind)).partition("\n")[0]
        manner, says, hears = _way_of(kind)
        rows.append((f"`{kind.subject}`", manner, ", ".join(says), ", ".join(hears), about))
    return _table(("subject", "as", "said by", "heard by", "what"), rows)


def _way_of(kind: type[Event]) -> tuple[str, list[str], list[str]]:
    """Return how an event travels, and its speakers and hearers."""
    held = [(name, role) for name, all_roles in roles().items() for role in all_roles]
    answering = [role for _, role in held if role.kind == "answers" and kind in role.publishes]
    if answering:
        asked = answering[0].consumes[0].__name__
        return "answer", [f"whoever answers `{asked}`"], ["whoever asked"]
    says = {name for name, role in held if kind in role.publishes}
    says |= {listed.name for listed in (*SERVICES, OPERATOR) if kind in listed.also_publishes}
    if kind is Heartbeat:
        says = {"every service"}
    hears = {name for name, role in held if kind in role.consumes}
    is_question = any(role.kind == "answers" and kind in role.consumes for _, role in held)
    manner = "question" if is_question else str(kind.delivery)
    return manner, sorted(says), sorted(hears) or ["whoever listens"]


def _fields() -> str:
    rows = []
    trees = [ast.parse(inspect.getsource(module)) for module in EVENT_MODULES]
    nodes = [node for tree in trees for node in tree.body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    for kind in _kinds_of_events():
        names = [_field(item) for item in classes[kind.__name__].body if _is_field(item)]
        rows.append((f"`{kind.subject}`", ", ".join(names)))
    return _table(("subject", "fields"), rows)


def _is_field(item: ast.stmt) -> bool:
    return isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)


def _field(item: ast.stmt) -> str:
    assert isinstance(item, ast.AnnAssign)
    optional = "" if item.value is None else "?"
    return f"`{ast.unparse(item.target)}{optional}: {ast.unparse(item.annotation)}`"


# Tables


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def generated() -> str:
    """Return the page with its sections as the code says."""
    return filled(PAGE, {name: f"\n{piece}\n" for name, piece in pieces().items()})
