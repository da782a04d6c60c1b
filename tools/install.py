"""Installs this folder in .venv with the versions of a lock, and shows how far it is.

make runs it with whatever python3 is: it needs nothing but the standard library, and Python 3.6 can
parse it, so that an old version is refused with a sentence.

    python3 tools/install.py locks/up.txt .venv/.up
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = (VENV / ".up", VENV / ".installed")
"""Each exists if the packages of its lock are complete."""
VERSION = "{}.{}".format(*sys.version_info)
NEEDED_MB = {"up.txt": 600, "development.txt": 1200}
KUBECTL = (
    'curl -LO "https://dl.k8s.io/release/$(curl -Ls https://dl.k8s.io/release/stable.txt)'
    '/bin/linux/%s/kubectl" && sudo install kubectl /usr/local/bin'
)


def main() -> None:
    lock = Path(sys.argv[1])
    stamp = Path(sys.argv[2])
    check_python()
    check_disk(NEEDED_MB[lock.name])
    warn_of_missing_programs()
    make_venv()
    packages = sum("==" in line for line in lock.read_text().splitlines())
    run_pip("%d packages" % packages, "--requirement", str(lock))  # noqa: UP031
    run_pip("leasehold", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    stamp.touch()


def check_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036
        programs = [
            name for name in map("python3.{}".format, (13, 12, 11, 14)) if shutil.which(name)
        ]
        sys.exit(
            "{} is Python {}, and Leasehold needs 3.11 or newer: name another one, as in "
            "`make up PYTHON={}`{}".format(
                sys.executable,
                platform.python_version(),
                programs[0] if programs else "python3.12",
                "" if programs else "; none is on PATH, so install one first",
            )
        )


def check_disk(needed_mb: int) -> None:
    free_mb = shutil.disk_usage(ROOT).free // 1_000_000
    if free_mb < needed_mb:
        sys.exit(
            f"{ROOT} has {free_mb} MB of free disk; {needed_mb} MB are needed: free some first"
        )


def warn_of_missing_programs() -> None:
    if shutil.which("kubectl") is None:
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")
        print(f"kubectl is not on PATH. To talk to the cluster, install it:\n  {KUBECTL % machine}")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        print(
            "No C compiler is on PATH: nvidia-smi and gpu-load do not run in pods without one. On "
            "Debian and Ubuntu:\n  sudo apt-get install gcc libc6-dev"
        )


def fault_of_venv() -> str:
    """Return why .venv cannot be used, or an empty text."""
    command = [str(PYTHON), "-c", "import pip, sys; print('{}.{}'.format(*sys.version_info))"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "does not run"
    if version != VERSION:
        return f"is of Python {version}"
    if str(VENV) not in (VENV / "bin" / "activate").read_text():
        return "has moved"
    return "" if any(stamp.exists() for stamp in STAMPS) else "is not complete"


def make_venv() -> None:
    """Make .venv unless it is complete and of this Python."""
    fault = fault_of_venv()
    if not fault:
        return
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} cannot make virtual environments: install its module, on Debian and "
            "Ubuntu with `sudo apt-get install python3-venv`, or name another Python, as in "
            "`make up PYTHON=python3.12`"
        )
    started_s = time.monotonic()
    if VENV.exists():
        print(f".venv {fault} and is made anew")
        shutil.rmtree(VENV)
    base = getattr(sys, "_base_executable", sys.executable)  # not that of the .venv just removed
    done = subprocess.run([base, "-m", "venv", VENV], check=False)
    if done.returncode:
        sys.exit(f"{base} -m venv {shlex.quote(str(VENV))} failed, as reported above")
    print(f"  .venv with Python {VERSION:<22} {time.monotonic() - started_s:5.1f} s", flush=True)


def run_pip(title: str, *arguments: str) -> None:
    """Run pip install, and show each second, or without a terminal each ten, what it does."""
    log = VENV / "pip.log"
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    with started as process, Progress(title) as progress:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("Installing collected"):  # from here on .venv changes
                for stamp in STAMPS:
                    stamp.unlink(missing_ok=True)
            progress.show(line)
        code = process.wait()
    log.write_text("".join(lines))
    if code:
        errors = [line for line in lines if line.startswith("ERROR")]
        error = errors[-1].strip() if errors else "it wrote no error"
        sys.exit(
            f"pip failed: {error}\nIts whole output is in {log}. "
            "Check the network, HTTPS_PROXY and PIP_INDEX_URL, and run the command again."
        )


class Progress:
    """The line of one step, with the time that it has taken."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.step = ""
        self.collected = 0
        self._started_s = time.monotonic()
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Progress":
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._ticker.join()
        if error[0] is None:
            self._draw("", end="\n")

    def show(self, line: str) -> None:
        """Take the step from a line of pip's output."""
        word, _, rest = line.partition(" ")
        if word == "Collecting":
            self.collected += 1
            self.step = f"{self.collected}: {rest.split()[0]}"
        elif word in ("Installing", "Preparing", "Building"):
            self.step = "installing"

    def _tick(self) -> None:
        while not self._done.wait(1 if sys.stdout.isatty() else 10):
            self._draw(self.step, end="" if sys.stdout.isatty() else "\n")

    def _draw(self, step: str, end: str) -> None:
        took_s = time.monotonic() - self._started_s
        before, after = ("\r", "\033[K") if sys.stdout.isatty() else ("", "")
        text = f"{self.title} {step}"[:40]
        print(f"{before}  {text:<40} {took_s:5.1f} s{after}", end=end, flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
