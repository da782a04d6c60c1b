"""`docs/limits.md`: what holds shares of GPUs, from the table of enforcers."""

from services.node_agent.enforcers.enforcer import Facts
from services.node_agent.enforcers.table import ALL_FACTS
from shared.model.devices.enforcers import COMPUTE_BY_DEFAULT, MEMORY_BY_DEFAULT
from tools.generate.pages import DOCS, filled

PAGE = DOCS / "limits.md"
_ROWS = (
    ("memory", "memory"),
    ("cores", "compute"),
    ("not held", "not_held"),
    ("it needs", "needs"),
    ("size of a running container", "resize"),
    ("how it is seen", "shown"),
)


def generated() -> str:
    """Return the content of the page."""
    return filled(PAGE, {"enforcers": "\n\n".join(map(_section, ALL_FACTS))})


def _section(facts: Facts) -> str:
    rows = "\n".join(
        f"| {title} | {getattr(facts, field) or 'not held'} |" for title, field in _ROWS
    )
    return f"## {facts.name}\n\n{_chosen(facts)}\n\n| | |\n|---|---|\n{rows}"


def _chosen(facts: Facts) -> str:
    if not facts.parts:
        return "One pod has the device or the instance: it is not divided."
    by_default = [
        what
        for what, names in (("memory", MEMORY_BY_DEFAULT), ("cores", COMPUTE_BY_DEFAULT))
        if facts.name in names
    ]
    if not by_default:
        return "Used for pods that demand it."
    return f"Used by default for {' and '.join(by_default)}, where a GPU offers it."
