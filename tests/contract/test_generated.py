"""Generated files are those of the code: pages, diagrams, manifests, dashboards, types."""

import json
import re

from tools.generate import openapi
from tools.generate.__main__ import generated
from tools.generate.pages import ROOT


def test_generated_files_are_those_of_the_code() -> None:
    files = generated()
    differing = [
        str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text() != text
    ]

    assert len(files) > 20
    assert differing == [], "python -m tools.generate"


def test_the_schema_of_the_api_is_complete() -> None:
    named = set(re.findall(r'"#/components/schemas/(\w+)"', openapi.generated()))

    assert named <= json.loads(openapi.generated())["components"]["schemas"].keys()
