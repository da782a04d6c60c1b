"""Flags that several commands have, and how a command is added to the parser."""

import argparse
from collections.abc import Callable, Mapping
from typing import Protocol

from services.cli.command_parser import CommandParser
from shared.dialects import KUBE_SCHEDULER, SCHEDULERS
from shared.model.usage import IDLE_AFTER_S
from shared.runtime.setting_values import parse_number
from shared.runtime.variables import argument_of

Run = Callable[[argparse.Namespace], int]


class AddCommand(Protocol):
    """Adds a command to the parser: its name, its help, its function, the arguments of examples."""

    def __call__(self, name: str, text: str, run: Run, /, *examples: str) -> CommandParser:
        """Return the command's parser."""


def add_state(command: CommandParser) -> None:
    """Add the flag for the state directory of `leasehold up`."""
    command.connection.add_argument(
        "--state",
        **argument_of("LEASEHOLD_STATE", ".leasehold"),
        metavar="DIR",
        help="state directory [LEASEHOLD_STATE; default: .leasehold]",
    )


def pod_name(text: str) -> str:
    """Parse a pod's name, also as `kubectl get -o name` writes it (`pod/NAME`)."""
    before, _, name = text.rpartition("/")
    if before not in ("", "pod"):
        raise argparse.ArgumentTypeError(
            f"{text} is not a pod name; set the namespace with -n: {name} -n {before}"
        )
    return name


def add_pod(command: CommandParser, *, required: bool = True) -> None:
    """Add the argument for one pod, and the flag for its namespace."""
    command.add_argument(
        "pod",
        metavar="POD",
        type=pod_name,
        nargs=None if required else "?",
        default="",
        help="the pod's name",
    )
    add_namespace(command, "default")


def add_namespace(command: CommandParser, default: str) -> None:
    """Add the flag for a namespace, and, where all is the default, kubectl's flag for all."""
    text = f"default: {default or 'all'}"
    command.add_argument("-n", "--namespace", default=default, help=text)
    if not default:
        command.add_argument(
            *("-A", "--all-namespaces"),
            action="store_const",
            const="",
            dest="namespace",
            help="all namespaces",
        )


def add_api_server(command: CommandParser) -> None:
    """Add the flag for the API server."""
    command.connection.add_argument(
        "--kubeconfig",
        **argument_of("LEASEHOLD_KUBECONFIG"),
        help="the API server [LEASEHOLD_KUBECONFIG; default: the one in DIR/state.json, else as "
        "kubectl finds it]",
    )
    command.connection.add_argument(
        "--context", default="", help="of the kubeconfig, instead of a stack of `leasehold up`"
    )


def add_dashboard(command: CommandParser) -> None:
    """Add the flag for the dashboard, through which a cluster is read without its secrets."""
    command.connection.add_argument(
        "--dashboard",
        **argument_of("LEASEHOLD_DASHBOARD"),
        metavar="URL",
        help="the dashboard that is read without --redis-url: its URL, or NAMESPACE/NAME of its "
        "Service [LEASEHOLD_DASHBOARD; default: leasehold-system/dashboard]",
    )


def add_output(command: CommandParser, *more: str) -> None:
    """Add the flags for the form of the output: a document with stable keys, or one of `more`."""
    forms = ("json", "yaml", *more)
    command.add_argument("-o", "--output", choices=forms, default="", help="default: text")
    command.add_argument(
        "--json", action="store_const", const="json", dest="output", help="the same as -o json"
    )


def add_watch(command: CommandParser) -> None:
    """Add kubectl's flag to follow changes."""
    command.add_argument("-w", "--watch", action="store_true", help="show it again when it changes")


def add_schedulers(command: CommandParser) -> None:
    """Add the flag for our schedulerName values."""
    default = ",".join((*SCHEDULERS, KUBE_SCHEDULER))
    command.add_argument(
        "--schedulers",
        **argument_of("LEASEHOLD_SCHEDULERS", default),
        help="schedulerName values of our pods, also of those that kube-scheduler places "
        f"[LEASEHOLD_SCHEDULERS; default: {default}]",
    )


def schedulers_of(flags: argparse.Namespace) -> frozenset[str]:
    """Return our schedulerName values."""
    return frozenset(name.strip() for name in flags.schedulers.split(",") if name.strip())


def add_server(
    command: CommandParser,
    server: str,
    *,
    url: str,
    credentials: str,
    files: Mapping[str, str],
) -> None:
    """Add the flags for a server's URL, credentials and TLS files; the texts are their help."""
    prefix = f"LEASEHOLD_{server.upper()}"
    command.connection.add_argument(
        f"--{server}-url",
        **argument_of(f"{prefix}_URL"),
        help=f"{url} [{prefix}_URL; default: the one in DIR/state.json]",
    )
    command.connection.add_argument(
        f"--{server}-credentials",
        **argument_of(f"{prefix}_CREDENTIALS"),
        metavar="FILE",
        help=f"{credentials} [{prefix}_CREDENTIALS; default: those in DIR/state.json]",
    )
    for kind, text in files.items():
        variable = f"{prefix}_{kind.upper()}_FILE"
        command.connection.add_argument(
            f"--{server}-{kind}-file",
            **argument_of(variable),
            metavar="FILE",
            help=f"{text} [{variable}]",
        )


def number(text: str) -> float:
    """Parse a finite number of 0 or more. Raises ValueError."""
    return parse_number(text, float)


def add_min_runtime(command: CommandParser) -> None:
    """Add the flag for how long leases are safe from preemption."""
    command.add_argument(
        "--min-runtime-s",
        **argument_of("LEASEHOLD_PREEMPTION_MIN_RUNTIME_S", "600", number),
        help="the binder's setting [LEASEHOLD_PREEMPTION_MIN_RUNTIME_S; default: 600]",
    )


def add_view(command: CommandParser, *more_outputs: str) -> None:
    """Add the flags of a command that reads the ledger: state, Redis, API server, output."""
    add_state(command)
    add_server(
        command,
        "redis",
        url="the ledger",
        credentials="file with user:secret for the ledger",
        files={
            "ca": "certificate authority of the ledger, PEM",
            "certificate": "client certificate for the ledger, PEM",
            "key": "key of that certificate, PEM",
        },
    )
    add_api_server(command)
    add_output(command, *more_outputs)


def add_usage(command: CommandParser, *more_outputs: str) -> None:
    """Add the flags of a command that shows measured usage beside leases."""
    add_view(command, *more_outputs)
    add_dashboard(command)
    add_nats(command, "the NATS of the node agents, which report measured usage")
    command.add_argument(
        "--idle-after",
        **argument_of("LEASEHOLD_IDLE_AFTER", f"{IDLE_AFTER_S / 60:g}", number),
        metavar="MINUTES",
        help="mark shares as idle that neither a kernel nor a change of their memory has used for "
        "this long [LEASEHOLD_IDLE_AFTER; default: 10]",
    )


def add_nats(command: CommandParser, url: str) -> None:
    """Add the flags for NATS as the operator; `url` is the help of its URL."""
    add_server(
        command,
        "nats",
        url=url,
        credentials="file with user:secret of the operator",
        files={
            "token": "token of the operator's service account, instead",
            "ca": "certificate authority of NATS, PEM",
        },
    )
