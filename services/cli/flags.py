"""Flags that several commands have."""

import argparse
import os
from collections.abc import Mapping


def of_state(command: argparse.ArgumentParser) -> None:
    """Where `leasehold up` keeps everything."""
    command.add_argument(
        "--state",
        default=os.environ.get("LEASEHOLD_STATE", ".leasehold"),
        metavar="DIR",
        help="state directory [LEASEHOLD_STATE; default: .leasehold]",
    )


def pod_name(text: str) -> str:
    """Read a pod's name, also as `kubectl get -o name` writes it (`pod/NAME`)."""
    before, _, name = text.rpartition("/")
    if before not in ("", "pod"):
        raise argparse.ArgumentTypeError(
            f"{text} is no name of a pod; a namespace is named by itself: {name} -n {before}"
        )
    return name


def of_pod(command: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """Name one pod."""
    command.add_argument(
        "pod",
        metavar="POD",
        type=pod_name,
        nargs=None if needed else "?",
        default="",
        help="the pod's name",
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


def of_server(
    command: argparse.ArgumentParser,
    server: str,
    *,
    url: str,
    credentials: str,
    files: Mapping[str, str],
) -> None:
    """Where `server` is, who we are there, and files for its TLS; the texts say what for."""
    prefix = f"LEASEHOLD_{server.upper()}"
    command.add_argument(
        f"--{server}-url",
        default=os.environ.get(f"{prefix}_URL", ""),
        help=f"{url} [{prefix}_URL; default: as DIR/state.json says]",
    )
    command.add_argument(
        f"--{server}-credentials",
        default=os.environ.get(f"{prefix}_CREDENTIALS", ""),
        metavar="FILE",
        help=f"{credentials} [{prefix}_CREDENTIALS; default: likewise]",
    )
    for what, text in files.items():
        variable = f"{prefix}_{what.upper()}_FILE"
        command.add_argument(
            f"--{server}-{what}-file",
            default=os.environ.get(variable, ""),
            metavar="FILE",
            help=f"{text} [{variable}]",
        )


def of_view(command: argparse.ArgumentParser) -> None:
    """Where all that a view shows is read, and how it is written."""
    of_state(command)
    of_server(
        command,
        "redis",
        url="the ledger",
        credentials="user:secret for the ledger",
        files={
            "ca": "authority of the ledger's certificate, PEM",
            "certificate": "shown to the ledger if it asks for one, PEM",
            "key": "of that certificate, PEM",
        },
    )
    of_api_server(command)
    for_programs(command)
