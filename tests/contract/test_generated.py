"""Generated files are those of the code: pages, diagrams, manifests, dashboards, types."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tools.generate import openapi
from tools.generate.__main__ import generated
from tools.generate.pages import ROOT

FILES = cache(generated)


@pytest.mark.parametrize("path", FILES(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_generated_file_is_that_of_the_code(path: Path) -> None:
    assert path.read_text() == FILES()[path], "python -m tools.generate"


def test_the_schema_of_the_api_is_complete() -> None:
    named = set(re.findall(r'"#/components/schemas/(\w+)"', openapi.generated()))

    assert named <= json.loads(openapi.generated())["components"]["schemas"].keys()
