"""The `leasehold` command. Every subcommand is imported when it is called, and not before."""

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from services.cli.commands import parser
from shared.model.errors import LeaseholdError, RequestError, UnavailableError

DEBUG = "LEASEHOLD_DEBUG"
BUG = 70


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    flags = parser().parse_args(argv)
    if argv is None and not os.environ.get(DEBUG):
        sys.excepthook = _say_in_one_line
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


def _say_in_one_line(
    kind: type[BaseException], error: BaseException, _: TracebackType | None
) -> None:
    """Report what nobody expected, without its traceback, and exit with the code of a bug."""
    sys.stderr.write(
        f"leasehold: a bug, or data of another version: {kind.__name__}: {error}; "
        f"{DEBUG}=1 shows where\n"
    )
    sys.stderr.flush()
    os._exit(BUG)


def _code_of(error: LeaseholdError) -> int:
    if isinstance(error, RequestError):
        return 2
    return 3 if isinstance(error, UnavailableError) else 1


if __name__ == "__main__":
    main()
