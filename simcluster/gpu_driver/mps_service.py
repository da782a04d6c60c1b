"""What the control daemons of MPS of the simulated GPUs share, whatever version they speak.

A program that uses CUDA connects to the same sockets as commands do. It gets the limits that hold
at that moment, and is a client for as long as it keeps the connection. Servers are processes that
do nothing, so that they can be killed by their PIDs.

`faults.json` in the daemon's log directory, read at each command and connection, can have

    ignores_limits    true: commands that set limits reply as ever, and set nothing
    terminate_hangs   true: the command that terminates a client does not return
    wedged            PIDs of servers whose new clients hang, while all commands reply as ever
    silent            true: no command gets a reply
    missing           UUIDs of GPUs that are gone (version 3)
"""

import contextlib
import json
import os
import re
import selectors
import socket
import struct
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simcluster.gpu_driver.mps_control import DEFAULT_PIPES, PIPES, PROTOCOL, SOCKET

LOGS = "CUDA_MPS_LOG_DIRECTORY"
PID_FILE = "nvidia-cuda-mps-control.pid"
FAULTS = "faults.json"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)B?")
_LOOK_S = 0.5
_MOST_LINE = 65536
_CREDENTIALS = struct.Struct("3i")
"""PID, UID and GID of a socket's peer."""


class ControlDaemon(ABC):
    """A control daemon; one command changes its state at a time."""

    version: int

    def __init__(self, pipes: Path, logs: Path) -> None:
        self.pipes = pipes
        self.logs = logs
        self.lock = threading.Lock()
        self.quits = False
        """Whether it ends once the command that says so has its reply."""
        self.ended = threading.Event()
        self.devices = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        self._selector = selectors.DefaultSelector()

    @abstractmethod
    def reply(self, line: str, uid: int) -> str:
        """Carry out a command of a user; return its output."""

    @abstractmethod
    def connect(self, client: int, connection: socket.socket, uid: int, place: Any) -> str:
        """Make a program the client of the server at a socket's place; return what it gets."""

    @abstractmethod
    def disconnect(self, client: int, connection: socket.socket) -> None:
        """Forget a client that has ended."""

    @abstractmethod
    def bury(self) -> None:
        """Forget servers whose processes have ended; the lock is held."""

    @abstractmethod
    def end_servers(self) -> None:
        """End all servers."""

    def fault(self, name: str) -> Any:
        """Return what `faults.json` has under a name, or None."""
        try:
            return json.loads((self.logs / FAULTS).read_text()).get(name)
        except (OSError, ValueError):
            return None

    def wait_if_wedged(self, server: int) -> None:
        """Hang as clients of a wedged server do."""
        if server in (self.fault("wedged") or ()):
            self.ended.wait()

    def open_socket(self, directory: Path, place: Any) -> None:
        """Accept clients, and commands of all users, in a directory; a dead socket is replaced."""
        path = directory / SOCKET
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(128)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, place)

    def close_sockets(self, places: Iterable[Any]) -> None:
        """Accept nothing in these places any more."""
        gone = set(places)
        for key in list((self._selector.get_map() or {}).values()):
            if key.data in gone and isinstance(key.fileobj, socket.socket):
                Path(key.fileobj.getsockname()).unlink(missing_ok=True)
                self._selector.unregister(key.fileobj)
                key.fileobj.close()

    def accept(self) -> None:
        """Have a thread for each connection, until the daemon ends."""
        while not self.ended.is_set():
            for key, _ in self._selector.select(_LOOK_S):
                with contextlib.suppress(OSError):  # closed meanwhile
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    arguments = (connection, key.data)
                    threading.Thread(target=self._handle, args=arguments, daemon=True).start()

    def _handle(self, connection: socket.socket, place: Any) -> None:
        with connection, connection.makefile("rb") as file, contextlib.suppress(OSError):
            line = os.fsdecode(file.readline(_MOST_LINE)).rstrip("\n")
            uid = _uid(connection)
            kind, _, rest = line.partition(" ")
            if kind == "client" and rest.isdecimal():
                client = int(rest)
                try:
                    connection.sendall(self.connect(client, connection, uid, place).encode())
                    file.read()
                finally:
                    self.disconnect(client, connection)
                return
            if self.fault("silent"):
                self.ended.wait()
            reply = f"{self.version}\n" if line == PROTOCOL else self.reply(line, uid)
            connection.sendall(os.fsencode(reply))
            if self.quits:
                self.ended.set()


def _uid(connection: socket.socket) -> int:
    """Return the user at the other end: 0 for who runs the daemon, so that tests need no root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = int(_CREDENTIALS.unpack(credentials)[1])
    return 0 if uid == os.getuid() else uid


def server_process() -> "subprocess.Popen[bytes]":
    """Start a server; it ends by itself within a second of a daemon that is killed."""
    watch = ["tail", f"--pid={os.getpid()}", "-s", "0.5", "-f", "/dev/null"]
    return subprocess.Popen(watch)  # noqa: S603 - a program of every Linux


def end(server: "subprocess.Popen[bytes]") -> None:
    server.kill()
    server.wait()


def terminate(connections: Iterable[socket.socket]) -> None:
    """End the GPU work of clients: their next call of CUDA fails."""
    for connection in connections:
        with contextlib.suppress(OSError):  # it has ended
            connection.shutdown(socket.SHUT_RDWR)


def size_in_bytes(size: str) -> int:
    """Return the bytes of such a size as `512M`. Raises ValueError."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(size)
    return int(match[1]) * _UNITS[match[2]]


def serve(made: "type[ControlDaemon]") -> None:
    """Run a daemon until it is to quit, or its directory is gone; it writes to the pipe in argv."""
    pipes = Path(os.environ.get(PIPES, DEFAULT_PIPES))
    logs = Path(os.environ.get(LOGS, "/var/log/nvidia-mps"))
    pipes.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    daemon = made(pipes, logs)
    daemon.open_socket(pipes, None)
    (pipes / PID_FILE).write_text(f"{os.getpid()}\n")
    threading.Thread(target=daemon.accept, daemon=True).start()
    os.write(int(sys.argv[1]), b"1")
    os.close(int(sys.argv[1]))
    while not daemon.ended.wait(_LOOK_S) and (pipes / SOCKET).exists():
        with daemon.lock:
            daemon.bury()
    daemon.ended.set()
    with daemon.lock:
        daemon.end_servers()
    (pipes / SOCKET).unlink(missing_ok=True)
    (pipes / PID_FILE).unlink(missing_ok=True)
