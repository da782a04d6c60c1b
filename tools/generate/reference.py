"""The generated parts of docs/reference.md: all that is looked up rather than read."""

import argparse
import dataclasses
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import yaml

from services.cli.parser import EXIT_CODES, build_parser
from services.node_agent.settings import AgentSettings
from services.topology import mermaid
from shared.placing.choice.device_refusals import NODE_TEXTS
from shared.placing.pod_fields import FIELDS, Effect
from shared.placing.refusal.refusals import REMEDIES
from shared.runtime.settings import LedgerSettings, ServiceSettings
from simcluster.node_agent.agent import SimulatedAgentSettings
from tools.generate import network_policies
from tools.generate.compatibility import resources_table, words_table
from tools.generate.component_tries import table as tries_table
from tools.generate.pages import DOCS, ROOT, filled
from tools.generate.reference_metrics import BOUNDS, node_page, registered, scheduler_page
from tools.generate.security import nats_users, pod_rules, privileges, redis_users, rights

PAGE = DOCS / "reference.md"
MAIN = "__main__"
NODE_PAGE = "Port 9394 of each node"
SCHEDULER_PAGE = "`--scheduler-metrics` of the API"
SHARED = 3
"""What as many commands have in common is listed once."""
Row = tuple[str, str]
"""The name of something, and what it is or does."""


def pieces() -> dict[str, str]:
    """Return the generated parts of the page, by the name of their place."""
    return {
        "exit codes": f"```\n{EXIT_CODES.strip()}\n```",
        "commands": _commands(),
        "settings": _settings(),
        "metrics": _metrics(),
        "topology": f"```mermaid\n{mermaid()}\n```",
        "pod fields": _pod_fields(),
        "served resources": resources_table(),
        "annotations and labels": words_table(),
        "refusal codes": _refusal_codes(),
        "alerts": _alerts(),
        "pod rules": pod_rules(),
        "privileges": privileges(),
        "rights": rights(),
        "tries": tries_table(),
        "connections": network_policies.table(),
        "nats users": nats_users(),
        "redis users": redis_users(),
    }


# Commands


def _commands() -> str:
    commands = subcommands(build_parser())
    about = {
        name: str(command.description).partition("\n\n")[0] for name, command in commands.items()
    }
    rows = {name: _flags(commands[name]) for name in sorted(commands)}
    users = Counter(row for own in rows.values() for row in own)
    shared = [row for row, number in users.items() if number >= SHARED and "`-" in row[0]]
    parts = []
    for name, own in rows.items():
        parts.append(f"### leasehold {name}\n\n{about[name]}")
        alone = [row for row in own if row not in shared]
        if alone:
            parts.append(_list(alone))
    parts.append("### Flags of several commands")
    parts.append("`leasehold COMMAND --help` shows which a command has, and more about it.")
    parts.append(_list(shared))
    return "\n\n".join(parts)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands, by name."""
    return next(
        dict(action.choices) for action in actions(parser) if isinstance(action.choices, dict)
    )


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a command line takes; argparse has no public API for it."""
    return [action for action in parser._actions if action.dest != "help"]


def _flags(parser: argparse.ArgumentParser) -> list[Row]:
    rows = []
    for action in actions(parser):
        text = str(action.help or "")
        if action.choices:
            text = "; ".join(filter(None, (text, f"one of {', '.join(map(str, action.choices))}")))
        text = text.replace("%(default)s", str(action.default)).replace("%%", "%")
        rows.append((_flag(action), text))
    return rows


def _flag(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{f' {value}' if action.nargs != 0 else ''}`"


# Settings


def _settings() -> str:
    common = {item.name for item in dataclasses.fields(ServiceSettings)}
    ledger = {item.name for item in dataclasses.fields(LedgerSettings)}
    kinds = sorted(settings_kinds().items())
    with_ledger = ", ".join(name for name, kind in kinds if issubclass(kind, LedgerSettings))
    parts = [
        f"### Every service\n\n{_fields_of(ServiceSettings, ())}",
        f"### Services with a ledger\n\nOf {with_ledger}:\n\n{_fields_of(LedgerSettings, common)}",
    ]
    for name, kind in kinds:
        parts.append(f"### python -m services.{name}\n\n{_fields_of(kind, common | ledger)}")
    own = _fields_of(
        SimulatedAgentSettings, {item.name for item in dataclasses.fields(AgentSettings)}
    )
    title = "### python -m simcluster.node_agent\n\nAlso the flags of services.node_agent:"
    parts.append(f"{title}\n\n{own}")
    return "\n\n".join(parts)


def settings_kinds() -> dict[str, type[ServiceSettings]]:
    """Return the settings of each service, by its name."""
    kinds: dict[str, type[ServiceSettings]] = {}
    for path in sorted(ROOT.glob(f"services/*/{MAIN}.py")):
        for module in _modules_of(path.parent.name):
            for value in vars(module).values():
                if _is_below(value, ServiceSettings):
                    kinds[path.parent.name] = value
    return kinds


def _is_below(value: object, base: type) -> bool:
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def _modules_of(service: str) -> Iterator[ModuleType]:
    for part in ("settings", MAIN):
        if (ROOT / "services" / service / f"{part}.py").exists():
            yield importlib.import_module(f"services.{service}.{part}")


def _fields_of(kind: type[ServiceSettings], without: Iterable[str]) -> str:
    rows = [
        (
            f"`--{item.name.replace('_', '-')}`{_shown(item.default)}",
            str(item.metadata["help"]),
        )
        for item in dataclasses.fields(kind)
        if item.name not in without
    ]
    return _list(rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return " (yes)" if value else " (no)"
    if isinstance(value, tuple):
        value = ",".join(value)
    return "" if value in {None, ""} else f" (`{value}`)"


# Metrics

OURS = ("leasehold_", "hw_")
"""Names of ours, and of OpenTelemetry's conventions."""


def _metrics() -> str:
    pages = {NODE_PAGE: node_page(), SCHEDULER_PAGE: scheduler_page()}
    ours = {page: [row for row in rows if row[0].startswith(OURS)] for page, rows in pages.items()}
    parts = []
    for owner, rows in {**registered(), **ours}.items():
        shown = [
            (f"`{name}{labels}`{', histogram' if kind == 'histogram' else ''}", text)
            for name, kind, labels, text in rows
        ]
        parts.append(f"### {owner[0].upper()}{owner[1:]}")
        parts.append(_list(shown))
    for page, rows in pages.items():
        vendors = ", ".join(f"`{name}`" for name, *_ in rows if not name.startswith(OURS))
        of_shares = sum("pod" in labels for _, _, labels, _ in rows)
        parts.append(f"{page}, as HAMi and Volcano name and label them: {vendors}")
        parts.append(f"{page} has {of_shares} series for each share of a container.")
    parts.append(
        "### Numbers of series\n\n`Device_memory_desc_of_container` and `hami_node_gpu_overview` "
        "have amounts as labels: each change begins a series. If you do not use them, drop them "
        "(`metric_relabel_configs`). Other labels have at most as many values as there are:"
    )
    parts.append(
        _list(
            (", ".join(f"`{label}`" for label in labels.split()), bound)
            for bound, labels in BOUNDS.items()
        )
    )
    return "\n\n".join(parts)


# Fields of pods


def _pod_fields() -> str:
    groups: dict[tuple[Effect, str, str], list[str]] = {}
    for row in FIELDS:
        groups.setdefault((row.effect, row.reason, row.note), []).append(f"`{row.text}`")
    rows = [
        (effect, f"`{reason}`" if reason else "", _listed(effect, note, paths), note)
        for (effect, reason, note), paths in sorted(groups.items())
    ]
    return _table(("for the placer", "label", "fields", "note"), rows)


# Alerts


def _refusal_codes() -> str:
    """Return what each code says of nodes, and what an administrator can do."""
    rows = []
    for code in sorted({*NODE_TEXTS, *REMEDIES}):
        hint = REMEDIES.get(code, "")
        advice = (
            hint.format(node="NODE") if isinstance(hint, str) else "the hint names what to check"
        )
        rows.append((f"`{code}`", "; ".join(filter(None, (NODE_TEXTS.get(code), advice)))))
    return _list(rows)


def _alerts() -> str:
    """Return what each alert says, with the names of its labels, and what to do."""
    groups = yaml.safe_load((ROOT / "k8s" / "monitoring" / "rules.yaml").read_text())["groups"]
    rows = []
    for rule in (rule for group in groups for rule in group["rules"] if "alert" in rule):
        said, then = (
            re.sub(
                r"{{ \$labels\.(\w+) }}", lambda label: label[1].upper(), rule["annotations"][key]
            )
            for key in ("summary", "next")
        )
        rows.append((f"`{rule['alert']}` ({rule['labels']['severity']})", f"{said}. Next: {then}"))
    return _list(rows)


# Tables and lists


def _listed(effect: Effect, note: str, paths: Sequence[str]) -> str:
    return "all others" if effect is Effect.NO_EFFECT and not note else ", ".join(paths)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines)


def _list(rows: Iterable[Row]) -> str:
    return "\n".join(f"- {name}: {' '.join(text.split())}" for name, text in rows)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def generated() -> str:
    """Return the page with the sections of the current code."""
    return filled(PAGE, {name: f"\n{piece}\n" for name, piece in pieces().items()})
