"""The generated parts of docs/reference.md: commands, settings, metrics and events."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from services.cli.parser import EXIT_CODES, build_parser
from services.topology import OPERATOR, OPERATOR_ROLES, published, roles
from shared.model import events
from shared.model.events.event import Event
from shared.model.events.pod_events import Heartbeat
from shared.runtime.service import Role
from shared.runtime.settings import PREFIX, ServiceSettings
from simcluster import __main__ as simcluster
from tools.generate.pages import DOCS, ROOT, filled
from tools.generate.reference_metrics import node_page, registered

PAGE = DOCS / "reference.md"
MAIN = "__main__"
EVENT_MODULES = tuple(
    importlib.import_module(f"{events.__name__}.{module.name}")
    for module in pkgutil.iter_modules(events.__path__)
)


def pieces() -> dict[str, str]:
    """Return the generated parts of the page, by the name of their place."""
    return {
        "exit codes": f"```\n{EXIT_CODES.strip()}\n```",
        "commands": _commands(),
        "settings": _settings(),
        "metrics": _metrics(),
        "events": _events(),
        "fields": _fields(),
    }


# Commands


def _commands() -> str:
    subcommands = next(
        action.choices for action in _actions(build_parser()) if isinstance(action.choices, dict)
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
        text = str(action.help or "")
        if action.choices:
            text = f"{text} one of {', '.join(map(str, action.choices))}".strip()
        text = text.replace("%(default)s", str(action.default)).replace("%%", "%")
        rows.append((_flag(action), text))
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
    """Return the settings of each service, by its name."""
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
        route = _route_of(kind)
        publishers, consumers = ", ".join(route.publishers), ", ".join(route.consumers)
        rows.append((f"`{kind.subject}`", route.delivery, publishers, consumers, about))
    return _table(("subject", "as", "published by", "consumed by", "what"), rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How an event is delivered, and between which services."""

    delivery: str
    publishers: Sequence[str]
    consumers: Sequence[str]


def _route_of(kind: type[Event]) -> Route:
    by_name = roles()
    request = _request_of(kind)
    if request is not None:
        return Route(
            delivery="reply",
            publishers=[f"the service that replies to `{request.__name__}`"],
            consumers=["the requester"],
        )
    every = by_name | {OPERATOR.name: OPERATOR_ROLES}
    publishers = [name for name, each in every.items() if kind in published(each)]
    consumers = [name for name, each in by_name.items() if _consumes(each, kind)]
    is_request = any(_replies_to(each, kind) for each in by_name.values())
    return Route(
        delivery="request" if is_request else str(kind.delivery),
        publishers=["every service"] if kind is Heartbeat else sorted(publishers),
        consumers=sorted(consumers) or ["any observer"],
    )


def _request_of(reply: type[Event]) -> type[Event] | None:
    """Return the request that an event replies to; None: it is no reply."""
    replying = (
        role
        for service_roles in roles().values()
        for role in service_roles
        if role.kind == "answers" and reply in role.publishes
    )
    return next((role.consumes[0] for role in replying), None)


def _consumes(service_roles: Iterable[Role], kind: type[Event]) -> bool:
    return any(kind in role.consumes for role in service_roles)


def _replies_to(service_roles: Iterable[Role], kind: type[Event]) -> bool:
    return _consumes([role for role in service_roles if role.kind == "answers"], kind)


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
    """Return the page with the sections of the current code."""
    return filled(PAGE, {name: f"\n{piece}\n" for name, piece in pieces().items()})
