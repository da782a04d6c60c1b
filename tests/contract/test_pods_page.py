"""What docs/pods.md tells authors of pods to write is admitted, and has a row for each dialect."""

import re
from pathlib import Path

import pytest

from services.webhook.admission import AdmissionPolicy, decide
from shared.dialects import DIALECTS
from tests.support.webhook.reviews import reviewed

PAGE = (Path(__file__).parents[2] / "docs" / "pods.md").read_text()
TABLE = PAGE.partition("<!-- limits -->")[2].partition("<!-- end -->")[0]
ROWS = re.findall(r"^\| (.+?) \| (`.+?`) \| .+ \|$", TABLE, re.MULTILINE)


def limits_of(cell: str) -> dict[str, str]:
    written = re.findall(r"`([^`]+): ([^`]+)`", cell)
    return dict(written)


@pytest.mark.parametrize(("wanted", "cell"), ROWS)
def test_limits_of_the_page_are_admitted_as_a_request_for_gpus(wanted: str, cell: str) -> None:
    container = {"name": "main", "image": "x", "resources": {"limits": limits_of(cell)}}
    pod = {"metadata": {"name": "pod"}, "spec": {"containers": [container]}}

    decision = decide(reviewed(pod, "default"), AdmissionPolicy())

    assert decision.allowed, (wanted, decision.message)
    assert decision.requests_gpu, wanted


def test_every_dialect_has_a_row() -> None:
    written = {name for _, cell in ROWS for name in limits_of(cell)}

    assert [name for name, it in DIALECTS.items() if not it.resources & written] == []
