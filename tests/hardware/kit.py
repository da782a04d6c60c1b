"""Packs what the tests need on a machine with a GPU and no network, into dist/gpu-kit.

`make test-gpu-kit LIBRARY=/path/to/libvgpu.so`, or with HAMI_CORE=/path/to/HAMi-core, which builds
the library of that clone (with cmake, a C compiler, and NVIDIA's header files from its packages).
Copy this folder there, with dist/gpu-kit, and run `dist/gpu-kit/run`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from simcluster.gpu_driver.build import build

ROOT = Path(__file__).parents[2]
KIT = ROOT / "dist" / "gpu-kit"
MOST_MIB = 64
HEADERS = ("nvidia-cuda-runtime>=13.0,<13.1", "nvidia-nvml-dev>=13.0,<13.1")
"""Header files of the oldest CUDA whose functions the drivers in use have."""
TESTS_NEED = ("iniconfig", "packaging", "pluggy", "pygments", "pytest")
"""Beside what `make up` installs."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 38, 35, 34, 31, 28, 27, 24, 17, 5)]
RUN = """#!/bin/sh
# The tests on the GPU of this machine; needs python3 {python} with pip, and no network.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" \\
  "$kit"/wheels/*.whl
chmod +x "$kit"/cache/leasehold/gpu-driver/*/*
cd "$kit/../.."
export PYTHONPATH="$site:$kit/metadata:$PWD" XDG_CACHE_HOME="$kit/cache" PATH="$PATH:$site/bin"
status=0
python3 -m tests.hardware --library "$kit/libvgpu.so" "$@" || status=$?
exit $status
"""


def build_library(source: Path, folder: Path) -> tuple[Path, str]:
    """Build HAMi-core's library from a clone; return it with its commit."""
    commit = _output("git", "-C", source, "rev-parse", "--short", "HEAD")
    copy, headers, stubs = (folder / name for name in ("HAMi-core", "headers", "stubs"))
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build"))
    lists = copy / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace("add_subdirectory(test)", ""))  # they need a GPU
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    _output(*pip, "--no-deps", "--target", headers, *HEADERS)
    stubs.mkdir()
    for name in ("libcuda.so", "libnvidia-ml.so"):
        shutil.copy(build() / f"{name}.1", stubs / name)  # what to link with
    given = {"CUDA_HOME": str(headers / "nvidia" / "cu13"), "LIBRARY_PATH": str(stubs)}
    _output("bash", "build.sh", cwd=copy, env=os.environ | given)
    return copy / "build" / "libvgpu.so", commit


def _output(*command: str | Path, **options: Any) -> str:
    """Run a program; return what it printed, or end with that if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return str(done.stdout).strip()


def locked(python: str) -> list[str]:
    """Return what the locks pin for `make up`, and for the tests."""
    lines = (ROOT / "locks" / "development.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lines, re.MULTILINE))
    of_up = re.findall(
        r"^([\w.-]+)==\S+(.*)", (ROOT / "locks" / "up.txt").read_text(), re.MULTILINE
    )
    names = {name for name, rest in of_up if _applies(rest, python)}
    return [f"{name}=={pins[name]}" for name in sorted(names.union(TESTS_NEED))]


def _applies(rest: str, python: str) -> bool:
    """Whether a line of a lock is for Linux and this version."""
    elsewhere = "win32" in rest and "!= 'win32'" not in rest
    return not elsewhere and not ("python_full_version <" in rest and python >= "3.12")


def fetch(python: str) -> None:
    """Download the wheels for a version of Python on x86-64."""
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    wanted = [*locked(python), "--no-deps", "--dest", str(KIT / "wheels")]
    subprocess.run([*pip, *target, *wanted], check=True)


def size_mib(folder: Path) -> float:
    """Return what the files of a folder need."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / (1 << 20)


def main() -> int:
    """Pack the kit, and say what it weighs."""
    parser = argparse.ArgumentParser(
        prog="make test-gpu-kit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--library", type=Path, help="HAMi-core's libvgpu.so, for x86-64")
    parser.add_argument("--source", type=Path, help="a clone of HAMi-core, to build the library of")
    parser.add_argument("--python", default="3.12", help="version there; default: 3.12")
    settings = parser.parse_args()
    shutil.rmtree(KIT, ignore_errors=True)
    driver = build()
    shutil.copytree(driver, KIT / "cache" / "leasehold" / "gpu-driver" / driver.name)
    with tempfile.TemporaryDirectory() as folder:
        library = settings.library
        commit = ""
        if settings.source:
            print("building the library...", flush=True)
            library, commit = build_library(settings.source, Path(folder))
        if library is None or not library.is_file():
            sys.exit("the library is needed: make test-gpu-kit LIBRARY=/path/to/libvgpu.so")
        shutil.copy(library, KIT / "libvgpu.so")
    if commit:
        (KIT / "commit").write_text(commit)
    described = KIT / "metadata" / f"leasehold-{version('leasehold')}.dist-info" / "METADATA"
    described.parent.mkdir(parents=True)
    described.write_text(
        f"Metadata-Version: 2.1\nName: leasehold\nVersion: {version('leasehold')}\n"
    )
    print("downloading wheels...", flush=True)
    fetch(settings.python)
    run = KIT / "run"
    run.write_text(RUN.format(python=settings.python))
    run.chmod(0o755)
    weight = size_mib(KIT)
    print(f"{KIT.relative_to(ROOT)}: {len(list(KIT.glob('wheels/*')))} wheels, {weight:.1f} MiB")
    if weight > MOST_MIB:
        sys.exit(f"the kit must be at most {MOST_MIB} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
