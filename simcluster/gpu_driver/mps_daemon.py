"""The control daemon of MPS of the simulated GPUs, which `mps_control.py` starts.

A program that uses CUDA connects to the same socket as commands do. It gets the limits that its
server has at that moment, and is a client for as long as it keeps the connection. Servers are
processes that do nothing, so that they can be killed by their PIDs.

`faults.json` in the daemon's log directory, read at each command and connection, can have

    ignores_limits    true: commands that set limits reply as ever, and set nothing
    terminate_hangs   true: terminate_client does not return
    wedged            PIDs of servers whose new clients hang, while all commands reply as ever
    silent            true: no command gets a reply
"""

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SOCKET = "control"
PID_FILE = "nvidia-cuda-mps-control.pid"
FAULTS = "faults.json"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)B?")
_LOOK_S = 0.5


@dataclass
class Limits:
    """What a client gets: a percentage of the threads, and memory by device as it was written."""

    percent: float = 100.0
    memory: dict[str, str] = field(default_factory=dict)

    def copy(self) -> "Limits":
        """Return the limits of a server that starts now."""
        return Limits(self.percent, dict(self.memory))


@dataclass
class Server:
    """A server of MPS, and the connections of its clients by PID."""

    process: "subprocess.Popen[bytes]"
    limits: Limits
    clients: dict[int, socket.socket] = field(default_factory=dict)


class Daemon:
    """The state of a control daemon; one command changes it at a time."""

    def __init__(self, pipes: Path, logs: Path) -> None:
        self.pipes = pipes
        self.logs = logs
        self.defaults = Limits()
        self.servers: dict[int, Server] = {}
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.devices = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        percent = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        if percent:
            self.defaults.percent = float(percent)
        for entry in os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").split(","):
            device, _, size = entry.partition("=")
            if size:
                self.defaults.memory[device] = size

    def fault(self, name: str) -> Any:
        """Return what `faults.json` has under a name, or None."""
        try:
            return json.loads((self.logs / FAULTS).read_text()).get(name)
        except (OSError, ValueError):
            return None

    def reply(self, line: str) -> str:
        """Carry out a command; return its output."""
        words = line.split()
        name, arguments = (words[0], words[1:]) if words else ("", [])
        method = getattr(self, f"do_{name}", None)
        if method is None:
            return f"Unrecognized command: {name}\n"
        if name == "terminate_client" and self.fault("terminate_hangs"):
            self.ended.wait()
        with self.lock:
            self._bury()
            try:
                return str(method(*arguments))
            except (TypeError, ValueError, KeyError):
                return f"{name}: invalid argument\n"

    def do_get_server_list(self) -> str:
        """List the PIDs of servers."""
        return "".join(f"{pid}\n" for pid in self.servers)

    def do_get_server_status(self, pid: str) -> str:
        """Return the state of a server: a wedged one looks like any other."""
        _ = self.servers[int(pid)]
        return "ACTIVE\n"

    def do_start_server(self, option: str, uid: str) -> str:
        """Start a server for a user."""
        if option != "-uid":
            raise ValueError(option)
        self._start_server()
        return ""

    def do_get_client_list(self, pid: str) -> str:
        """List the PIDs of a server's clients."""
        return "".join(f"{client}\n" for client in self.servers[int(pid)].clients)

    def do_set_default_active_thread_percentage(self, percent: str) -> str:
        """Set what servers that start later have."""
        return self._set_percent(self.defaults, percent)

    def do_get_default_active_thread_percentage(self) -> str:
        """Return it."""
        return f"{self.defaults.percent}\n"

    def do_set_active_thread_percentage(self, pid: str, percent: str) -> str:
        """Set what clients of a server that connect later have."""
        return self._set_percent(self.servers[int(pid)].limits, percent)

    def do_get_active_thread_percentage(self, pid: str) -> str:
        """Return it."""
        return f"{self.servers[int(pid)].limits.percent}\n"

    def do_set_default_device_pinned_mem_limit(self, device: str, size: str) -> str:
        """Set what servers that start later have; a device that is not there is accepted."""
        return self._set_memory(self.defaults, device, size)

    def do_get_default_device_pinned_mem_limit(self, device: str) -> str:
        """Return it as it was written, or an empty line."""
        return f"{self.defaults.memory.get(device, '')}\n"

    def do_set_device_pinned_mem_limit(self, pid: str, device: str, size: str) -> str:
        """Set what clients of a server that connect later have."""
        return self._set_memory(self.servers[int(pid)].limits, device, size)

    def do_get_device_pinned_mem_limit(self, pid: str, device: str) -> str:
        """Return it as it was written, or an empty line."""
        return f"{self.servers[int(pid)].limits.memory.get(device, '')}\n"

    def do_terminate_client(self, pid: str, client: str) -> str:
        """End the GPU work of a client: its next call of CUDA fails."""
        connection = self.servers[int(pid)].clients.pop(int(client))
        connection.shutdown(socket.SHUT_RDWR)
        return "0\n"

    def do_ps(self) -> str:
        """Return the table of clients."""
        rows = [
            f"{client:<7} ... {pid:<7} {','.join(self.devices):<44} {os.getpid()} {_name(client)}\n"
            for pid, server in self.servers.items()
            for client in server.clients
        ]
        return "".join(["PID     ID  SERVER  DEVICE NAMESPACE COMMAND\n", *rows])

    def do_quit(self, *_: str) -> str:
        """End the daemon and its servers."""
        self.ended.set()
        return ""

    def connect(self, client: int, connection: socket.socket) -> str:
        """Make a program a client; return what it gets, or hang as a wedged server's clients do."""
        with self.lock:
            self._bury()
            server = next(iter(self.servers.values()), None) or self._start_server()
            pid = server.process.pid
            server.clients[client] = connection
            limits = server.limits.copy()
        if pid in (self.fault("wedged") or ()):
            self.ended.wait()
        memory = ",".join(
            f"{self._uuid(device)}={_bytes(size)}" for device, size in limits.memory.items()
        )
        return f"ok {pid} {limits.percent:g} {memory}\n"

    def disconnect(self, client: int, connection: socket.socket) -> None:
        """Forget a client that has ended."""
        with self.lock:
            for server in self.servers.values():
                if server.clients.get(client) is connection:
                    del server.clients[client]

    def end_servers(self) -> None:
        """Kill all servers."""
        for server in self.servers.values():
            server.process.kill()
            server.process.wait()

    def _start_server(self) -> Server:
        # It ends by itself within a second of a daemon that is killed.
        watch = ["tail", f"--pid={os.getpid()}", "-s", "0.5", "-f", "/dev/null"]
        process = subprocess.Popen(watch)  # noqa: S603 - a program of every Linux
        server = self.servers[process.pid] = Server(process, self.defaults.copy())
        return server

    def _bury(self) -> None:
        for pid, server in list(self.servers.items()):
            if server.process.poll() is not None:
                del self.servers[pid]
                for connection in server.clients.values():
                    connection.shutdown(socket.SHUT_RDWR)

    def _set_percent(self, limits: Limits, percent: str) -> str:
        if not 0 < float(percent) <= 100:
            raise ValueError(percent)
        if not self.fault("ignores_limits"):
            limits.percent = float(percent)
        return f"{float(percent)}\n"

    def _set_memory(self, limits: Limits, device: str, size: str) -> str:
        _ = _bytes(size)
        if not self.fault("ignores_limits"):
            limits.memory[device] = size
        return ""

    def _uuid(self, device: str) -> str:
        is_index = device.isdecimal() and int(device) < len(self.devices)
        return self.devices[int(device)] if is_index else device


def _bytes(size: str) -> int:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(size)
    return int(match[1]) * _UNITS[match[2]]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


class _Connection(socketserver.StreamRequestHandler):
    """A command and its reply, or a client for as long as it lives."""

    def handle(self) -> None:
        daemon: Daemon = self.server.daemon  # type: ignore[attr-defined]
        line = self.rfile.readline().decode(errors="replace").strip()
        kind, _, rest = line.partition(" ")
        if kind != "client":
            if daemon.fault("silent"):
                daemon.ended.wait()
            self.wfile.write(daemon.reply(line).encode())
            return
        pid = int(rest)
        try:
            self.wfile.write(daemon.connect(pid, self.connection).encode())
            self.rfile.read()
        finally:
            daemon.disconnect(pid, self.connection)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    daemon: Daemon

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that is killed is not an error."""


def main() -> None:
    """Run until it is to quit, or its directory is gone; the argument is a pipe for its start."""
    pipes = Path(os.environ.get(PIPES, "/tmp/nvidia-mps"))  # noqa: S108 - the real one's default
    logs = Path(os.environ.get(LOGS, "/var/log/nvidia-mps"))
    pipes.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    daemon = Daemon(pipes, logs)
    path = pipes / SOCKET
    path.unlink(missing_ok=True)
    with _Server(str(path), _Connection) as server:
        server.daemon = daemon
        path.chmod(0o666)
        (pipes / PID_FILE).write_text(f"{os.getpid()}\n")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.write(int(sys.argv[1]), b"1")
        os.close(int(sys.argv[1]))
        while not daemon.ended.wait(_LOOK_S) and path.exists():
            pass
        daemon.end_servers()
        path.unlink(missing_ok=True)
        (pipes / PID_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
