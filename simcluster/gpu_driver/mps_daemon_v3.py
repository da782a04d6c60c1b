"""The control daemon of MPS of the simulated GPUs in version 3 of its protocol.

Its servers and their namespaces have names: https://docs.nvidia.com/deploy/mps/mpsv3-interface.html.
`mps_control.py` starts it; what it shares with version 2, and its faults, are in `mps_service.py`,
the forms of its commands in `mps_commands.py`. A configuration file, SM partitions, locality
domains, priorities and features are not simulated, nor that clients see their server's GPUs only.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from simcluster.gpu_driver.mps_commands import (
    CLIENT_COLUMNS,
    NAMESPACE_FIELDS,
    NONE,
    SERVER_FIELDS,
    Command,
    CommandError,
    field_value,
    parse,
    table,
)
from simcluster.gpu_driver.mps_control import MOST_PATH, MULTIUSER, QUIT, SOCKET
from simcluster.gpu_driver.mps_service import (
    ControlDaemon,
    end,
    serve,
    server_process,
    size_in_bytes,
    terminate,
)

DEFAULT = "default"
_EVERY_GPU = "*"


@dataclass
class Namespace:
    """Limits as they were written, and the connections of clients by PID."""

    limits: dict[str, str] = field(default_factory=dict)
    clients: dict[int, socket.socket] = field(default_factory=dict)


@dataclass
class Server:
    """A server of MPS with a name."""

    name: str
    uid: int
    process: "subprocess.Popen[bytes]"
    devices: str
    """What it was restricted to, as it was written, or an empty text."""
    namespaces: dict[str, Namespace] = field(default_factory=dict)

    @property
    def clients(self) -> Iterator[tuple[int, socket.socket]]:
        for namespace in self.namespaces.values():
            yield from namespace.clients.items()


Place = tuple[str, str] | tuple[str]
"""Of a socket: a server and a namespace, or only a server."""


class Daemon(ControlDaemon):
    """The state of a control daemon."""

    version = 3

    def __init__(self, pipes: Path, logs: Path) -> None:
        super().__init__(pipes, logs)
        self.servers: dict[str, Server] = {}
        self.is_multiuser = MULTIUSER in sys.argv
        for directory in pipes.iterdir():
            if (directory / SOCKET).is_socket():
                _remove(directory)

    def reply(self, line: str, uid: int) -> str:
        """Carry out a command; return its exit code, a line break, and its output."""
        try:
            output = self._output(line.split("\0")[1:], uid)
        except CommandError as error:
            return f"1\n{error}\n"
        except OSError as error:
            return f"1\n{error.filename}: {error.strerror}\n"
        return f"0\n{output}"

    def _output(self, words: list[str], uid: int) -> str:
        if not words:
            raise CommandError(
                "this daemon has protocol 3, whose commands are MODULE VERB [ARGUMENTS]"
            )
        if words == [QUIT]:
            _require(uid, (0,), "QUIT")
            self.quits = True
            return ""
        command = parse(words)
        if command.title == "CLIENT TERMINATE" and self.fault("terminate_hangs"):
            self.ended.wait()
        with self.lock:
            self.bury()
            output = getattr(self, f"_{command.module}_{command.verb}")(command, uid)
            return str(output or "")

    # Servers

    def _server_create(self, command: Command, uid: int) -> None:
        if command.name is None and "uid" not in command.options:
            raise CommandError("server create: a name or --uid is required")
        owner = self._owner(command, uid)
        name = command.name or f"uid_{owner}"
        _require(uid, (0, owner), command.title)
        if name in self.servers:
            raise CommandError(f"server '{name}' exists")
        self._start(name, owner, command.options.get("allowed-devices", ""))

    def _server_delete(self, command: Command, uid: int) -> None:
        server = self._server(command.names[0])
        _require(uid, (0, server.uid), command.title)
        if any(server.clients) and not command.has("force"):
            raise CommandError(f"server '{server.name}' has active clients")
        self._end(server)

    def _server_list(self, command: Command, _: int) -> str:
        servers = [self._server(command.name)] if command.name else self.servers.values()
        rows = [self._server_row(server) for server in servers]
        return table(SERVER_FIELDS, rows, command.options.get("format", "table"))

    def _server_get(self, command: Command, _: int) -> str:
        return field_value(self._server_row(self._server(command.names[0])), command.names[1])

    def _server_set(self, command: Command, uid: int) -> None:
        server = self._server(command.names[0])
        _require(uid, (0, server.uid), command.title)
        owner = self._owner(command, server.uid)
        if command.limits():
            self._set(server, DEFAULT, command)
        server.uid = owner

    # Namespaces

    def _namespace_create(self, command: Command, uid: int) -> None:
        server = self._server(command.options["server"])
        _require(uid, (0, server.uid), command.title)
        name = command.names[0]
        if name in server.namespaces:
            raise CommandError(f"namespace '{name}' exists in server '{server.name}'")
        self._open(server, name)

    def _namespace_delete(self, command: Command, uid: int) -> None:
        server = self._server(command.options["server"])
        _require(uid, (0, server.uid), command.title)
        name = command.names[0]
        namespace = _namespace(server, name)
        if name == DEFAULT:
            raise CommandError("namespace 'default' cannot be deleted")
        if namespace.clients and not command.has("force"):
            raise CommandError(f"namespace '{name}' has active clients")
        del server.namespaces[name]
        terminate(namespace.clients.values())
        self.close_sockets([(server.name, name)])
        _remove(self.pipes / server.name / name)

    def _namespace_list(self, command: Command, _: int) -> str:
        name = command.options.get("server")
        servers = [self._server(name)] if name is not None else self.servers.values()
        rows = [
            self._namespace_row(server, namespace)
            for server in servers
            for namespace in server.namespaces
            if command.name in {None, namespace}
        ]
        if command.name is not None and not rows:
            raise CommandError(f"no namespace '{command.name}'")
        return table(NAMESPACE_FIELDS, rows, command.options.get("format", "table"))

    def _namespace_get(self, command: Command, _: int) -> str:
        name, server_name, wanted = command.names
        return field_value(self._namespace_row(self._server(server_name), name), wanted)

    def _namespace_set(self, command: Command, uid: int) -> None:
        server = self._server(command.options["server"])
        _require(uid, (0, server.uid), command.title)
        self._set(server, command.names[0], command)

    # Clients

    def _client_list(self, command: Command, uid: int) -> str:
        name = command.options.get("server")
        if name is not None:
            servers = [self._server(name)]
        else:
            owners = {server.uid for server in self.servers.values()}
            shown = owners if command.has("all") else {uid}
            servers = [server for server in self.servers.values() if server.uid in shown]
        rows = [
            self._client_row(server, namespace, pid)
            for server in servers
            for namespace in server.namespaces
            for pid in server.namespaces[namespace].clients
        ]
        return table(CLIENT_COLUMNS, rows, command.options.get("format", "table"))

    def _client_get(self, command: Command, _: int) -> str:
        pid, wanted = command.names
        server, name = self._client(pid)
        return field_value(self._client_row(server, name, int(pid)), wanted)

    def _client_terminate(self, command: Command, uid: int) -> None:
        pid = command.names[0]
        server, name = self._client(pid)
        _require(uid, (0, server.uid), command.title)
        terminate([server.namespaces[name].clients.pop(int(pid))])

    # Programs

    def connect(self, client: int, connection: socket.socket, uid: int, place: Place | None) -> str:
        """Make a program a client; return what it gets, or hang as a wedged server's clients do."""
        with self.lock:
            self.bury()
            try:
                server, name = self._place(place, uid)
            except CommandError:
                return "refused\n"
            namespace = server.namespaces[name]
            namespace.clients[client] = connection
            limits = dict(namespace.limits)
        self.wait_if_wedged(server.process.pid)
        size = limits.get("pinned-memory-limit")
        devices = self._uuids(server) or [_EVERY_GPU]
        memory = ",".join(f"{uuid}={size_in_bytes(size)}" for uuid in devices) if size else ""
        return f"ok {server.process.pid} {limits.get('active-thread-percentage', 100)} {memory}\n"

    def disconnect(self, client: int, connection: socket.socket) -> None:
        """Forget a client that has ended."""
        with self.lock:
            for server in self.servers.values():
                for namespace in server.namespaces.values():
                    if namespace.clients.get(client) is connection:
                        del namespace.clients[client]

    def _place(self, place: Place | None, uid: int) -> tuple[Server, str]:
        """Return the server and namespace of a socket; one for its owner at the daemon's own."""
        if place is None:
            owner = 0 if self.is_multiuser else uid
            name = f"uid_{owner}"
            return self.servers.get(name) or self._start(name, owner, ""), DEFAULT
        server = self._server(place[0])
        if not self.is_multiuser:
            _require(uid, (server.uid,), "CONNECT")
        name = place[-1] if len(place) > 1 else DEFAULT
        _ = _namespace(server, name)
        return server, name

    # State

    def end_servers(self) -> None:
        """End all servers; nothing is left of their limits."""
        for server in list(self.servers.values()):
            self._end(server)

    def bury(self) -> None:
        """Forget servers whose processes have ended; their clients lose their connections."""
        for server in list(self.servers.values()):
            if server.process.poll() is not None:
                self._forget(server)

    def _start(self, name: str, owner: int, devices: str) -> Server:
        """Start a server; without one of its GPUs, its process ends at once."""
        server = Server(name, owner, server_process(), devices)
        try:
            self._open(server, DEFAULT)
            self._listen(self.pipes / name, (name,))
        except (CommandError, OSError):
            self._end(server)
            raise
        self.servers[name] = server
        missing = self.fault("missing") or ()
        present = {*self.devices, *map(str, range(len(self.devices)))}
        if any(
            device in missing or (present and device not in present)
            for device in filter(None, devices.split(","))
        ):
            server.process.kill()
        return server

    def _end(self, server: Server) -> None:
        end(server.process)
        self._forget(server)

    def _forget(self, server: Server) -> None:
        self.servers.pop(server.name, None)
        terminate(connection for _, connection in server.clients)
        self.close_sockets([(server.name,), *((server.name, name) for name in server.namespaces)])
        _remove(self.pipes / server.name)

    def _open(self, server: Server, name: str) -> None:
        self._listen(self.pipes / server.name / name, (server.name, name))
        server.namespaces[name] = Namespace()

    def _listen(self, directory: Path, place: Place) -> None:
        if len(os.fsencode(directory / SOCKET)) > MOST_PATH:
            raise CommandError(f"the path {directory / SOCKET} is too long")
        for made in (directory.parent, directory):
            made.mkdir(exist_ok=True)
            made.chmod(0o755)
        self.open_socket(directory, place)

    def _set(self, server: Server, name: str, command: Command) -> None:
        namespace = _namespace(server, name)
        if namespace.clients:
            raise CommandError(f"namespace '{name}' has active clients")
        if not self.fault("ignores_limits"):
            namespace.limits |= command.limits()

    def _owner(self, command: Command, default: int) -> int:
        owner = int(command.options.get("uid", default))
        if self.is_multiuser and owner != 0:
            raise CommandError("only --uid=0 is allowed in multiuser mode")
        return owner

    def _server(self, name: str) -> Server:
        if name not in self.servers:
            raise CommandError(f"no server '{name}'")
        return self.servers[name]

    def _client(self, pid: str) -> tuple[Server, str]:
        for server in self.servers.values():
            for name, namespace in server.namespaces.items():
                if pid.isdecimal() and int(pid) in namespace.clients:
                    return server, name
        raise CommandError(f"no client '{pid}'")

    def _uuids(self, server: Server) -> list[str]:
        """Return the GPUs of a server, or nothing if it has all, and they are not known here."""
        by_index = dict(zip(map(str, range(len(self.devices))), self.devices, strict=True))
        allowed = list(filter(None, server.devices.split(",")))
        return [by_index.get(device, device) for device in allowed] or self.devices

    def _server_row(self, server: Server) -> dict[str, str]:
        return {
            "name": server.name,
            "uid": str(server.uid),
            "pid": str(server.process.pid),
            "status": "Ready",
            "pipe-directory": str(self.pipes / server.name),
            "allowed-devices": server.devices or NONE,
            "context-ids": NONE,
        }

    def _namespace_row(self, server: Server, name: str) -> dict[str, str]:
        return {
            **dict.fromkeys(NAMESPACE_FIELDS, NONE),
            "name": name,
            "server": server.name,
            "server-status": "Ready",
            **_namespace(server, name).limits,
            "pipe-directory": str(self.pipes / server.name / name),
        }

    def _client_row(self, server: Server, namespace: str, pid: int) -> dict[str, str]:
        devices = range(len(self._uuids(server)) or 1)
        return {
            "pid": str(pid),
            "server": server.name,
            "device": " ".join(map(str, devices)),
            "pci-id": NONE,
            "linux-ns": _linux_namespace(pid),
            "maws-ns": namespace,
            "cmd": _command_line(pid),
        }


def _require(uid: int, allowed: Iterable[int], title: str) -> None:
    if uid not in allowed:
        raise CommandError(
            f"Insufficient privileges for UID {uid}. '{title}' requires server owner."
        )


def _namespace(server: Server, name: str) -> Namespace:
    if name not in server.namespaces:
        raise CommandError(f"no namespace '{name}' in server '{server.name}'")
    return server.namespaces[name]


def _remove(directory: Path) -> None:
    """Remove a server's or namespace's directory, with sockets that nobody listens at."""
    if not directory.is_dir():
        return
    for path in (*directory.glob(f"*/{SOCKET}"), directory / SOCKET):
        path.unlink(missing_ok=True)
    for path in (*directory.glob("*"), directory):
        with contextlib.suppress(OSError):  # it has files of others
            path.rmdir()


def _linux_namespace(pid: int) -> str:
    try:
        link = str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return NONE
    return link.removeprefix("pid:[").removesuffix("]")


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return NONE
    return os.fsdecode(raw.strip(b"\0").replace(b"\0", b" "))


def main() -> None:
    """Run until it is to quit, or its directory is gone."""
    serve(Daemon)
