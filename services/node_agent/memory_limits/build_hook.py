"""`python -m services.node_agent.memory_limits.build_hook`: compiles the hook's program.

It is static: the host's libraries do not matter.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from services.node_agent.memory_limits.hook_program import BUILT
from shared.model.errors import UnavailableError

SOURCE = Path(__file__).with_name("limit_hook.c")
FLAGS = ("-static", "-O2", "-s", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def build_hook(target: Path) -> Path:
    """Raises UnavailableError without a C compiler, or with its message."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnavailableError("the hook needs a C compiler: install gcc and libc6-dev")
    target.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(  # noqa: S603 - the compiler, with our own arguments
        [compiler, *FLAGS, "-o", target, SOURCE], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise UnavailableError(f"{SOURCE.name} does not compile: {result.stderr.strip()}")
    return target


if __name__ == "__main__":
    try:
        build_hook(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
    except UnavailableError as unbuilt:
        sys.exit(str(unbuilt))
