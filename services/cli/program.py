"""The command that runs this program again, for hints that can be pasted into a shell."""

import shlex
import shutil
import sys
from pathlib import Path

NAME = "leasehold"
PLUGIN = "kubectl-leasehold"
"""kubectl runs a program of this name as `kubectl leasehold`."""


def program_name() -> str:
    """Return the name of the command, as in its help."""
    return "kubectl leasehold" if Path(sys.argv[0]).name == PLUGIN else NAME


def program() -> str:
    """Return the command as a shell finds it: with the typed path if PATH has another or none."""
    typed = Path(sys.argv[0])
    if typed.name != NAME:
        return program_name()
    found = shutil.which(NAME)
    if found is not None and typed.exists() and Path(found).samefile(typed):
        return NAME
    return shlex.quote(str(typed))
