"""The command line: every subcommand, its flags, its help; what it does is imported when called."""

import argparse
import os
from collections.abc import Callable

EXIT_CODES = """\
exit codes:
  0  done; for audit: no difference
  1  it did not work; for audit: there are differences; for explain and trace: nothing found
  2  the command line or the request cannot be right
  3  something we need (Valkey, the API server) cannot be reached
"""
EXAMPLES = """\
examples:
  leasehold up                                  two simulated nodes, four T4 each
  leasehold up --nodes 3 --gpus 8xA100-80GB --headless
  leasehold up --gpus 4xT4,2xA10                a layout for each node
  leasehold gpus                                every device and its leases
  leasehold explain my-pod -n team-a            why it waits, or why it runs where it runs
  leasehold audit --json
  leasehold down
"""

Run = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    whole = argparse.ArgumentParser(
        prog="leasehold",
        description="GPU sharing for Kubernetes: every share is a lease.",
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Run, *examples: str) -> argparse.ArgumentParser:
        lines = "".join(f"  leasehold {name} {example}".rstrip() + "\n" for example in examples)
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{lines}\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    _flags_of_up(
        command(
            "up",
            "start everything on this machine, and keep it alive",
            _up,
            "",
            "--nodes 4 --gpus 8xA100-80GB --placers 4",
            "--headless --state /tmp/demo",
            "--nats-url nats://10.0.0.5:4222 --redis-url redis://10.0.0.6:6379/0",
        )
    )
    _flag_of_state(command("down", "end what `up` started, and wait for it", _down, ""))
    return whole


def _flag_of_state(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--state",
        default=os.environ.get("LEASEHOLD_STATE", ".leasehold"),
        metavar="DIR",
        help="state directory [LEASEHOLD_STATE; default: .leasehold]",
    )


def _flags_of_up(command: argparse.ArgumentParser) -> None:
    _flag_of_state(command)
    add = command.add_argument
    add("--nodes", type=int, help="simulated nodes (default: as before, else 2)")
    add("--gpus", default="", metavar="LAYOUT", help="devices of every node; with commas, of each")
    add("--placers", type=int, default=2, help="placer replicas (default: 2)")
    add("--headless", action="store_true", help="return when ready; `leasehold down` ends it")
    add("--fresh", action="store_true", help="forget what the state directory holds")
    add("--nats-url", default="", help="use this NATS (with JetStream) instead of starting one")
    add("--redis-url", default="", help="use this Valkey or Redis instead of starting one")
    add("--api-port", type=int, default=0, help="of the simulated API server (default: a free one)")
    add("--nats-port", type=int, default=0, help="of the NATS we start (default: a free one)")
    add("--redis-port", type=int, default=0, help="of the Valkey we start (default: a free one)")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--otlp-endpoint", default="", help="send spans there, too: http://HOST:4317")
    add("--without", default="", metavar="PART,..", help="parts that you start yourself")


def _up(flags: argparse.Namespace) -> int:
    from services.cli.up import settings_of, up  # noqa: PLC0415 - start-up time

    return up(settings_of(flags))


def _down(flags: argparse.Namespace) -> int:
    from services.cli.down import down  # noqa: PLC0415 - start-up time
    from services.cli.statedir import StateDir  # noqa: PLC0415 - start-up time

    return down(StateDir.at(flags.state))
