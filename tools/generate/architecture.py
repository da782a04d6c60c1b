"""The diagrams of docs/architecture.md: events between services, and the life cycle of a lease."""

from services.topology import mermaid
from shared.model.lease import TRANSITIONS
from tools.generate.pages import DOCS, filled

PAGE = DOCS / "architecture.md"


def lease_life() -> str:
    """Return the life cycle of a lease as a Mermaid state diagram."""
    lines = [f"  {state} --> {to}" for state, after in TRANSITIONS.items() for to in sorted(after)]
    return "\n".join(["```mermaid", "stateDiagram-v2", "  [*] --> reserved", *lines, "```"])


def generated() -> str:
    """Return the page with its diagrams as the code says."""
    return filled(PAGE, {"topology": f"```mermaid\n{mermaid()}\n```", "lease-life": lease_life()})
