"""`make test-gpu`: parts that fail or hang cost no other; without a GPU it fails, and says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware import __main__ as runner
from tests.hardware import results
from tests.hardware.results import Row

HANGS = """
import pathlib, subprocess
def test_it():
    process = subprocess.Popen(["sleep", "600"])
    pathlib.Path({place!r}).write_text(str(process.pid))
    process.wait()
"""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of parts: one that cannot be imported, one that hangs, one of which all holds."""
    for name, text in (
        ("broken", "raise ImportError('no driver')"),
        ("hanging", HANGS.format(place=str(tmp_path / "pid"))),
        ("sound", "def test_it(): pass"),
    ):
        (tmp_path / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "LEAST_S", 0.0)
    monkeypatch.setattr(runner, "PARTS", {"broken": 60, "hanging": 8, "sound": 60})
    return tmp_path


def test_parts_that_fail_or_hang_cost_no_other(parts: Path) -> None:
    runner.run_parts((), parts, 200.0)

    rows = {row.part: row for row in results.read(parts / "rows.jsonl")}
    assert rows["hanging"].figure == "did not end within 8 s, see log.txt"
    assert rows["broken"].figure == "failed: pytest ended with 2, see log.txt"
    assert not rows["hanging"].holds
    assert "sound" not in rows
    log = (parts / "log.txt").read_text()
    assert "1 passed" in log
    assert "in test_it" in log, "the stacks of the part that hung"
    pid = (parts / "pid").read_text()
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "what it started has ended"


def test_a_machine_without_a_gpu_is_told_so() -> None:
    command = [sys.executable, "-m", "tests.hardware"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "library is needed" in done.stderr:
        pytest.skip("this machine has a GPU")

    assert done.returncode == 1
    assert done.stderr.startswith("no GPU can be tested: NVML:")
    assert "Traceback" not in done.stderr


def test_a_run_ends_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "libvgpu.so"
    library.write_bytes(b"")
    options = ["--simulated", "--library", str(library), "--out", str(tmp_path), "-k", "alike"]
    monkeypatch.setattr(sys, "argv", ["make test-gpu", *options])
    monkeypatch.setattr(runner, "PARTS", {"devices": 300})
    monkeypatch.setattr(os, "environ", dict(os.environ))

    assert runner.main() == 0, (tmp_path / "log.txt").read_text()

    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "hardware.md").read_text().strip()
    assert "| devices | model and UUID | NVIDIA A100" in printed
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["holds"]


def test_the_table_shows_what_holds_what_does_not_and_what_was_not_run() -> None:
    rows = [
        Row(part="memory", shows="MiB", figure="4096", target="4096", holds=True),
        Row(part="cost", shows="a | b", figure="3 %", target="2 %", holds=False),
        Row(part="mps", shows="memory", figure="not run:\nno daemon", holds=None),
    ]

    lines = results.table(["2026-11-27: T4", "driver 1"], rows).splitlines()

    assert lines[0] == "2026-11-27: T4, driver 1:"
    assert lines[4:] == [
        "| memory | MiB | 4096 | 4096 | yes |",
        "| cost | a \\| b | 3 % | 2 % | **no** |",
        "| mps | memory | not run: no daemon |  |  |",
    ]
