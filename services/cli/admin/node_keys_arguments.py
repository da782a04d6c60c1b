"""The command line of `leasehold node-keys`; what it does is imported when it is called."""

import argparse
import os
import platform
from collections.abc import Callable

ABOUT = """\
For a node agent that is a unit of its node's init system, which has no pod and so no projected
tokens. Two tokens of the agent's service account are asked for that are bound to the Node: one for
the API server and the kubelet, one for NATS. They are good for this node only, until they expire
or the Node is deleted. Beside them are written a kubeconfig that names the first (if there is none
yet, with the server of the kubeconfig that this command used) and the authority of NATS.

Run by an administrator the first time, and the directory copied to the node; from then on by the
node itself, with that kubeconfig, where the component node-unit lets it."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    keys = command(
        "node-keys",
        "write, or renew, the tokens of a node agent that runs without a pod",
        _write,
        "--node gpu-1 --out gpu-1",
        "--out /etc/leasehold/keys --kubeconfig /etc/leasehold/keys/kubeconfig",
        "--node gpu-1 --out gpu-1 --days 7",
    )
    keys.description = f"{keys.description}\n\n{ABOUT}"
    option, environ = keys.add_argument, os.environ
    option("--out", required=True, metavar="DIR", help="written there, for its owner only")
    option(
        "--node",
        default=environ.get("LEASEHOLD_NODE", "") or platform.node().lower(),
        help="the node [LEASEHOLD_NODE; default: this machine]",
    )
    option("--days", type=int, default=30, help="how long they are to be good (default: 30)")
    option("-n", "--namespace", default="leasehold-system", help="default: leasehold-system")
    option(
        "--kubeconfig",
        default=environ.get("LEASEHOLD_KUBECONFIG", ""),
        help="the API server [LEASEHOLD_KUBECONFIG; default: as kubectl finds it]",
    )


def _write(flags: argparse.Namespace) -> int:
    from services.cli.admin.node_keys import node_keys

    return node_keys(flags)
