"""Flags that several commands have."""

import argparse
import os


def of_state(command: argparse.ArgumentParser) -> None:
    """Where `leasehold up` keeps everything."""
    command.add_argument(
        "--state",
        default=os.environ.get("LEASEHOLD_STATE", ".leasehold"),
        metavar="DIR",
        help="state directory [LEASEHOLD_STATE; default: .leasehold]",
    )


def of_pod(command: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Name one pod."""
    command.add_argument(
        "pod", metavar="POD", nargs=None if needed else "?", default="", help="the pod's name"
    )
    command.add_argument("-n", "--namespace", default="default", help="default: default")


def of_api_server(command: argparse.ArgumentParser) -> None:
    """Where pods and nodes are read."""
    command.add_argument(
        "--kubeconfig",
        default=os.environ.get("LEASEHOLD_KUBECONFIG", ""),
        help="the API server [LEASEHOLD_KUBECONFIG; default: as DIR/state.json says]",
    )


def for_programs(command: argparse.ArgumentParser) -> None:
    """Write JSON."""
    command.add_argument("--json", action="store_true", help="for programs; keys stay as they are")


def of_view(command: argparse.ArgumentParser) -> None:
    """Where all that a view shows is read, and how it is written."""
    of_state(command)
    add = command.add_argument
    environ = os.environ
    add(
        "--redis-url",
        default=environ.get("LEASEHOLD_REDIS_URL", ""),
        help="the ledger [LEASEHOLD_REDIS_URL; default: as DIR/state.json says]",
    )
    add(
        "--redis-credentials",
        default=environ.get("LEASEHOLD_REDIS_CREDENTIALS", ""),
        metavar="FILE",
        help="user:secret for the ledger [LEASEHOLD_REDIS_CREDENTIALS; default: likewise]",
    )
    for what, text in (
        ("ca", "authority of the ledger's certificate, PEM"),
        ("certificate", "shown to the ledger if it asks for one, PEM"),
        ("key", "of that certificate, PEM"),
    ):
        variable = f"LEASEHOLD_REDIS_{what.upper()}_FILE"
        add(
            f"--redis-{what}-file",
            default=environ.get(variable, ""),
            metavar="FILE",
            help=f"{text} [{variable}]",
        )
    of_api_server(command)
    for_programs(command)
