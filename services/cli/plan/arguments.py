"""The arguments of the commands what-if, replay and defrag."""

import argparse
from contextlib import suppress

from services.cli import flags
from services.cli.command_parser import CommandParser
from services.cli.flags import AddCommand
from shared.model.request import NodeOrder

TRACE = """\
FILE is CSV with these columns; others are ignored:
  creation_time, deletion_time   seconds; an empty deletion_time: the pod never ends
  scheduled_time                 optional; a pod runs from then, or its creation, to its deletion
  cpu_milli, memory_mib          thousandths of a cpu, MiB
  num_gpu, gpu_milli             number of GPUs, thousandths of each
  gpu_spec                       optional; models as the labels of nodes have them, separated by |
--nodes is CSV with the columns sn (the name), cpu_milli, memory_mib, gpu (how many) and model."""


def add_plan_commands(add: AddCommand) -> None:
    """Add what-if, replay and defrag."""
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
    _add_replay(add)
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
    flags.add_min_runtime(defrag)
    _add_volcano_conf(defrag)
    flags.add_view(defrag)


def _add_replay(add: AddCommand) -> None:
    command = add(
        "replay",
        "show by policy how many GPUs a trace of pods leaves idle, and how long pods wait",
        _replay,
        "pods.csv",
        "pods.csv --nodes nodes.csv --policies binpack fragmentation --load 1.2 --json",
    )
    command.description = (
        f"{command.description}\n\nThe nodes are idle at first. Quotas, budgets and other "
        f"pods of the cluster do not count.\n\n{TRACE}"
    )
    command.add_argument("file", metavar="FILE", help="the pods with their times")
    command.add_argument("--nodes", metavar="FILE", help="default: the nodes of the cluster")
    orders = [order.value for order in NodeOrder]
    command.add_argument(
        "--policies", nargs="+", choices=orders, default=orders, help=f"default: {' '.join(orders)}"
    )
    command.add_argument(
        "--load",
        type=_positive,
        default=1.0,
        metavar="FACTOR",
        help="pods arrive so many times as fast and run as long (default: 1)",
    )
    flags.add_view(command)


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def _replay(namespace: argparse.Namespace) -> int:
    from services.cli.plan.commands import replay_trace

    return replay_trace(namespace)


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
