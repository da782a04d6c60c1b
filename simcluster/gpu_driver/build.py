"""Compiles the simulated GPUs' driver with the C compiler of this machine."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from shared.model.errors import UnavailableError

SOURCES = Path(__file__).parent
_LIBRARY = ("-shared", "-fPIC", "-fvisibility=hidden")
_FLAGS = ("-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
PRODUCTS = {
    "libcuda.so.1": (
        *("libcuda.c", "cuda_memory.c", "cuda_kernels.c", "cuda_events.c", "cuda_graphs.c"),
        *("limits.c", "cgroup_limits.c", "mps_client.c", "turns.c", "state.c"),
    ),
    "libnvidia-ml.so.1": (
        *("libnvidia-ml.c", "nvml_mig.c", "nvml_memory_limits.c", "limits.c"),
        *("cgroup_limits.c", "turns.c", "state.c"),
    ),
    "gpu-control": ("gpu-control.c", "cgroup_limits.c", "turns.c", "state.c"),
    "gpu-load": ("gpu-load.c",),
    "nvidia-smi": ("nvidia-smi.c", "state.c"),
}
"""What each file of the driver is compiled from."""


def compiler() -> str | None:
    """Return the path of this machine's C compiler, or None if it has none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build() -> Path:
    """Return a folder with the driver; it is compiled once per content, by one process at a time.

    The folder is in the user's cache, and has the files of `PRODUCTS`: a program whose
    `LD_LIBRARY_PATH` names it uses the simulated GPUs that `GPU_DRIVER_STATE` names.
    Raises UnavailableError if it must be compiled, and there is no compiler (or no Linux), or with
    the compiler's message.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(user_cache) / "leasehold" / "gpu-driver" / _digest()
    try:
        if not folder.is_dir():
            _build(_usable_compiler(), folder)
    except OSError as error:
        raise UnavailableError(f"{error.filename or folder}: {error.strerror}") from error
    return folder


def _usable_compiler() -> str:
    command = compiler()
    if command is None or sys.platform != "linux":
        raise UnavailableError(
            "simulated GPUs that programs can use need Linux and a C compiler: install gcc or clang"
        )
    return command


def _build(command: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for product, sources in PRODUCTS.items():
            _compile(command, draft / product, sources)
        draft.rename(folder)


def _digest() -> str:
    content = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def _compile(command: str, product: Path, sources: tuple[str, ...]) -> None:
    library = (*_LIBRARY, f"-Wl,-soname,{product.name}") if ".so" in product.name else ()
    result = subprocess.run(  # noqa: S603 - the compiler, with our own arguments
        [command, *_FLAGS, *library, "-o", product, *sources, "-lpthread", "-ldl"],
        cwd=SOURCES,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise UnavailableError(f"{product.name} does not compile: {result.stderr.strip()}")
