"""Scripts contain what they use, and nothing else."""

import re
from importlib import resources

import pytest

from shared.ledger.script_sources import script_source

FOLDER = resources.files("shared.ledger") / "scripts"
COMMON = [file.read_text() for file in (FOLDER / "common").iterdir() if file.name.endswith(".lua")]
SCRIPTS = sorted(file.name[:-4] for file in FOLDER.iterdir() if file.name.endswith(".lua"))
FUNCTION = re.compile(r"^(?:local |  )?function ([\w.]+)", re.MULTILINE)
CONSTANT = re.compile(r"^local ([\w, ]+?)(?: =|$)", re.MULTILINE)


def code(source: str) -> str:
    return re.sub(r"'[^'\n]*'", "''", re.sub(r"--.*", "", source))


def defined(source: str) -> set[str]:
    names = {name for found in CONSTANT.findall(source) for name in re.split(r", *", found)}
    return names | set(FUNCTION.findall(source))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_common_name_that_a_script_uses_is_defined_in_it(name: str) -> None:
    source = code(script_source(name))
    used = set(re.findall(r"(?<![\w.])[a-zA-Z_]\w*(?:\.\w+)?", source))
    used |= {each.partition(".")[0] for each in used}

    missing = set().union(*(defined(code(part)) for part in COMMON)) & used - defined(source)

    assert not missing


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_common_function_in_a_script_is_used_in_it(name: str) -> None:
    source = code(script_source(name))
    common = set().union(*(FUNCTION.findall(code(part)) for part in COMMON))

    unused = [
        each
        for each in common.intersection(FUNCTION.findall(source))
        if len(re.findall(rf"(?<![\w.]){re.escape(each)}\b", source)) < 2
    ]

    assert not unused


def test_a_script_that_only_reads_the_state_has_no_common_function() -> None:
    assert "local state = redis.pcall(" in script_source("status")
    assert not FUNCTION.findall(script_source("status"))
