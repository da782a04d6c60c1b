"""docs/reference.md lists the commands, settings, metrics and fields of pods of the code."""

import json
import os
import re
import subprocess
import sys

from tools.generate import openapi
from tools.generate.pages import ROOT
from tools.generate.reference import pieces


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


def test_the_schema_of_the_api_is_complete() -> None:
    document = json.loads(openapi.generated())
    named = set(re.findall(r'"#/components/schemas/(\w+)"', openapi.generated()))
    assert named <= document["components"]["schemas"].keys()
