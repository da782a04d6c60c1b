"""`python -m services.node_agent.compute_time.build_library`: compiles `libleasehold-time.so`."""

import sys
from pathlib import Path

from services.node_agent.c_compiler import compile_c
from shared.model.errors import UnavailableError

LIBRARY = "libleasehold-time.so"
BUILT = Path(sys.prefix) / "libexec" / LIBRARY
SOURCES = tuple(Path(__file__).with_name(name) for name in ("bucket.c", "limiter.c", "preload.c"))
FLAGS = (
    *("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"),
    "-fwrapv",  # a container can write any number into its file
    "-Wl,-z,lazy",  # glibc before 2.34 has dlopen in libdl, which not every program loads
)


def build_library(target: Path) -> Path:
    """Raises UnavailableError without a C compiler, or with its message."""
    return compile_c(target, SOURCES, FLAGS)


if __name__ == "__main__":
    try:
        build_library(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
    except UnavailableError as unbuilt:
        sys.exit(str(unbuilt))
