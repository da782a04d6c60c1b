"""The pages have a row for every Event reason, probe and invariant there is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shared.model.budget import BudgetState
from shared.model.events.node_events import ViolationReason

ROOT = Path(__file__).parents[2]
CAMEL = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Z][A-Za-z]*")
NO_REASONS = {"DoesNotExist", "NotIn", "PodScheduled", "ResourceClaim", "TokenBucket"}


def words(pattern: str) -> Iterator[str]:
    """The words in CamelCase that stand alone in strings of these files."""
    for path in ROOT.glob(pattern):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and CAMEL.fullmatch(text):
                yield text


def rows(page: str, title: str) -> set[str]:
    """What is written as code at the beginning of the items of a section's lists."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    beginnings = re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", text, re.MULTILINE)
    return {name for beginning in beginnings for name in re.findall(r"`([^`]+)`", beginning)}


def sources(pattern: str) -> str:
    return "".join(map(Path.read_text, sorted(ROOT.glob(pattern))))


def test_every_reason_of_an_event_has_its_row() -> None:
    reasons = set(words("services/binder/**/*.py")) - NO_REASONS
    reasons |= {str(rule) for rule in ViolationReason} | {"Scheduled"}
    reasons |= {f"Budget{str(state).capitalize()}" for state in BudgetState}

    assert rows("reference.md", "Events of objects") == reasons


def test_every_probe_has_its_row() -> None:
    declared = re.findall(
        r"(?:probes ?= ?|def probes\(.*?return )\{(.*?)\}", sources("services/*/*.py"), re.DOTALL
    )
    probes = {name for block in declared for name in re.findall(r'"(\w+)": ', block)}

    assert len(probes) >= 6
    assert {"nats", *probes} <= rows("troubleshooting.md", "A service is not ready")


def test_every_invariant_of_the_audit_has_its_row() -> None:
    pattern = r'(?:invariant=|device_difference\()"(\w+)"'
    checked = set(re.findall(pattern, sources("services/cli/audit/*.py")))

    assert rows("troubleshooting.md", "`leasehold audit` finds a difference") == checked
