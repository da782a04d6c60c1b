"""Scripts contain what they use, and little more."""

import re
from importlib import resources

import pytest

from shared.ledger.script_sources import script_source

FOLDER = resources.files("shared.ledger") / "scripts"
COMMON = [file.read_text() for file in (FOLDER / "common").iterdir() if file.name.endswith(".lua")]
SCRIPTS = sorted(file.name[:-4] for file in FOLDER.iterdir() if file.name.endswith(".lua"))
FUNCTION = re.compile(r"^(?:local )?function ([\w.]+)", re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_common_function_that_a_script_calls_is_defined_in_it(name: str) -> None:
    source = script_source(name)
    defined = set(FUNCTION.findall(source))
    called = set(re.findall(r"(?<![\w.'])([\w.]+)\(", re.sub(r"--.*", "", source)))

    missing = {each for part in COMMON for each in FUNCTION.findall(part)} & called - defined

    assert not missing


def test_a_script_that_only_reads_the_state_has_no_other_part() -> None:
    assert "local function mark_freed" in script_source("status")
    assert "local function device_refusal" not in script_source("status")
