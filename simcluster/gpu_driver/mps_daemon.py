"""The control daemon of MPS of the simulated GPUs in version 2 of its protocol.

`mps_control.py` starts it; what it shares with version 3, and its faults, are in `mps_service.py`.
"""

import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from simcluster.gpu_driver.mps_service import (
    ControlDaemon,
    end,
    serve,
    server_process,
    size_in_bytes,
    terminate,
)


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


class Daemon(ControlDaemon):
    """The state of a control daemon."""

    version = 2

    def __init__(self, pipes: Path, logs: Path) -> None:
        super().__init__(pipes, logs)
        self.defaults = Limits()
        self.servers: dict[int, Server] = {}
        percent = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        if percent:
            self.defaults.percent = float(percent)
        for entry in os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").split(","):
            device, _, size = entry.partition("=")
            if size:
                self.defaults.memory[device] = size

    def reply(self, line: str, uid: int) -> str:
        """Carry out a command; return its output."""
        words = line.split()
        name, arguments = (words[0], words[1:]) if words else ("", [])
        method = getattr(self, f"do_{name}", None)
        if method is None:
            return f"Unrecognized command: {name}\n"
        if name == "terminate_client" and self.fault("terminate_hangs"):
            self.ended.wait()
        with self.lock:
            self.bury()
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
        terminate([self.servers[int(pid)].clients.pop(int(client))])
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
        self.quits = True
        return ""

    def connect(self, client: int, connection: socket.socket, uid: int, place: None) -> str:
        """Make a program a client; return what it gets, or hang as a wedged server's clients do."""
        with self.lock:
            self.bury()
            server = next(iter(self.servers.values()), None) or self._start_server()
            pid = server.process.pid
            server.clients[client] = connection
            limits = server.limits.copy()
        self.wait_if_wedged(pid)
        memory = ",".join(
            f"{self._uuid(device)}={size_in_bytes(size)}" for device, size in limits.memory.items()
        )
        return f"ok {pid} {limits.percent:g} {memory}\n"

    def disconnect(self, client: int, connection: socket.socket) -> None:
        """Forget a client that has ended."""
        with self.lock:
            for server in self.servers.values():
                if server.clients.get(client) is connection:
                    del server.clients[client]

    def end_servers(self) -> None:
        """End all servers."""
        for server in self.servers.values():
            end(server.process)

    def bury(self) -> None:
        """Forget servers whose processes have ended; their clients lose their connections."""
        for pid, server in list(self.servers.items()):
            if server.process.poll() is not None:
                del self.servers[pid]
                terminate(server.clients.values())

    def _start_server(self) -> Server:
        process = server_process()
        server = self.servers[process.pid] = Server(process, self.defaults.copy())
        return server

    def _set_percent(self, limits: Limits, percent: str) -> str:
        if not 0 < float(percent) <= 100:
            raise ValueError(percent)
        if not self.fault("ignores_limits"):
            limits.percent = float(percent)
        return f"{float(percent)}\n"

    def _set_memory(self, limits: Limits, device: str, size: str) -> str:
        _ = size_in_bytes(size)
        if not self.fault("ignores_limits"):
            limits.memory[device] = size
        return ""

    def _uuid(self, device: str) -> str:
        is_index = device.isdecimal() and int(device) < len(self.devices)
        return self.devices[int(device)] if is_index else device


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def main() -> None:
    """Run until it is to quit, or its directory is gone."""
    serve(Daemon)
