"""docs/reference.md lists the commands, settings, metrics and fields of pods of the code."""

import json
import os
import re
import subprocess
import sys

from tools.generate import openapi
from tools.generate.pages import ROOT
from tools.generate.reference import PAGE, generated, pieces


def test_the_reference_is_that_of_the_code() -> None:
    assert generated() == PAGE.read_text(), "python -m tools.generate"


def test_the_reference_does_not_depend_on_the_environment() -> None:
    variables = {
        "LEASEHOLD_STATE": "/elsewhere",
        "LEASEHOLD_NATS_URL": "nats://other:1",
        "COLUMNS": "9",
    }
    code = "import json; from tools.generate.reference import pieces; print(json.dumps(pieces()))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert json.loads(output) == pieces()


def test_the_schema_of_the_api_is_generated_and_complete() -> None:
    assert openapi.PAGE.read_text() == openapi.generated()
    document = json.loads(openapi.generated())
    named = set(re.findall(r'"#/components/schemas/(\w+)"', openapi.generated()))
    assert named <= document["components"]["schemas"].keys()
