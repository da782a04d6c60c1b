"""docs/reference.md is drawn from commands, settings, metrics and events.

Draw it anew with `python -m tests.contract.test_reference`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tools.generate.reference import pieces

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"


def drawn() -> str:
    page = PAGE.read_text()
    for name, piece in pieces().items():
        place = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        assert re.search(place, page, flags=re.DOTALL), f"the page has no place for {name}"
        page = re.sub(
            place,
            lambda found, piece=piece: f"{found[1]}\n{piece}\n\n{found[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def test_the_reference_is_that_of_the_code() -> None:
    assert drawn() == PAGE.read_text(), "python -m tests.contract.test_reference"


def test_the_reference_is_the_same_whatever_the_environment_says() -> None:
    told = {"LEASEHOLD_STATE": "/elsewhere", "LEASEHOLD_NATS_URL": "nats://other:1", "COLUMNS": "9"}
    code = "import json; from tools.generate.reference import pieces; print(json.dumps(pieces()))"
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert json.loads(said) == pieces()


if __name__ == "__main__":
    PAGE.write_text(drawn())
