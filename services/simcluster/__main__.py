"""Run the simulated cluster: API server, kubelets and GPUs in one process.

Examples:
  python -m services.simcluster --state .leasehold/cluster
  python -m services.simcluster --state /tmp/cluster --port 6443
  kubectl --kubeconfig /tmp/cluster/kubeconfig get nodes
"""

import argparse
import asyncio
import logging
import secrets
import signal
from pathlib import Path

from services.simcluster.kubeconfig import write_kubeconfig
from services.simcluster.persistence import SqliteDisk
from services.simcluster.server import ApiServer, ApiSettings, listening
from services.simcluster.store import DEFAULT_WINDOW, Store
from services.simcluster.tls import certificates, kept_secret


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m services.simcluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state", type=Path, required=True, help="directory for all state")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--window", type=int, default=DEFAULT_WINDOW, help="changes kept per kind for watches"
    )
    parser.add_argument("--bookmark-s", type=float, default=60.0, help="pause between bookmarks")
    return parser.parse_args()


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    state: Path = options.state
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    certs = certificates(state / "tls")
    token = kept_secret(state / "token", lambda: secrets.token_urlsafe(32))
    store = Store(SqliteDisk(state / "objects.sqlite"), window=options.window)
    settings = ApiSettings(
        host=options.host, port=options.port, token=token, bookmark_s=options.bookmark_s
    )
    server = ApiServer(store, settings)
    try:
        async with listening(server, certs) as where:
            write_kubeconfig(state / "kubeconfig", where.url, certs.ca.read_bytes(), token)
            logging.getLogger(__name__).info("listening", extra={"url": where.url})
            await stop.wait()
    finally:
        store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(arguments()))
