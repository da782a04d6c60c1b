"""The `leasehold` command. Every subcommand is imported when it is called, and not before."""

import os
import sys
from collections.abc import Sequence

from services.cli.commands import parser
from shared.model.errors import LeaseholdError, RequestError, UnavailableError


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    flags = parser().parse_args(argv)
    try:
        code = int(flags.run(flags))
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except LeaseholdError as error:
        print(f"leasehold {flags.command}: {error}", file=sys.stderr)
        code = _code_of(error)
    sys.exit(code)


def _code_of(error: LeaseholdError) -> int:
    if isinstance(error, RequestError):
        return 2
    return 3 if isinstance(error, UnavailableError) else 1


if __name__ == "__main__":
    main()
