"""`python -m services.node_agent.memory_limits.build_hook`: compiles the hook's program."""

import sys
from pathlib import Path

from services.node_agent.c_compiler import compile_c
from services.node_agent.memory_limits.hook_program import BUILT
from shared.model.errors import UnavailableError

SOURCE = Path(__file__).with_name("limit_hook.c")
FLAGS = ("-static",)


def build_hook(target: Path) -> Path:
    """Raises UnavailableError without a C compiler, or with its message."""
    return compile_c(target, [SOURCE], FLAGS)


if __name__ == "__main__":
    try:
        build_hook(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
    except UnavailableError as unbuilt:
        sys.exit(str(unbuilt))
