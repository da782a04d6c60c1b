"""Readiness probe for containers: `python -m shared.runtime.probe`.

For images without curl. It runs often, so it imports nothing that is slow to import.
LEASEHOLD_PROBE is HOST:PORT; without it, the port is that of LEASEHOLD_HTTP. Exit code 1: not
ready.
"""

import os
import socket
import sys

PROBE_VARIABLE = "LEASEHOLD_PROBE"
TIMEOUT_S = 2.0
"""The time limit of a liveness probe's connection."""
OK = 200
MAX_PORT = 65535


def address(environ: dict[str, str]) -> str:
    """Return HOST:PORT of the service's HTTP endpoints.

    >>> address({"LEASEHOLD_HTTP": "0.0.0.0:9101"})
    '127.0.0.1:9101'
    """
    if probe := environ.get(PROBE_VARIABLE, ""):
        return probe
    _, _, port = environ.get("LEASEHOLD_HTTP", "").rpartition(":")
    return f"127.0.0.1:{port or 9100}"


def request_readiness(where: str, path: str = "/readyz") -> tuple[int, str]:
    """Raises OSError if there is no response."""
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port[:6]) > MAX_PORT:
        raise OSError(f"{where!r} is not HOST:PORT")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {where}\r\n\r\n".encode())
        response = b"".join(iter(lambda: connection.recv(65536), b"")).decode(errors="replace")
    head, _, text = response.partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[1].isdecimal():
        raise OSError(f"the response is not HTTP: {response[:40]!r}")
    return int(words[1]), text


def main() -> int:
    where = address(dict(os.environ))
    try:
        status, text = request_readiness(where)
    except OSError as error:
        print(f"http://{where}/readyz: {error}")  # noqa: T201
        return 1
    if status != OK:
        print(f"http://{where}/readyz: {status} {text}")  # noqa: T201
    return int(status != OK)


if __name__ == "__main__":
    sys.exit(main())
