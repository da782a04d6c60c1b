"""Runs all parts on the GPU of this machine, and prints what was seen as a table.

`make test-gpu LIBRARY=/path/to/libvgpu.so ARGS="-k memory"`. Each part is a process of its own with
a limit of time, so that one that fails or hangs costs no other. No setting of the GPU is changed.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.node_agent.isolation.library import digest_of, layout_name
from tests.hardware import results
from tests.hardware.conftest import RESULTS, SIMULATED
from tests.hardware.machine import torch_python
from tests.hardware.results import Row
from tests.support.hami_core import can_unshare

PARTS = {
    "time": 330,
    "mps": 110,
    "model": 110,
    "limits": 40,
    "library": 90,
    "devices": 40,
    "mig": 20,
    "memory": 90,
    "escape": 60,
    "cost": 110,
    "compute": 150,
    "cluster": 100,
    "life": 80,
    "sight": 40,
}
"""Seconds that each may take, in the order in which they run: what no GPU has shown comes first."""
MINUTES = 7.75
LEAST_S = 10.0
DIES_S = 10.0
STACKS_S = 5.0
NOTHING_RAN = 5
PR_SET_CHILD_SUBREAPER = 36
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PYTEST = (
    *("-q", "-rfE", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-W", "ignore"),
    *("-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(FOLDER)),
    "--import-mode=importlib",
)
NO_GPU = (
    "no GPU can be tested: {}. These tests need an NVIDIA GPU and its driver on this machine; "
    "`make test` runs them on simulated GPUs"
)
_GPU = """
from tests.hardware.machine import first_gpu
gpu = first_gpu()
print(gpu.model, gpu.memory_mib, gpu.driver, sep="|")
"""

_HOLD = """
import pynvml, time
pynvml.nvmlInit()
held = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
time.sleep(3600)
"""


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def gpu_of_this_machine() -> tuple[str, ...]:
    """Return its model, memory and driver. Ends the program without one."""
    try:
        found = subprocess.run(
            [sys.executable, "-c", _GPU],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sys.exit(NO_GPU.format("the driver did not respond within 60 s"))
    if found.returncode:
        sys.exit(NO_GPU.format(found.stderr.strip().splitlines()[-1].rpartition("Error: ")[2]))
    return tuple(found.stdout.strip().split("|"))


@contextlib.contextmanager
def held_open() -> Iterator[None]:
    """Keep the driver in use: otherwise each process that comes alone waits until it starts."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLD], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        holder.kill()
        holder.wait()


def run_part(file: Path, arguments: Sequence[str], out: Path, limit_s: float) -> int | None:
    """Run the tests of a file; return pytest's exit status, or None if they exceeded the limit."""
    given = os.environ | {
        RESULTS: str(out),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-m", "pytest", *PYTEST, str(file), *arguments]
    others = _descendants(os.getpid())
    with (out / "log.txt").open("a") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=given, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process, others)


def _end(process: subprocess.Popen[bytes], others: Sequence[int]) -> None:
    """End a part with all that it started: pods and daemons are in sessions of their own."""
    started = set(_descendants(os.getpid())).difference(others)
    if process.poll() is None:
        _show_stacks(process)
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds even the dead
        process.wait(DIES_S)


def _show_stacks(process: subprocess.Popen[bytes]) -> None:
    """Have a part write what its threads do to its log; it ends by that."""
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STACKS_S)


def _descendants(pid: int) -> list[int]:
    try:
        texts = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(child) for text in texts for child in text.split()]
    except OSError:
        return []
    return [each for child in children for each in (*_descendants(child), child)]


def run_parts(arguments: Sequence[str], out: Path, whole_s: float) -> None:
    """Run all parts within the whole time; what was cut off is a row too."""
    began = time.monotonic()
    rows = out / "rows.jsonl"
    for part, limit_s in PARTS.items():
        left_s = min(limit_s, whole_s - (time.monotonic() - began))
        if left_s < LEAST_S:
            results.append(
                rows, Row(part=part, shows="the part", figure="not run: no time left", holds=None)
            )
            continue
        started = time.monotonic()
        before = len(results.read(rows))
        status = run_part(FOLDER / f"test_{part}.py", arguments, out, left_s)
        if status == NOTHING_RAN:
            continue
        took = f"{time.monotonic() - started:.0f} s"
        if status is None:
            figure = f"did not end within {left_s:.0f} s, see log.txt"
            results.append(
                rows, Row(part=part, shows="the rest of the part", figure=figure, holds=False)
            )
        ours = results.read(rows)[before:]
        wrong = sum(row.holds is False for row in ours)
        say(f"{part}: {len(ours)} figures, {wrong} that do not hold, {took}")
        if status and not ours:
            figure = f"failed: pytest ended with {status}, see log.txt"
            results.append(rows, Row(part=part, shows="the part", figure=figure, holds=False))


def about(gpu: Sequence[str], library: Path) -> list[str]:
    """Return what the figures are of."""
    model, memory_mib, driver = gpu
    commit = library.with_name("commit")
    named = commit.read_text().strip() if commit.exists() else f"content {digest_of(library)[:12]}"
    facts = [
        f"{time.strftime('%Y-%m-%d')}: {model} with {memory_mib} MiB",
        f"driver {driver}",
        f"HAMi-core {named} (layout {layout_name(library)})",
        f"kernel {platform.release()}",
        "pods in namespaces" if can_unshare() else "pods with LD_PRELOAD only",
    ]
    if torch_python():
        code = "import torch; print(torch.__version__)"
        version = subprocess.run(
            [torch_python(), "-c", code], capture_output=True, text=True, check=False
        )
        facts.append(f"PyTorch {version.stdout.strip()}")
    return facts


def main() -> int:
    """Run the parts, write results.json and hardware.md, and print the table."""
    parser = argparse.ArgumentParser(
        prog="make test-gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--library", type=Path, help="HAMi-core's libvgpu.so")
    parser.add_argument(
        "--simulated", action="store_true", help="try these tests on a simulated GPU instead"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="of all parts together; what does not fit is a row of the table. All take about 15. "
        "Default: %(default)s",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT"),
        help="folder of the results; default: $OUT, else dist/gpu-results",
    )
    settings, arguments = parser.parse_known_args()
    gpu = ("simulated", "16384", "none") if settings.simulated else gpu_of_this_machine()
    if settings.simulated:
        os.environ[SIMULATED] = "yes"
    if settings.library is None or not settings.library.is_file():
        sys.exit("HAMi-core's library is needed: make test-gpu LIBRARY=/path/to/libvgpu.so")
    out = Path(settings.out or ROOT / "dist" / "gpu-results").resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["LEASEHOLD_LIBVGPU"] = str(settings.library.resolve())
    os.environ["TORCH_PYTHON"] = torch_python()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="leasehold-gpu-") as scratch, held_open():
        draft = Path(scratch)
        run_parts(arguments, draft, settings.minutes * 60)
        rows = results.read(draft / "rows.jsonl")
        shutil.copy(draft / "log.txt", out / "log.txt")
    facts = [*about(gpu, settings.library), f"{time.monotonic() - began:.0f} s"]
    (out / "results.json").write_text(
        json.dumps({"about": facts, "rows": [row.__dict__ for row in rows]}, indent=1)
    )
    text = results.table(facts, rows)
    (out / "hardware.md").write_text(text)
    wrong = sum(row.holds is False for row in rows)
    print(text, flush=True)
    say(f"{len(rows)} figures, {wrong} that do not hold; {out}/hardware.md, results.json, log.txt")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # daemons become children of this process
    sys.exit(main())
