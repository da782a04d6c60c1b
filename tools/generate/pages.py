"""Generated sections of Markdown pages, and those of docs/architecture.md.

A section begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from services.node_agent.gpus.device_faults import XID_GUIDES
from shared.model.leases.lease import TRANSITIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def section(page: Path, name: str) -> str:
    """Return the generated section `name` as the page has it."""
    return page.read_text().partition(f"<!-- generated: {name} -->\n")[2].partition("<!-- end")[0]


def filled(page: Path, sections: Mapping[str, str]) -> str:
    """Return the text of the page with its generated sections replaced."""
    text = page.read_text()
    for name, content in sections.items():
        place = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        if not re.search(place, text, flags=re.DOTALL):
            raise ValueError(f"{page} has no section {name}")
        text = re.sub(
            place,
            lambda match, content=content: f"{match[1]}{content}\n{match[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
    return text


ARCHITECTURE = DOCS / "architecture.md"


def lease_life() -> str:
    """Return the life cycle of a lease as a Mermaid state diagram."""
    lines = [f"  {state} --> {to}" for state, after in TRANSITIONS.items() for to in sorted(after)]
    return "\n".join(["```mermaid", "stateDiagram-v2", "  [*] --> reserved", *lines, "```"])


TROUBLESHOOTING = DOCS / "troubleshooting.md"


def xids() -> str:
    """Return a table of Xids, with what to do."""
    rows = [
        f"| {number} | {guide.meaning} | {guide.remedy} |"
        for number, guide in sorted(XID_GUIDES.items())
    ]
    return "\n".join(["\n| Xid | meaning | what to do |", "|---|---|---|", *rows, ""])


def troubleshooting() -> str:
    """Return the page with the table of Xids."""
    return filled(TROUBLESHOOTING, {"xids": xids()})


def architecture() -> str:
    """Return the page with the diagram of the life cycle of a lease."""
    return filled(ARCHITECTURE, {"lease-life": lease_life()})
