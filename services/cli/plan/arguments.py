"""The arguments of the commands what-if and defrag."""

import argparse
import os

from services.cli import flags
from services.cli.command_parser import CommandParser
from services.cli.flags import AddCommand


def add_plan_commands(add: AddCommand) -> None:
    """Add what-if and defrag."""
    what_if = add(
        "what-if",
        "show whether a manifest's pods would fit now, where, and what is missing",
        _what_if,
        "pods.yaml",
        "deployment.yaml -o json",
        "- < job.yaml",
    )
    what_if.description = f"{what_if.description}\n\nNothing is created or reserved."
    what_if.add_argument("file", metavar="FILE", help="manifest; - for standard input")
    _add_volcano_conf(what_if)
    flags.add_view(what_if)
    defrag = add(
        "defrag",
        "show the fewest pods that would have to move for a waiting pod to fit, or evict them",
        _defrag,
        "my-pod -n team-a --dry-run",
        "my-pod -n team-a --evict",
    )
    flags.add_pod(defrag)
    action = defrag.add_mutually_exclusive_group(required=True)
    action.add_argument("--dry-run", action="store_true", help="only show them")
    action.add_argument(
        "--evict",
        action="store_true",
        help="evict them through the Eviction API; their controllers replace them",
    )
    defrag.add_argument(
        "--min-runtime-s",
        type=float,
        default=float(os.environ.get("LEASEHOLD_PREEMPTION_MIN_RUNTIME_S", "600")),
        help="the binder's setting [LEASEHOLD_PREEMPTION_MIN_RUNTIME_S; default: 600]",
    )
    _add_volcano_conf(defrag)
    flags.add_view(defrag)


def _add_volcano_conf(command: CommandParser) -> None:
    command.add_argument(
        "--volcano-conf",
        default="",
        metavar="FILE",
        help="the volcano-scheduler.conf that the watcher reads",
    )


def _what_if(namespace: argparse.Namespace) -> int:
    from services.cli.plan.commands import what_if

    return what_if(namespace)


def _defrag(namespace: argparse.Namespace) -> int:
    from services.cli.plan.commands import defrag

    return defrag(namespace)
