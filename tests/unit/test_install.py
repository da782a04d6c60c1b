"""What the first command of a newcomer checks before it installs anything."""

import ast
import contextlib
import sys
import venv
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import install

SCRIPT = Path(install.__file__)
Version = namedtuple("Version", "major minor micro releaselevel serial")


@pytest.mark.parametrize(
    ("on_path", "advice"),
    [
        ({"python3.12", "python3.11"}, "`make up PYTHON=python3.12`"),
        (set[str](), "`make up PYTHON=python3.12`; none is on PATH, so install one first"),
    ],
)
def test_an_old_python_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, on_path: set[str], advice: str
) -> None:
    monkeypatch.setattr(sys, "version_info", Version(3, 10, 12, "final", 0))
    monkeypatch.setattr("platform.python_version", lambda: "3.10.12")
    monkeypatch.setattr("shutil.which", lambda name: name if name in on_path else None)

    with pytest.raises(SystemExit) as refusal:
        install.check_python()

    assert str(refusal.value) == (
        f"{sys.executable} is Python 3.10.12, and Leasehold needs 3.11 or newer: name another one, "
        f"as in {advice}"
    )


def test_python_3_6_can_parse_what_refuses_it() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def test_a_full_disk_is_reported_before_anything_is_installed() -> None:
    with pytest.raises(SystemExit, match="MB of free disk; 1000000000000 MB are needed"):
        install.check_disk(10**12)


def half_finished(_: Path) -> None:
    """It has no stamp."""


def of_another_python(folder: Path) -> None:
    (folder / ".up").touch()
    python = folder / "bin/python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 3.10\n")
    python.chmod(0o755)


def without_its_python(folder: Path) -> None:
    (folder / ".installed").touch()
    python = folder / "bin/python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")


def in_another_folder_before(folder: Path) -> None:
    (folder / ".up").touch()
    activate = folder / "bin/activate"
    activate.write_text(activate.read_text().replace(str(folder), "/before/.venv"))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda folder: (folder / ".up").touch(), ""),
        (lambda folder: (folder / ".installed").touch(), ""),
        (half_finished, "is not complete"),
        (of_another_python, "is of Python 3.10"),
        (without_its_python, "does not run"),
        (in_another_folder_before, "has moved"),
    ],
)
def test_a_venv_that_is_not_complete_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], fault: str
) -> None:
    folder = tmp_path / ".venv"
    venv.create(folder, symlinks=True)
    (found,) = folder.glob("lib/python3*/site-packages")
    (found / "pip.py").touch()
    monkeypatch.setattr(install, "VENV", folder)
    monkeypatch.setattr(install, "PYTHON", folder / "bin/python")
    monkeypatch.setattr(install, "STAMPS", (folder / ".up", folder / ".installed"))
    change(folder)

    assert install.fault_of_venv() == fault


@pytest.mark.parametrize(
    ("output", "code", "result"),
    [
        ("Collecting a==1\nERROR: No matching distribution for a==1\n", 1, (True, "for a==1\n")),
        ("Collecting a==1\nInstalling collected packages: a\n", 0, (False, "")),
        ("Installing collected packages: a\nKilled\n", 137, (False, "it wrote no error\n")),
    ],
)
def test_a_failure_of_pip_is_one_sentence_and_a_changed_venv_is_not_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    code: int,
    result: tuple[bool, str],
) -> None:
    python = tmp_path / "python"
    stamp = tmp_path / ".up"
    python.write_text(f"#!/bin/sh\nprintf '{output}'\nexit {code}\n")
    python.chmod(0o755)
    stamp.touch()
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "PYTHON", python)
    monkeypatch.setattr(install, "STAMPS", (stamp,))

    with pytest.raises(SystemExit) if code else contextlib.nullcontext() as refusal:
        install.run_pip("packages", "a")

    stamp_stays, message = result
    assert stamp.exists() == stamp_stays
    assert (tmp_path / "pip.log").read_text() == output
    assert message in str(refusal.value if refusal else "")
