"""Run the simulated cluster: API server and kubelets in one process.

Examples:
  python -m simcluster --state .leasehold/cluster --nodes 3
  python -m simcluster --state /tmp/cluster --port 6443 --nodes 1 --node-cpu 8
  python -m simcluster --state /cluster --host 0.0.0.0 --name simcluster --port 6443
  kubectl --kubeconfig /tmp/cluster/kubeconfig get nodes
"""

import argparse
import asyncio
import logging
import secrets
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from shared.runtime.bad_requests import quiet_no_http
from simcluster.apiserver.http.certificates import certificates, kept_secret
from simcluster.apiserver.http.kubeconfig import write_kubeconfig
from simcluster.apiserver.http.server import ApiServer, ApiSettings, listening
from simcluster.apiserver.storage.persistence import SqliteDisk
from simcluster.apiserver.storage.store import DEFAULT_WINDOW, Store
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.kubelet.settings import NodeSettings

log = logging.getLogger("simcluster")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m simcluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--state", type=Path, required=True, help="directory of all state and the kubeconfig")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--name", default="", help="name by which clients reach it; default: the address")
    add("--port", type=int, default=0, help="port of the API server; 0 takes a free one")
    add("--nodes", type=int, default=0, help="simulated nodes, each with a kubelet (%(default)s)")
    add("--node-prefix", default="node-", help="nodes are called so, and a number (%(default)s)")
    add("--node-cpu", default="64", help="cpu of each node (%(default)s)")
    add("--node-memory", default="512Gi", help="memory of each node (%(default)s)")
    add("--max-pods", type=int, default=110, help="pods per node (%(default)s)")
    add("--window", type=int, default=DEFAULT_WINDOW,
        help="changes kept per kind for watches and continued lists (%(default)s)")  # fmt: skip
    add("--bookmark-s", type=float, default=60.0,
        help="seconds between the bookmarks of a watch (%(default)s)")  # fmt: skip
    return made


def free_port(host: str, kept: Path) -> int:
    """Return the port of the last life if it is free, else another, kept for the next life.

    Clients that hold the old kubeconfig then find a restarted server where they left it.
    """
    for port in (int(kept.read_text()) if kept.exists() else 0, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            kept.write_text(str(found))
            return found
    raise OSError(f"no free port on {host}")


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; the kubeconfig appears when everything answers."""
    state: Path = options.state
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    names = (options.name,) if options.name else ()
    certs = certificates(state / "tls", *names)
    token = kept_secret(state / "token", lambda: secrets.token_urlsafe(32))
    store = Store(SqliteDisk(state / "objects.sqlite"), window=options.window)
    settings = ApiSettings(
        host=options.host,
        port=options.port or free_port(options.host, state / "port"),
        token=token,
        bookmark_s=options.bookmark_s,
    )
    node = NodeSettings(cpu=options.node_cpu, memory=options.node_memory, max_pods=options.max_pods)
    fleet = KubeletFleet(
        store, state, nodes=options.nodes, settings=node, prefix=options.node_prefix
    )
    server = ApiServer(store, settings, runtime=fleet)
    try:
        async with fleet, listening(server, certs) as url:
            known_as = f"https://{options.name}:{urlsplit(url).port}" if options.name else url
            write_kubeconfig(state / "kubeconfig", known_as, certs.ca.read_bytes(), token)
            log.info("listening on %s as %s, nodes %d", url, known_as, options.nodes)
            await stop.wait()
    finally:
        store.close()


def main() -> None:
    """Run the simulated cluster."""
    options = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    quiet_no_http()
    uvloop.run(serve(options))


if __name__ == "__main__":
    main()
