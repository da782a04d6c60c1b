"""docs/troubleshooting.md has a row for every code, Event reason, probe and invariant there is."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.model.budget import BudgetState
from shared.model.events.node_events import ViolationReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
CAMEL = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Z][A-Za-z]*")
OPERATORS = {"DoesNotExist", "NotIn"}
EFFECTS = {"NoExecute", "NoSchedule", "PreferNoSchedule"}
POD_VALUES = {"DoNotSchedule", "RestartAllContainers", "ScheduleAnyway"}
NO_CODES = OPERATORS | EFFECTS | POD_VALUES | {"MirroredNode", "TentativeReservation", "TooMany"}
NO_REASONS = OPERATORS | {"PodScheduled", "ResourceClaim", "TokenBucket"}


def words(*patterns: str) -> Iterator[str]:
    """The words in CamelCase that stand alone in strings of these files."""
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            for node in ast.walk(ast.parse(path.read_text())):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and CAMEL.fullmatch(text):
                    yield text


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def names_of_items(text: str) -> set[str]:
    """What is written as code at the beginning of the items of lists."""
    beginnings = re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", text, re.MULTILINE)
    return {name for beginning in beginnings for name in re.findall(r"`([^`]+)`", beginning)}


def missing(wanted: Iterable[str], there: set[str]) -> set[str]:
    return set(wanted) - there


def test_every_reason_of_an_event_has_its_row() -> None:
    reasons = set(words("services/binder/**/*.py")) - NO_REASONS
    reasons |= {str(rule) for rule in ViolationReason} | {"Scheduled"}
    reasons |= {f"Budget{str(state).capitalize()}" for state in BudgetState}

    assert names_of_items(section("Events")) == reasons


def test_every_probe_has_its_row() -> None:
    sources = "".join(map(Path.read_text, sorted(ROOT.glob("services/*/*.py"))))
    probes = {"nats"}
    for block in re.findall(r"(?:probes ?= ?|def probes\(.*?return )\{(.*?)\}", sources, re.DOTALL):
        probes |= set(re.findall(r'"(\w+)": ', block))

    assert len(probes) >= 7
    assert not missing(probes, names_of_items(section("A service is not ready")))


def test_every_invariant_of_the_audit_has_its_row() -> None:
    sources = sorted((ROOT / "services" / "cli" / "audit").glob("*.py"))
    pattern = r'(?:invariant=|device_difference\()"(\w+)"'
    checked = set(re.findall(pattern, "".join(map(Path.read_text, sources))))

    assert names_of_items(section("`leasehold audit` finds a difference")) == checked
