"""The parser of the whole command line; each package describes its own commands."""

import argparse
from collections.abc import Sequence
from typing import Any

from services.cli.admin.arguments import add_admin_commands
from services.cli.audit.arguments import add_audit_command
from services.cli.command_parser import CommandParser
from services.cli.completion import SCRIPTS
from services.cli.doctor.arguments import add_doctor_command
from services.cli.flags import Run
from services.cli.inspect.arguments import add_inspect_commands
from services.cli.plan.arguments import add_plan_commands
from services.cli.up.arguments import add_up_commands

EXIT_CODES = """\
exit codes:
  0  done; for audit: no difference
  1  failed; for audit: there are differences; for doctor: a check failed; for explain and trace:
     nothing found
  2  the command line or the request is invalid
  3  a required server (Valkey, the API server) is unavailable
  70 a bug; LEASEHOLD_DEBUG=1 shows where
"""
EXAMPLES = """\
examples:
  leasehold up                                  two simulated nodes, four T4 each
  leasehold up --nodes 3 --gpus 8xA100-80GB --headless
  leasehold up --gpus 4xT4,2xA10                a layout for each node
  leasehold up --gpus 4xA100-40GB:mig+2xT4      four GPUs in MIG mode and two that are not
  leasehold gpus                                every device and its leases
  leasehold explain my-pod -n team-a            why it waits, or why it runs where it runs
  leasehold resize my-pod --memory 6Gi          change the size of a running pod's container
  leasehold audit --json
  leasehold down
"""


def parse(argv: Sequence[str] | None, program: str) -> argparse.Namespace:
    """Parse a command line of the program of this name; exits if it is invalid."""
    flags, unknown = build_parser(program).parse_known_args(argv)
    if unknown:
        flags.parser.refuse(unknown)
    return flags


def build_parser(program: str = "leasehold") -> CommandParser:
    """Return the parser of the whole command line; `program` is its name in help and errors."""
    parser = CommandParser(
        prog=program,
        description="GPU sharing for Kubernetes: every share is a lease.",
        epilog=f"{EXAMPLES.replace('  leasehold', f'  {program}')}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Run, /, *examples: str) -> CommandParser:
        lines = "".join(f"  {program} {name} {example}".rstrip() + "\n" for example in examples)
        command: CommandParser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{lines}\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command)
        return command

    def print_help(flags: argparse.Namespace) -> int:
        (commands.choices[flags.topic] if flags.topic else parser).print_help()
        return 0

    add_up_commands(add)
    add_inspect_commands(add)
    add_plan_commands(add)
    add_audit_command(add)
    add_doctor_command(add)
    add_admin_commands(add)
    add_completion = add(
        "completion",
        "print the completion script of a shell",
        _print_completion,
        "bash > /etc/bash_completion.d/leasehold",
        "zsh > ~/.zfunc/_leasehold",
        "fish > ~/.config/fish/completions/leasehold.fish",
    )
    add_completion.add_argument(
        "shell", metavar="SHELL", choices=tuple(SCRIPTS), help="bash, zsh or fish"
    )
    topics = list(commands.choices)
    about = add("help", "show the help of a command", print_help, "", "explain")
    about.add_argument("topic", metavar="COMMAND", nargs="?", choices=topics)
    return parser


def _print_completion(flags: argparse.Namespace) -> int:
    print(SCRIPTS[flags.shell], end="")
    return 0


class _PrintVersion(argparse.Action):
    """Prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"leasehold {version('leasehold')}")
        parser.exit()
