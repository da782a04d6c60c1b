"""Run the simulated cluster: API server, controllers, scheduler and kubelets in one process.

Examples:
  python -m simcluster --state .leasehold/cluster --nodes 3
  python -m simcluster --state /tmp/cluster --port 6443 --nodes 1 --node-cpu 8
  python -m simcluster --state /cluster --host 0.0.0.0 --name simcluster --port 6443
  kubectl --kubeconfig /tmp/cluster/kubeconfig get nodes
"""

import argparse
import logging
from pathlib import Path

import uvloop

from shared.model.errors import RequestError
from shared.model.quantity import parse_count
from shared.runtime.health import suppress_bad_request_tracebacks
from shared.runtime.variables import number_argument
from simcluster.apiserver.storage.store import DEFAULT_WINDOW
from simcluster.wiring import serve


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m simcluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--state", type=Path, required=True, help="directory of the state and the kubeconfig")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--name", default="", help="name that clients use; default: the address")
    add("--port", type=number_argument(int, at_most=65535), default=0,
        help="port of the API server; 0 takes a free one")  # fmt: skip
    add(
        "--nodes",
        type=number_argument(int),
        default=0,
        help="simulated nodes, each with a kubelet (%(default)s)",
    )
    add(
        "--node-prefix", default="node-", help="prefix of node names, before a number (%(default)s)"
    )
    add("--node-cpu", type=_quantity, default="64", help="cpu of each node (%(default)s)")
    add("--node-memory", type=_quantity, default="512Gi", help="memory of each node (%(default)s)")
    add("--max-pods", type=number_argument(int, 1), default=110, help="pods per node (%(default)s)")
    add("--node-labels", type=_labels, default={}, metavar="NAME=VALUE,..",
        help="labels of each node, besides those that every kubelet sets")  # fmt: skip
    add("--programs", type=lambda text: tuple(filter(None, text.split(","))), default=(),
        help="further programs of this machine, with commas, that containers run as processes of "
        "this user, such as python3 (default: gpu-load, nvidia-smi, sh, bash, tar)")  # fmt: skip
    add("--host-pods", action="store_true",
        help="containers run whatever command they have, as processes of this user, with the "
        "mounts of device plugins, and nodes are of its size; images are ignored")  # fmt: skip
    add("--scheduler-config", type=Path,
        help="KubeSchedulerConfiguration of a second scheduler, with one extender")  # fmt: skip
    add("--install", type=Path,
        help="JSON file of objects to create, and accounts to write kubeconfigs of")  # fmt: skip
    add("--window", type=number_argument(int, 1), default=DEFAULT_WINDOW,
        help="changes per kind that watches and paged lists can go back (%(default)s)")  # fmt: skip
    add("--bookmark-s", type=number_argument(float, 0.01), default=60.0,
        help="seconds between the bookmarks of a watch (%(default)s)")  # fmt: skip
    return made


def _labels(text: str) -> dict[str, str]:
    """Return labels as a kubelet's flag has them."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if all(name and middle for name, middle, _ in pairs):
        return {name: value for name, _, value in pairs}
    raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, with commas between several")


def _quantity(text: str) -> str:
    """Return a valid quantity of 0 or more."""
    try:
        if parse_count(text) >= 0:
            return text
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    raise argparse.ArgumentTypeError(f"{text!r} must be 0 or more")


def main() -> None:
    """Run the simulated cluster."""
    made = parser()
    try:
        options = made.parse_args()
    except RequestError as error:
        made.exit(2, f"{made.prog}: {error}\n")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    suppress_bad_request_tracebacks()
    uvloop.run(serve(options))


if __name__ == "__main__":
    main()
