"""The agent's parts in C, compiled for arm64: with Debian's cross compiler, no program runs."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.node_agent.c_compiler import FLAGS
from services.node_agent.compute_time import build_library
from services.node_agent.memory_limits import build_hook

PREFIX = "aarch64-linux-gnu-"
pytestmark = pytest.mark.skipif(
    shutil.which(f"{PREFIX}gcc") is None, reason="gcc-aarch64-linux-gnu is not installed"
)


def compiled(target: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    command: list[str | Path] = [f"{PREFIX}gcc", *FLAGS, *flags, "-o", target, *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_the_library_of_compute_time_needs_no_version_of_glibc_after_2_17(tmp_path: Path) -> None:
    library = compiled(tmp_path / "library.so", build_library.SOURCES, build_library.FLAGS)

    symbols = subprocess.check_output([f"{PREFIX}objdump", "-T", library], text=True)
    versions = {tuple(map(int, text.split("."))) for text in re.findall(r"GLIBC_([\d.]+)", symbols)}
    assert versions == {(2, 17)}, "arm64 has no earlier one"
    for name in ("cuLaunchKernel", "cuGraphLaunch_ptsz", "cuGetProcAddress_v2", "dlsym"):
        assert re.search(rf"\.text\s.*\s{name}$", symbols, re.MULTILINE), name


def test_the_hook_needs_no_library(tmp_path: Path) -> None:
    hook = compiled(tmp_path / "hook", [build_hook.SOURCE], build_hook.FLAGS)

    headers = subprocess.check_output([f"{PREFIX}readelf", "-hd", hook], text=True)
    assert "AArch64" in headers
    assert "NEEDED" not in headers
