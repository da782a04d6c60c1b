"""Pictures in the documentation are drawn from the code.

Draw them anew with `python -m tests.contract.test_pictures`.
"""

import re
from pathlib import Path

from services.topology import mermaid
from shared.model.lease import TRANSITIONS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def lease_life() -> str:
    lines = [f"  {state} --> {to}" for state, after in TRANSITIONS.items() for to in sorted(after)]
    return "\n".join(["```mermaid", "stateDiagram-v2", "  [*] --> reserved", *lines, "```"])


def drawn() -> str:
    page = PAGE.read_text()
    for name, picture in (
        ("topology", f"```mermaid\n{mermaid()}\n```"),
        ("lease-life", lease_life()),
    ):
        page = re.sub(
            rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)",
            lambda found, picture=picture: f"{found[1]}{picture}\n{found[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def test_the_pictures_show_the_code_of_today() -> None:
    assert drawn() == PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(drawn())
