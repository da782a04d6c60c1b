"""The `leasehold` command. Every subcommand is imported only when it is called."""

import dataclasses
import errno
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from services.cli.parser import NO_FILES, build_parser, candidates, parse
from services.cli.terminal import program_name
from shared.model.bounds import RECURSION_LIMIT, printable_lines
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.runtime.settings import argument_variables
from shared.runtime.variables import check_variables

DEBUG_VARIABLE = "LEASEHOLD_DEBUG"
BUG_EXIT_CODE = 70
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
COMPLETE = "__complete"
"""Prints how the words after it may continue, for completion scripts."""


def main(argv: Sequence[str] | None = None) -> None:
    program = program_name()
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        _prepare_process(program)
    name = program
    try:
        if words[:1] == [COMPLETE]:
            print("\n".join(candidates(build_parser(), words[1:])))
            code = 0
        else:
            entry, arguments = parse(words, program)
            check_variables(os.environ, argument_variables(entry.arguments))
            name = f"{program} {entry.name}"
            code = entry.run(_in_namespace(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        _discard_output()
        code = 0
    except OSError as error:
        if error.errno in FULL:
            _discard_output()
            text = f"{name}: the output was not written: {error.strerror}: free space, or write it"
            print(f"{text} elsewhere", file=sys.stderr)
            sys.exit(1)
        if not error.filename:
            raise
        path = printable_lines(str(error.filename))
        print(f"{name}: {path}: {error.strerror}: check the path", file=sys.stderr)
        code = 2
    except LeaseholdError as error:
        print(printable_lines(f"{name}: {error}"), file=sys.stderr)
        code = _exit_code_of(error)
    sys.exit(code)


def _prepare_process(program: str) -> None:
    """End the process if it has no output."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    if not os.environ.get(DEBUG_VARIABLE):
        sys.excepthook = _report_bug
    if sys.stdout is None:
        print(f"{program}: standard output is closed: write it to a file or pipe", file=sys.stderr)
        sys.exit(1)


def complete_plugin() -> None:
    """Kubectl runs `kubectl_complete-leasehold WORDS` to complete `kubectl leasehold`."""
    print("\n".join((*candidates(build_parser(), sys.argv[1:]), NO_FILES)))


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_namespace(arguments: Any) -> Any:
    if getattr(arguments, "namespace", "") is not None:
        return arguments
    from services.cli.api_client import ApiClient

    return dataclasses.replace(arguments, namespace=ApiClient(arguments).namespace)


def _report_bug(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    sys.stderr.write(
        f"leasehold: a bug, or data of another version: {kind.__name__}: "
        f"{printable_lines(str(error))}; {DEBUG_VARIABLE}=1 shows where\n"
    )
    sys.stderr.flush()
    os._exit(BUG_EXIT_CODE)


def _exit_code_of(error: LeaseholdError) -> int:
    if isinstance(error, RequestError):
        return 2
    return 3 if isinstance(error, UnavailableError) else 1


if __name__ == "__main__":
    main()
