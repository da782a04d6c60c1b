"""The parser of the whole command line; each package describes its own commands."""

import argparse

from services.cli.admin.arguments import add_admin_commands
from services.cli.audit.arguments import add_audit_command
from services.cli.doctor.arguments import add_doctor_command
from services.cli.flags import Run
from services.cli.inspect.arguments import add_inspect_commands
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="leasehold",
        description="GPU sharing for Kubernetes: every share is a lease.",
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Run, /, *examples: str) -> argparse.ArgumentParser:
        lines = "".join(f"  leasehold {name} {example}".rstrip() + "\n" for example in examples)
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{lines}\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    add_up_commands(add)
    add_inspect_commands(add)
    add_audit_command(add)
    add_doctor_command(add)
    add_admin_commands(add)
    return parser
