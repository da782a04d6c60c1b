"""The commands as a plugin that a stock kubectl finds on PATH."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.stack import KUBECTL, NEEDS_KUBECTL, Done, run

pytestmark = NEEDS_KUBECTL

ROOT = Path(__file__).parents[3]
NAME = "kubectl-leasehold"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for PATH with the program that an installer makes of the project's entry."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[NAME].partition(":")
    program = tmp_path / NAME
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from {module} import {function}\n{function}()\n"
    )
    program.chmod(0o755)
    return tmp_path


async def kubectl(folder: Path, *arguments: str) -> Done:
    assert KUBECTL is not None
    path = f"{folder}:{os.environ['PATH']}"
    return await run(KUBECTL, *arguments, env={"PATH": path, "HOME": str(folder)})


async def test_kubectl_runs_the_commands_and_their_help_is_that_of_the_plugin(
    folder: Path, tmp_path: Path
) -> None:
    listed = await kubectl(folder, "plugin", "list")
    shown = await kubectl(folder, "leasehold", "help", "explain")
    events = await kubectl(folder, "leasehold", "topology", "--json")
    misspelt = await kubectl(folder, "leasehold", "gpsu")
    nowhere = await kubectl(folder, "leasehold", "ps", "--state", str(tmp_path / "none"))

    assert str(folder / NAME) in listed.out
    assert shown.out.startswith("usage: kubectl leasehold explain [POD] [flags]\n")
    assert "\n  kubectl leasehold explain my-pod -n team-a -o wide\n" in shown.out
    assert '"placement.chosen.v1"' in events.out
    assert (events.code, misspelt.code, nowhere.code) == (0, 2, 3)
    assert "did you mean gpus?" in misspelt.err
    assert nowhere.err.startswith(
        f"kubectl leasehold ps: there is nothing to read: no stack is in {tmp_path}/none; run "
    )
